"""What a process task receives, written for the archive in the same pass in which it is staged.

The files lie in the generation's own folder, and belong to no archive yet: they are put there when
the generation is settled (:mod:`.publication`), without what its broker delivers again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Self

import pyarrow as pa

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.errors import ConversionError
from airflow_broadway.core.model.message import DEFAULT, Message
from airflow_broadway.core.model.pipeline_options import Archive
from airflow_broadway.core.schema.plain import dump, dump_key
from airflow_broadway.core.text import cut, many
from airflow_broadway.staging.archive.layout import COLUMNS, HOUR
from airflow_broadway.staging.archive.metadata import texts_of
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import TableFiles, instants

log = logging.getLogger(__name__)

#: Messages are written when so many are held, or so many bytes of them.
GROUP_ROWS: Final = 16_384
GROUP_BYTES: Final = 8 * 1024 * 1024
#: Hours whose files are open at a time.
OPEN_FILES: Final = 32
#: Characters that are kept of why a message gave no time.
_WHY_LENGTH: Final = 300

_MICROSECONDS: Final = pa.int64()


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """The files that a generation has for the archive, as its manifest names them.

    :param files: For each its path in the run's folder, its hour from 1970, and its messages.
    :param untimed: Messages that gave no time, and are kept by ``received_at``; ``why``, of the
        first of them.
    :param again: Messages that were dead letters, with another id.
    """

    files: list[list[Any]] = field(default_factory=list)
    untimed: int = 0
    why: str = ""
    again: int = 0

    def to_json(self) -> dict[str, Any]:
        """A JSON value; empty if there is no file."""
        return asdict(self) if self.files else {}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Archived:
        """Read what :meth:`to_json` wrote."""
        return cls(**value)


class ArchiveWriter:
    """Writes messages by the hour of their time, from one thread; memory holds the next rows.

    :param folder: What paths are relative to.
    :param stem: The folder in it for the files.
    """

    def __init__(self, folder: Folder, stem: str, producer: Producer, options: Archive) -> None:
        self._folder = folder
        self._stem = stem
        self._producer = producer
        self._times = _Times(producer, options.time)
        self._messages: list[Message] = []
        self._bytes = 0
        self._files: dict[int, TableFiles] = {}
        self._open: set[int] = set()
        self._rows: dict[str, list[Any]] = {}
        self._told = False
        self._again = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def add(self, messages: Sequence[Message]) -> None:
        """Take messages as they were received, before any code of the user's sees them.

        :raises StagingError: If they cannot be written.
        """
        self._messages += messages
        self._bytes += sum([message.size for message in messages])
        if len(self._messages) >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._write()

    def close(self) -> Archived:
        """Finish all files, durably; safe to repeat.

        :raises StagingError: If they cannot be written.
        """
        self._write()
        for hour in list(self._open):
            self._close(hour)
        times, told = self._times, self._told
        self._told = True
        if times.untimed and not told:
            log.warning(
                "%s for the archive gave no time, and are kept by when they were received: %s.",
                many(times.untimed, "message"),
                times.why,
            )
        return Archived(
            files=list(self._rows.values()),
            untimed=times.untimed,
            why=times.why,
            again=self._again,
        )

    def abort(self) -> None:
        """Drop what is unfinished; safe to repeat."""
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
        table = table_of(messages, self._times.of(messages), self._producer)
        self._again += table.num_rows - table["was"].null_count
        for hour, part in by_hour(table):
            self._put(hour, part)

    def _put(self, hour: int, table: pa.Table) -> None:
        if hour not in self._open and len(self._open) >= OPEN_FILES:
            for each in list(self._open):  # which of them gets more, nobody knows
                self._close(each)
        if hour not in self._files:
            self._files[hour] = TableFiles(self._folder, f"{self._stem}/{hour}", COLUMNS)
        files = self._files[hour]
        self._open.add(hour)
        path = files.paths[files.write([table])]
        self._rows.setdefault(path, [path, hour, 0])[2] += table.num_rows


class NoArchive:
    """Keeps nothing: of a pipeline without an archive."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def add(self, messages: Sequence[Message]) -> None:
        """Pass them over."""

    def close(self) -> Archived:
        """There is no file."""
        return Archived()


class _Times:
    """The time by which each message is kept."""

    def __init__(self, producer: Producer, time: str | Callable[[Any], Any]) -> None:
        self._producer = producer
        self._function = time if callable(time) else None
        self._by_receipt = time == "received_at"
        self.untimed = 0
        self.why = ""

    def of(self, messages: Sequence[Message]) -> list[datetime]:
        if self._by_receipt:
            return [message.received_at for message in messages]
        return [self._time(message) for message in messages]

    def _time(self, message: Message) -> datetime:
        try:
            if self._function is None:
                found = self._producer.enqueued_at(message)
                if found is None:
                    raise ValueError("its broker does not say when it took the message")
            else:
                found = self._function(message)
            return _aware(found)
        except Exception as error:  # user code's; not KeyboardInterrupt, SystemExit
            self.untimed += 1
            if not self.why:
                self.why = cut(f"{type(error).__name__}: {error}", _WHY_LENGTH)
            return message.received_at


def _aware(found: object) -> datetime:
    if not isinstance(found, datetime):
        raise TypeError(f"expected an aware datetime, got: {found!r:.100}")
    if found.utcoffset() is None:
        raise ValueError(f"expected an aware datetime, got one without a time zone: {found!r:.100}")
    return found.astimezone(UTC)


def by_hour(table: pa.Table) -> Iterable[tuple[int, pa.Table]]:
    """A table of one row or more by the hours of its rows, each in the order of its rows."""
    micros = table["time"].cast(_MICROSECONDS)
    ends: Any = pc.min_max(micros).as_py()
    first, last = ends["min"] // HOUR, ends["max"] // HOUR
    if first == last:  # as it is with most receipts
        return [(first, table)]
    each_one: list[Any] = micros.to_pylist()
    hours = [each // HOUR for each in each_one]
    column = array_of(hours, _MICROSECONDS)
    return [(hour, table.filter(pc.equal(column, hour))) for hour in sorted(set(hours))]


def table_of(
    messages: Sequence[Message], times: Sequence[datetime], producer: Producer
) -> pa.Table:
    """Messages as rows of an archive."""
    payloads, forms = _payloads([message.data for message in messages])
    enqueued = producer.enqueued_at
    received = instants([message.received_at for message in messages])
    columns: dict[str, Any] = {
        "time": instants(times),
        "message_id": id_column([message.message_id for message in messages]),
        "payload": payloads,
        "form": forms,
        "metadata": texts_of([message.metadata for message in messages]),
        "received_at": received,
        "enqueued_at": instants([enqueued(message) for message in messages]),
        "batch_key": _keys([message.batch_key for message in messages]),
        "attempt": [message.attempt for message in messages],
        "redelivered": [message.redelivered for message in messages],
        "position": [message.position for message in messages],
        "size": [message.size for message in messages],
        "source": pa.repeat(producer.kind, len(messages)),
        "was": _were(messages, producer),
    }
    arrays = [
        array_of(column, each.type) if type(column) is list else column
        for each, column in ((each, columns[each.name]) for each in COLUMNS)
    ]
    return pa.Table.from_arrays(arrays, schema=COLUMNS)


def _were(messages: Sequence[Message], producer: Producer) -> Any:
    """The ids that messages had as dead letters; most were none."""
    if not any(message.redelivered for message in messages):
        return pa.nulls(len(messages), pa.string())
    # What was sent back is redelivered.
    return [producer.sent_back_as(each) if each.redelivered else None for each in messages]


def _payloads(data: list[Any]) -> tuple[list[bytes], Any]:
    if {*map(type, data)} == {bytes}:
        return data, pa.nulls(len(data), pa.string())
    payloads: list[bytes] = []
    forms: list[str | None] = []
    for each in data:
        if isinstance(each, (bytes, bytearray, memoryview)):
            payloads.append(bytes(each))
            forms.append(None)
        elif type(each) is str:
            payloads.append(each.encode("utf-8", "surrogatepass"))
            forms.append("text")
        else:
            payloads.append(_value(each).encode("utf-8"))
            forms.append("value")
    return payloads, forms


def _value(data: Any) -> str:
    """No broker delivers what is no plain value; of a test's, people see what it was."""
    try:
        return dump(data)
    except ConversionError:
        return dump(ascii(data))


def _keys(keys: list[Any]) -> Any:
    """The batch keys that brokers give; most give none."""
    texts: dict[Any, str | None] = {key: dump_key(key) for key in {*keys}}
    texts[DEFAULT] = None
    if len(texts) == 1:
        return pa.nulls(len(keys), pa.string())
    return [texts[key] for key in keys]


def id_column(ids: list[str]) -> Any:
    """Ids as a column; what UTF-8 cannot encode is written as its escape."""
    try:
        return array_of(ids, pa.string())
    except UnicodeEncodeError:
        escaped = [each.encode("utf-8", "backslashreplace").decode("utf-8") for each in ids]
        return array_of(escaped, pa.string())
