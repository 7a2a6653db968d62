"""Writes the messages of a generation as received; the dead-letter table has their payloads.

A payload that staging keeps anyway, for a broker that republishes, is not written again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, Self

import pyarrow as pa

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats.layout import VERSION
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.schema.encoding import dump
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.batch_reader import open_staged
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import TIMESTAMP, TableFiles, timestamps

log = logging.getLogger(__name__)

#: Number of buffered messages, and of their bytes, at which they are written.
_GROUP_ROWS, _GROUP_BYTES = 16_384, 8 * 1024 * 1024
_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("message_id", pa.string(), nullable=False),
    pa.field("payload", pa.binary()),
    pa.field("enqueued_at", TIMESTAMP),
    pa.field("received_at", TIMESTAMP, nullable=False),
]
_COLUMNS: Final = pa.schema(_FIELDS, metadata={b"airflow-broadway.version": str(VERSION).encode()})


class ReceivedWriter:
    """Writes messages before any user code handles them, from one thread; buffers one row group."""

    def __init__(self, folder: Folder, stem: str, producer: Producer) -> None:
        self._files = TableFiles(folder, stem, _COLUMNS)
        self._producer = producer
        self._messages: list[Message] = []
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._files.abort()

    def add(self, messages: Sequence[Message]) -> None:
        """Adds messages as received.

        :raises StagingError: If they cannot be written.
        """
        self._messages += messages
        self._bytes += sum(message.size for message in messages)
        if len(self._messages) >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._write()

    def close(self) -> list[str]:
        """Finishes the files durably, and returns their paths; idempotent.

        :raises StagingError: If they cannot be written.
        """
        self._write()
        self._files.close()
        return self._files.paths

    def _write(self) -> None:
        messages, self._messages, self._bytes = self._messages, [], 0
        if messages:
            columns = [
                array_of([plain_text(message.message_id) for message in messages], pa.string()),
                array_of([_payload_of(message) for message in messages], pa.binary()),
                timestamps([self._enqueued_at(message) for message in messages]),
                timestamps([message.received_at for message in messages]),
            ]
            self._files.write([pa.Table.from_arrays(columns, schema=_COLUMNS)])

    def _enqueued_at(self, message: Message) -> datetime | None:
        try:
            return self._producer.enqueued_at(message)
        except (OverflowError, TypeError, ValueError):  # the sender may have set it
            return None


def received_rows(
    run: StagedRun, paths: Sequence[str], ids: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yields selected messages of a generation as received; skips a file that is damaged.

    :param ids: Message ids, as :func:`plain_text`.
    """
    wanted = array_of(sorted(ids), pa.string())
    for path in paths:
        try:
            with open_staged(run, path) as file:
                for group in range(file.groups):
                    selected = pc.is_in(file.read(group, ["message_id"])[0], value_set=wanted)
                    if pc.any(selected).as_py():
                        yield from file.read(group).filter(selected).to_pylist()
        except StagingDamaged as error:
            log.error("Payloads of dead letters are lost: %s", error)


def plain_text(text: str) -> str:
    """Returns text as any table can store it: without surrogates and NUL."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def _payload_of(message: Message) -> bytes | None:
    """Returns the payload, unless staging keeps it with the message's delivery."""
    delivery, data = message.acknowledger.data, message.data
    if data is None or (isinstance(delivery, Delivery) and delivery.payload is not None):
        return None
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    return (data if type(data) is str else dump(data)).encode("utf-8", "surrogatepass")
