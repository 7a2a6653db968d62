"""What a process task stages: messages for batchers as Parquet, all others as lines of verdicts.

Everything is streamed: a batcher holds one row group's worth of messages, whatever the run's size.
Nothing counts until the manifest that names the files is published.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pyarrow as pa

from airflow_broadway.core.custody.acknowledger import is_settled
from airflow_broadway.core.custody.protocol import Delivery, Entry
from airflow_broadway.core.formats.entries import dump_entry
from airflow_broadway.core.formats.sums import Summing
from airflow_broadway.core.model.message import BatchMode, Message
from airflow_broadway.core.schema.ddl import Schema, parse_schema
from airflow_broadway.core.stages.staged_row import Rows, StagedRow
from airflow_broadway.staging.arrow_schema import array_of, columns_from_rows
from airflow_broadway.staging.errors import translated
from airflow_broadway.staging.store import Folder, Sink
from airflow_broadway.staging.tables import FILE_BYTES, INSTANT, TableFile, message_schema

if TYPE_CHECKING:
    from airflow_broadway.core.model.pipeline import Pipeline
    from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["ProcessWriter", "Written"]

#: A row group holds at most so many messages, and about so many bytes.
GROUP_ROWS = 16_384
GROUP_BYTES = 8 * 1024 * 1024

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_PLAIN = Delivery()


class Written(NamedTuple):
    """What a writer wrote, in the words of :class:`Manifest`.

    :param entries: Files of entries.
    :param entry_count: Lines in them.
    :param sums: Lines, bytes and SHA-256 of each file of entries.
    """

    batchers: dict[str, int]
    files: dict[str, list[str]]
    entries: list[str]
    configured: bool
    dropped: dict[str, int]
    entry_count: int
    sums: dict[str, dict[str, Any]]


class ProcessWriter:
    """Writes the files of one generation.

    Leave it as a context, or call :meth:`close`; without either its files stay unfinished, and
    nothing refers to them.
    """

    def __init__(self, run: StagedRun, generation: str, pipeline: Pipeline) -> None:
        self._files: Folder = run.files
        self._generation = generation
        self._rows = Rows(pipeline)
        self._parts = {
            name: _Parts(self._files, f"{generation}/messages/{name}", pipeline, name)
            for name in pipeline.batchers
        }
        self._publishes = pipeline.producer.publishes
        self._entries = _Entries(self._files, f"{generation}/failed-00000.jsonl")
        self._written: Written | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def messages(self, chunk: int, messages: Sequence[Message]) -> None:
        """Stage the successes of one chunk, in order, each for its batcher.

        They come from :class:`Rows`; one that does not is converted now.

        :param chunk: The chunk's number: ascending in order of arrival within the generation.
        :raises ConversionError: If a message that :class:`Rows` has not seen cannot be converted.
        :raises StagingError: If the files cannot be written.
        """
        for message in messages:
            row = message.data
            if type(row) is not StagedRow:
                row = self._rows.row(message)
            part = self._parts[message.batcher]
            part.messages.append(message)
            part.staged.append(row)
            part.chunks.append(chunk)
            data = row[0]
            part.bytes += message.size if type(data) is tuple else max(len(data), message.size)
            if part.bytes >= GROUP_BYTES or len(part.messages) >= GROUP_ROWS:
                part.write()

    def entry(self, entry: Entry, *, settled: bool = False) -> None:
        """Stage the verdict on a message that no batcher gets; from any thread.

        :param settled: A callback settled it at once.
        """
        self.entries([entry], settled=settled)

    def entries(self, entries: Iterable[Entry], *, settled: bool = False) -> None:
        """The same for several."""
        lines = [
            dump_entry(entry if entry.payload is None else self._needed(entry), settled=settled)
            for entry in entries
        ]
        self._entries.add(lines)

    def _needed(self, entry: Entry) -> Entry:
        """The entry, without its body where its verdict publishes nothing."""
        if self._publishes(entry.verdict.action):
            return entry
        return entry._replace(payload=None, properties=None)

    def close(self) -> Written:
        """Finish all files, durably; safe to repeat.

        :raises StagingError: If they cannot be written.
        """
        if self._written is None:
            try:
                for parts in self._parts.values():
                    parts.close()
                self._entries.close()
            except BaseException:
                self.abort()
                raise
            used = {name: parts for name, parts in self._parts.items() if parts.rows}
            dropped: Counter[str] = Counter()
            for parts in used.values():
                dropped.update(parts.dropped)
            self._written = Written(
                {name: parts.rows for name, parts in used.items()},
                {name: parts.paths for name, parts in used.items()},
                [self._entries.path] if self._entries.summing.lines else [],
                any(parts.configured for parts in used.values()),
                dict(dropped),
                self._entries.summing.lines,
                {self._entries.path: self._entries.summing.to_json()}
                if self._entries.summing.lines
                else {},
            )
        return self._written

    def abort(self) -> None:
        """Drop what is unfinished; safe to repeat."""
        for parts in self._parts.values():
            parts.abort()
        self._entries.abort()


class _Parts:
    """The message files of one batcher."""

    def __init__(self, files: Folder, folder: str, pipeline: Pipeline, batcher: str) -> None:
        options, producer = pipeline.batchers[batcher], pipeline.producer
        self.paths: list[str] = []
        self.rows = 0
        self.configured = False
        self.dropped: Counter[str] = Counter()
        self._files = files
        self._folder = folder
        self._arrow = message_schema(options, producer)
        self._schema: Schema | None = (
            None if options.schema is None else parse_schema(options.schema)
        )
        self._producer = producer
        self._plain_kept: bool = producer.may_publish(_PLAIN)
        # What a callback may still configure otherwise, nobody knows by now.
        self._all_kept = options.engine == "python" or pipeline.defines("handle_failed")
        self._file: TableFile | None = None
        self._clear()

    def _clear(self) -> None:
        # What waits for the next row group.
        self.messages: list[Message] = []
        self.staged: list[StagedRow] = []
        self.chunks: list[int] = []
        self.bytes = 0

    def write(self) -> None:
        table = self._table()
        self._clear()
        if self._file is None:
            path = f"{self._folder}/part-{len(self.paths):05d}.parquet"
            self._file = TableFile(self._files, path, self._arrow)
            self.paths.append(path)
        self._file.write(table)
        self.rows += table.num_rows
        if self._file.bytes >= FILE_BYTES:
            self._finish()

    def _finish(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.commit()

    def close(self) -> None:
        if self.messages:
            self.write()
        self._finish()

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.abort()

    def _is_kept(self, delivery: Delivery) -> bool:
        """Whether settling the message may need its body."""
        if self._all_kept:
            return True
        if delivery.on_success is None and delivery.on_failure is None:
            return self._plain_kept
        kept: bool = self._producer.may_publish(delivery)
        return kept

    def _table(self) -> pa.Table:
        messages, staged = self.messages, self.staged
        acks = [message.acknowledger for message in messages]
        deliveries: list[Delivery] = [
            ack.data if type(ack.data) is Delivery else _PLAIN for ack in acks
        ]
        data = [row.data for row in staged]
        columns: dict[str, Any] = {
            "message_id": [message.message_id for message in messages],
            "batch_key": [row.key for row in staged],
            "flush": [message.batch_mode is BatchMode.FLUSH for message in messages],
            "partition": [row.partition for row in staged],
            "metadata": _maps([row.metadata for row in staged]),
            "attempt": [message.attempt for message in messages],
            "redelivered": [message.redelivered for message in messages],
            "received_at": _instants(messages),
            "position": [message.position for message in messages],
            "chunk": self.chunks,
            "size": [message.size for message in messages],
            "_receipt": [delivery.receipt for delivery in deliveries],
            "_on_success": [delivery.on_success for delivery in deliveries],
            "_on_failure": [delivery.on_failure for delivery in deliveries],
            "_acked": [is_settled(message) for message in messages],
        }
        if self._schema is not None:
            columns["data"] = columns_from_rows(data, self._schema)
        else:
            columns["data_bytes"] = [each if type(each) is bytes else None for each in data]
            columns["data_json"] = [None if type(each) is bytes else each for each in data]
        for row in staged:
            if row.dropped is not None:
                self.dropped.update(row.dropped)
        if not self.configured:
            own = (*columns["_on_success"], *columns["_on_failure"])
            self.configured = any(name is not None for name in own)
        if self._producer.keeps_payload:
            kept = [each if self._is_kept(each) else _PLAIN for each in deliveries]
            columns["_payload"] = [delivery.payload for delivery in kept]
            columns["_properties"] = [delivery.properties for delivery in kept]
        arrays = [
            array_of(column, field.type) if type(column) is list else column
            for field, column in ((field, columns[field.name]) for field in self._arrow)
        ]
        return pa.Table.from_arrays(arrays, schema=self._arrow)


def _instants(messages: list[Message]) -> pa.Array[Any]:
    values: list[int] = []
    last: datetime | None = None
    microseconds = 0
    for message in messages:
        if message.received_at is not last:  # one receive gives many messages one instant
            last = message.received_at
            microseconds = (last - _EPOCH) // _MICROSECOND
        values.append(microseconds)
    instants: pa.Array[Any] = array_of(values, pa.int64()).view(INSTANT)
    return instants


def _maps(rows: list[dict[str, str]]) -> pa.Array[Any]:
    offsets: list[int] = [0]
    keys: list[str] = []
    items: list[str] = []
    for row in rows:
        if row:
            keys.extend(row)
            items.extend(row.values())
        offsets.append(len(keys))
    text = pa.string()
    start: Any = array_of(offsets, pa.int32())
    given = array_of(keys, text), array_of(items, text)
    made: pa.Array[Any] = pa.MapArray.from_arrays(start, *given)
    return made


class _Entries:
    """The file of entries; made when there is one."""

    def __init__(self, files: Folder, path: str) -> None:
        self.path = path
        self.summing = Summing()
        self._files = files
        self._sink: Sink | None = None
        self._lock = threading.Lock()

    def add(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        raw = ("\n".join(lines) + "\n").encode()
        with self._lock:
            if self._sink is None:
                self._sink = self._files.sink(self.path)
            with translated(f"write {self.path}", self._files.store.uri):
                self._sink.file.write(raw)
            self.summing.add(raw, len(lines))

    def close(self) -> None:
        with self._lock:
            sink, self._sink = self._sink, None
            if sink is not None:
                with translated(f"write {self.path}", self._files.store.uri):
                    try:
                        sink.commit()
                    finally:
                        sink.abort()

    def abort(self) -> None:
        with self._lock:
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.abort()
