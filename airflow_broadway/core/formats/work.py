"""The work of one Spark application: what its driver is to do."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from airflow_broadway.core.formats.layout import VERSION, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one Spark application is to do: all that the driver needs, and no secret.

    It names a class to load.  So its :attr:`digest` goes to the driver on the command line: whoever
    can write into the staging folder does not thereby decide which code runs.

    :param name: The task's name in the staging folder.
    :param try_number: Which try of it this is; a higher one takes ownership.
    :param pipeline: The pipeline's reference.
    :param run: :class:`RunInfo` as JSON.
    :param plans: Paths of plans, in order.
    :param only: Ids of the batches to run, in this order; ``None``: all without an outcome.
    :param alone: Whether they run one after another, so that a death tells of which it was.
    :param marked: Whether each is marked before it begins, since something died before.
    :param parent: The execution of the task that starts it, and can tell that it died.
    :param package_version: This package's version, which the driver must have too.
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
        """Return it as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """The SHA-256 of :meth:`dumps`, in hexadecimal."""
        return digest_of(self.dumps())

    @classmethod
    def loads(cls, text: str, path: str) -> Work:
        """Read what :meth:`dumps` wrote; errors as of :func:`read_json`."""
        return load(cls, text, path)


def digest_of(text: str) -> str:
    """The SHA-256 of a file's text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
