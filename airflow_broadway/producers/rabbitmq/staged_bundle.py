"""Bundles of staged custody: the messages lie in the staging folder, a reference in the broker."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.bundle import BundleError, Header, Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, digest

__all__ = ["load_staged", "store_staged"]

#: The names that bundles are given.
_NAME = re.compile(r"[0-9a-f]+\.[0-9a-f]+")


def load_staged(header: Header, journal: QueueJournal) -> list[Held]:
    """The messages that a bundle of staged custody refers to.

    Anybody who may publish can have written the header: so only the file of that generation and
    bundle is read, and only if it has the size that the header says.

    :raises BundleError: If the file is missing or is not what was written.
    :raises StagingError: If the staging folder cannot be read now.
    """
    staged = header.staged or {}
    name = _staged_name(header.generation, header.bundle)
    if name is None or not str(staged["path"]).endswith(f"/{name}"):
        raise BundleError(
            f"a bundle refers to {staged['path']!r}, which is not the file of its generation and"
            " name: it is not read"
        )
    size = journal.files.size(name)
    if size is None:
        raise BundleError(f"the staged bundle {staged['path']} is missing")
    data = journal.files.get(name) if size == staged["bytes"] else b""
    if hashlib.sha256(data).hexdigest() != staged["sha256"]:
        raise BundleError(f"the staged bundle {staged['path']} is not what was written")
    messages = list(bundles.unpack_messages(data))
    if len(messages) != header.count:
        raise BundleError(f"the staged bundle {staged['path']} lacks messages")
    return messages


def _staged_name(generation: str, bundle: str) -> str | None:
    """The file of a bundle of staged custody; ``None`` if it is none of our names."""
    return f"{digest(generation)}/{bundle}.bundle" if _NAME.fullmatch(bundle) else None


def store_staged(
    journal: QueueJournal, generation: str
) -> Callable[[str, bytes], dict[str, object]]:
    """What keeps the messages of staged custody; it raises StagingError where it cannot."""

    def store(name: str, data: bytes) -> dict[str, object]:
        if not journal.files.durable:
            raise StagingError("custody='staged' needs a staging folder")
        path = journal.files.put(str(_staged_name(generation, name)), data)
        return {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    return store
