"""Writes the messages that a process task receives for the archive, while it stages them.

The files are in the generation's own folder.  At the settlement of the generation
:mod:`.publication` adds them to the archive, without messages that the broker will redeliver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Self

import pyarrow as pa

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.errors import ConversionError
from airflow_broadway.core.model.message import DEFAULT, Message
from airflow_broadway.core.model.pipeline_options import Archive
from airflow_broadway.core.schema.encoding import dump, dump_key
from airflow_broadway.core.text import cut, pluralize
from airflow_broadway.staging.archive.metadata import texts_of
from airflow_broadway.staging.archive.table import (
    COLUMNS,
    HOUR,
    DataFile,
    import_deltalake,
    stats_of,
)
from airflow_broadway.staging.arrow_schema import array_of, table_of_columns
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import TableFiles, timestamps

log = logging.getLogger(__name__)

#: Number of buffered messages, and of their bytes, at which they are written.
GROUP_ROWS: Final = 16_384
GROUP_BYTES: Final = 8 * 1024 * 1024
#: Maximum number of hours with an open file.
OPEN_FILES: Final = 32
#: Maximum characters of the reason why a message has no time.
_REASON_LENGTH: Final = 300

_MICROSECONDS: Final = pa.int64()


class ArchiveWriter:
    """Writes messages by the hour of their time, from one thread; buffers one row group.

    :param folder: The folder that paths are relative to.
    :param stem: The subfolder for the files.
    :raises StagingError: If the archive's client is missing.
    """

    def __init__(self, folder: Folder, stem: str, producer: Producer, options: Archive) -> None:
        import_deltalake(folder.store)
        self._folder = folder
        self._stem = stem
        self._producer = producer
        self._times = _Times(producer, options.time)
        self._messages: list[Message] = []
        self._bytes = 0
        self._files: dict[int, TableFiles] = {}
        self._open: set[int] = set()
        self._warned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def add(self, messages: Sequence[Message]) -> None:
        """Adds messages as received, before any user code handles them.

        :raises StagingError: If they cannot be written.
        """
        self._messages += messages
        self._bytes += sum([message.size for message in messages])
        if len(self._messages) >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._write()

    def close(self) -> list[DataFile]:
        """Finishes all files durably and returns them; idempotent.

        :raises StagingError: If they cannot be written.
        """
        self._write()
        for hour in list(self._open):
            self._close(hour)
        times, warned = self._times, self._warned
        self._warned = True
        if times.untimed and not warned:
            log.warning(
                "%s for the archive had no time, and are archived by their time of receipt: %s.",
                pluralize(times.untimed, "message"),
                times.reason,
            )
        return data_files(self._files)

    def abort(self) -> None:
        """Discards unfinished files; idempotent."""
        for files in self._files.values():
            files.abort()
        self._open.clear()

    def _close(self, hour: int) -> None:
        self._files[hour].close()
        self._open.discard(hour)

    def _write(self) -> None:
        messages, self._messages, self._bytes = self._messages, [], 0
        if not messages:
            return
        times = self._times.of(messages)
        table = table_of(messages, times, self._producer, self._times.reasons)
        for hour, part in by_hour(table):
            self._put(hour, part)

    def _put(self, hour: int, table: pa.Table) -> None:
        if hour not in self._open and len(self._open) >= OPEN_FILES:
            for open_hour in list(self._open):  # any of them may get more rows
                self._close(open_hour)
        if hour not in self._files:
            self._files[hour] = TableFiles(self._folder, f"{self._stem}/{hour}", COLUMNS)
        self._open.add(hour)
        self._files[hour].write([table])


def data_files(files: Mapping[int, TableFiles]) -> list[DataFile]:
    """Returns the finished files of each hour."""
    return [
        DataFile(path, hour, footer.num_rows, size, stats_of(footer))
        for hour, written in files.items()
        for path, size, footer in zip(written.paths, written.sizes, written.footers, strict=True)
    ]


class _Times:
    """Determines the time by which each message is archived."""

    def __init__(self, producer: Producer, time: str | Callable[[Any], Any]) -> None:
        self._producer = producer
        self._function = time if callable(time) else None
        self._by_receipt = time == "received_at"
        self.untimed = 0
        self.reason = ""
        #: Of the last messages: ``reason`` for those without a time; empty if all have one.
        self.reasons: list[str | None] = []

    def of(self, messages: Sequence[Message]) -> list[datetime]:
        if self._by_receipt:
            return [message.received_at for message in messages]
        before, self.reasons = self.untimed, []
        times = [self._time(message) for message in messages]
        if self.untimed == before:
            self.reasons = []
        return times

    def _time(self, message: Message) -> datetime:
        try:
            if self._function is None:
                time = self._producer.enqueued_at(message)
                if time is None:
                    raise ValueError("its broker does not report the time of enqueueing")
            else:
                time = self._function(message)
            time = _to_utc(time)
        except Exception as error:  # errors of user code; not KeyboardInterrupt, SystemExit
            self.untimed += 1
            if not self.reason:
                self.reason = cut(f"{type(error).__name__}: {error}", _REASON_LENGTH)
            self.reasons.append(self.reason)
            return message.received_at
        self.reasons.append(None)
        return time


def _to_utc(time: object) -> datetime:
    if not isinstance(time, datetime):
        raise TypeError(f"expected an aware datetime, got: {time!r:.100}")
    if time.utcoffset() is None:
        raise ValueError(f"expected an aware datetime, got one without a time zone: {time!r:.100}")
    return time.astimezone(UTC)


def by_hour(table: pa.Table) -> Iterable[tuple[int, pa.Table]]:
    """Splits a non-empty table by the hours of its rows, preserving their order."""
    micros = table["time"].cast(_MICROSECONDS)
    ends: Any = pc.min_max(micros).as_py()
    first, last = ends["min"] // HOUR, ends["max"] // HOUR
    if first == last:  # the common case
        return [(first, table)]
    each_one: list[Any] = micros.to_pylist()
    hours = [timestamp // HOUR for timestamp in each_one]
    column = array_of(hours, _MICROSECONDS)
    return [(hour, table.filter(pc.equal(column, hour))) for hour in sorted(set(hours))]


def table_of(
    messages: Sequence[Message],
    times: Sequence[datetime],
    producer: Producer,
    reasons: list[str | None],
) -> pa.Table:
    """Converts messages to rows of an archive.

    :param reasons: Why they have no time of their own; empty if all have one.
    """
    payloads, forms = _encode_payloads([message.data for message in messages])
    enqueued = producer.enqueued_at
    received = timestamps([message.received_at for message in messages])
    columns: dict[str, Any] = {
        "time": timestamps(times),
        "message_id": id_column([message.message_id for message in messages]),
        "payload": payloads,
        "form": forms,
        "metadata": texts_of([message.metadata for message in messages]),
        "received_at": received,
        "enqueued_at": timestamps([enqueued(message) for message in messages]),
        "batch_key": _encode_keys([message.batch_key for message in messages]),
        "attempt": [message.attempt for message in messages],
        "redelivered": [message.redelivered for message in messages],
        "position": [message.position for message in messages],
        "size": [message.size for message in messages],
        "source": pa.repeat(producer.kind, len(messages)),
        "was": _former_ids(messages, producer),
        "untimed": reasons or pa.nulls(len(messages), pa.string()),
    }
    return table_of_columns(columns, COLUMNS)


def _former_ids(messages: Sequence[Message], producer: Producer) -> Any:
    """Returns the former ids of messages that were dead letters."""
    if not any(message.redelivered for message in messages):
        return pa.nulls(len(messages), pa.string())
    # Requeued dead letters are marked as redelivered.
    return [producer.sent_back_as(message) if message.redelivered else None for message in messages]


def _encode_payloads(data: list[Any]) -> tuple[list[bytes], Any]:
    if {*map(type, data)} == {bytes}:
        return data, pa.nulls(len(data), pa.string())
    payloads: list[bytes] = []
    forms: list[str | None] = []
    for value in data:
        if isinstance(value, (bytes, bytearray, memoryview)):
            payloads.append(bytes(value))
            forms.append(None)
        elif type(value) is str:
            payloads.append(value.encode("utf-8", "surrogatepass"))
            forms.append("text")
        else:
            payloads.append(_encode_value(value).encode("utf-8"))
            forms.append("value")
    return payloads, forms


def _encode_value(data: Any) -> str:
    """Encodes a plain value, or any other by its ``ascii()``, which occurs only in tests."""
    try:
        return dump(data)
    except ConversionError:
        return dump(ascii(data))


def _encode_keys(keys: list[Any]) -> Any:
    """Converts batch keys set by brokers to a column; most brokers set none."""
    texts: dict[Any, str | None] = {key: dump_key(key) for key in {*keys}}
    texts[DEFAULT] = None
    if len(texts) == 1:
        return pa.nulls(len(keys), pa.string())
    return [texts[key] for key in keys]


def id_column(ids: list[str]) -> Any:
    """Converts ids to a column; escapes characters that UTF-8 cannot encode."""
    try:
        return array_of(ids, pa.string())
    except UnicodeEncodeError:
        escaped = [text.encode("utf-8", "backslashreplace").decode("utf-8") for text in ids]
        return array_of(escaped, pa.string())
