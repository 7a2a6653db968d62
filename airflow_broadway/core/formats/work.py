"""The work of one Spark application: what its driver is to do."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from airflow_broadway.core.formats.layout import VERSION, read_json

__all__ = ["Work", "digest_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one Spark application is to do: all that the driver needs, and no secret.

    It names a class, so its :attr:`digest` goes to the driver on the command line: who may write
    into the staging folder decides nothing about the code that runs.

    :param name: The task's name in the staging folder; with ``try_number`` the fence.
    :param pipeline: The pipeline's reference.
    :param run: :class:`RunInfo` as JSON.
    :param plans: Paths of plans, in order.
    :param package_version: This package's version, logged by the driver.
    """

    name: str
    try_number: int
    pipeline: dict[str, Any]
    run: dict[str, Any]
    plans: list[str]
    package_version: str = ""
    version: int = VERSION

    def dumps(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        """The SHA-256 of :meth:`dumps`, in hexadecimal."""
        return digest_of(self.dumps())

    @classmethod
    def loads(cls, text: str, path: str) -> Work:
        return cls(**read_json(text, path))


def digest_of(text: str) -> str:
    """The SHA-256 of a file's text, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
