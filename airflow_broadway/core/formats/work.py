"""The work of one Spark application, as passed to its driver."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from airflow_broadway.core.formats.layout import VERSION, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one Spark application: everything that its driver needs, and no secret.

    It names a class to load, so its :attr:`digest` is passed to the driver on the command line:
    write access to the staging folder must not be enough to choose the code that runs.

    :param name: The task's name in the staging folder.
    :param try_number: The number of this try; a higher one takes ownership.
    :param pipeline: The pipeline's reference.
    :param run: :class:`RunInfo` as JSON.
    :param plans: Paths of plans, in order.
    :param only: Ids of the batches to run, in this order; ``None``: all without an outcome.
    :param alone: Whether they run one after another, so that a death identifies its batch.
    :param marked: Whether each is marked before it begins, after an earlier death.
    :param parent: The execution of the task that starts it, and that can observe its death.
    :param package_version: This package's version, which the driver must match.
    """

    name: str
    try_number: int
    pipeline: dict[str, Any]
    run: dict[str, Any]
    plans: list[str]
    only: list[str] | None = None
    alone: bool = False
    marked: bool = False
    parent: str = ""
    package_version: str = ""
    version: int = VERSION

    def dumps(self) -> str:
        """Returns it as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """The SHA-256 of :meth:`dumps`, in hexadecimal."""
        return digest_of(self.dumps())

    @classmethod
    def loads(cls, text: str, path: str) -> Work:
        """Reads what :meth:`dumps` wrote; errors as in :func:`read_json`."""
        return load(cls, text, path)


def digest_of(text: str) -> str:
    """Returns the SHA-256 of a file's text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
