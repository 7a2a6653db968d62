"""Writes the files of a process task: messages for batchers as Parquet, verdicts as JSON lines.

Everything is streamed: memory holds one row group of messages per batcher at any size of the run.
Nothing counts until the manifest that names the files is published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Self

from airflow_broadway.core.custody.protocol import Delivery, Entry
from airflow_broadway.core.formats.entries import dump_entry
from airflow_broadway.core.formats.manifest import Staged
from airflow_broadway.core.formats.sums import Summing
from airflow_broadway.core.model.acks import is_settled
from airflow_broadway.core.model.message import BatchMode, Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.schema.ddl import parse_schema
from airflow_broadway.core.stages.staged_row import StagedRow
from airflow_broadway.staging.errors import translated
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Folder, Sink

#: Maximum messages of a row group, and approximate maximum bytes.
GROUP_ROWS = 16_384
GROUP_BYTES = 8 * 1024 * 1024
#: Messages converted to columns at a time: long-lived objects cost the garbage collector and the
#: processor's caches as much as the conversion itself.
_CONVERT_ROWS = 1_000

_PLAIN = Delivery()


class ProcessWriter:
    """Writes the files of one generation, from one thread.

    Use it as a context manager, or call :meth:`close`; otherwise its files stay unfinished and
    unreferenced.
    """

    def __init__(self, run: StagedRun, generation: str, pipeline: Pipeline) -> None:
        self._publishes = pipeline.producer.publishes
        self._batchers: dict[str, _MessageFiles] = {}
        self._open = partial(_MessageFiles, run.files, f"{generation}/messages", pipeline)
        self._names = list(pipeline.batchers)
        self._entries = _EntriesFile(run.files, f"{generation}/failed-00000.jsonl")
        self._chunk = 0
        self._written: Staged | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def messages(self, messages: Sequence[Message]) -> None:
        """Stages the successful messages of the next chunk, in order, each for its batcher.

        :param messages: Messages converted by :class:`.RowConverter`.
        :raises StagingError: If the files cannot be written.
        """
        if messages and not self._batchers:
            self._batchers = {name: self._open(name) for name in self._names}
        for message in messages:
            self._batchers[message.batcher].add(message, self._chunk)
        self._chunk += 1

    @property
    def counts(self) -> dict[str, int]:
        """Number of messages staged so far, per batcher."""
        counts = {name: files.rows + files.held for name, files in self._batchers.items()}
        return {name: count for name, count in counts.items() if count}

    def entries(self, entries: Iterable[Entry], *, settled: bool = False) -> None:
        """Stages the verdicts of messages without a batcher.

        :param settled: Whether callbacks settled these messages immediately.
        :raises StagingError: If the file cannot be written.
        """
        self._entries.add([dump_entry(self._reduce(entry), settled=settled) for entry in entries])

    def _reduce(self, entry: Entry) -> Entry:
        """Drops the payload of an entry whose verdict publishes nothing."""
        if entry.payload is None or self._publishes(entry.verdict.action):
            return entry
        return entry._replace(payload=None, properties=None)

    def close(self) -> Staged:
        """Finishes all files durably; idempotent.

        :raises StagingError: If they cannot be written.
        """
        if self._written is None:
            try:
                for files in self._batchers.values():
                    files.close()
                self._entries.close()
            except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
                self.abort()
                raise
            self._written = self._summary()
        return self._written

    def _summary(self) -> Staged:
        used = {name: files for name, files in self._batchers.items() if files.rows}
        dropped: Counter[str] = Counter()
        for files in used.values():
            dropped.update(files.dropped)
        summing = self._entries.summing
        sums = {self._entries.path: summing.to_json()} if summing.lines else {}
        return Staged(
            batchers={name: files.rows for name, files in used.items()},
            files={name: files.paths for name, files in used.items()},
            entries=list(sums),
            configured=any(files.configured for files in used.values()),
            dropped=dict(dropped),
            sums=sums,
        )

    def abort(self) -> None:
        """Discards unfinished files; idempotent."""
        for files in self._batchers.values():
            files.abort()
        self._entries.abort()


class NoMessages:
    """Discards messages: of a pipeline without an archive, or without a dead-letter table."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def add(self, messages: Sequence[Message]) -> None:
        """Discards the messages."""

    def close(self) -> list[Any]:
        """Returns no files."""
        return []


class _MessageFiles:
    """The message files of one batcher; memory holds the next row group, as columns."""

    def __init__(self, folder: Folder, stem: str, pipeline: Pipeline, batcher: str) -> None:
        # They load pyarrow.
        from airflow_broadway.staging.tables import TableFiles, message_schema

        options, producer = pipeline.batchers[batcher], pipeline.producer
        self.rows = 0
        #: Whether a callback configured the settlement of any message.
        self.configured = False
        self.dropped: Counter[str] = Counter()
        self._columns = message_schema(options, producer)
        self._files = TableFiles(folder, f"{stem}/{batcher}/part", self._columns)
        self._schema = None if options.schema is None else parse_schema(options.schema)
        self._producer = producer
        self._keep_plain: bool = producer.may_publish(_PLAIN)
        # A callback of a later task may still configure the settlement of such a message.
        self._keep_all = options.engine == "python" or pipeline.defines("handle_failed")
        #: Messages not yet converted to columns.
        self._messages: list[Message] = []
        self._chunks: list[int] = []
        self._clear()

    def _clear(self) -> None:
        self._values: dict[str, list[Any]] = {}
        #: Number of messages in the next row group, and their bytes.
        self.held = 0
        self._bytes = 0

    def add(self, message: Message, chunk: int) -> None:
        """Adds a message whose data is a :class:`StagedRow`."""
        self._messages.append(message)
        self._chunks.append(chunk)
        self.held += 1
        data = message.data.data
        size = 0 if data is None or type(data) is tuple else len(data)
        self._bytes += max(size, message.size)
        if self._bytes >= GROUP_BYTES or self.held >= GROUP_ROWS:
            self._write()
        elif len(self._messages) >= _CONVERT_ROWS:
            self._take()

    def _write(self) -> None:
        """Writes the buffered messages as one row group."""
        self._take()
        table = self._table()
        self._clear()
        self._files.write([table])
        self.rows += table.num_rows

    def close(self) -> None:
        if self.held:
            self._write()
        self._files.close()

    def abort(self) -> None:
        self._files.abort()

    @property
    def paths(self) -> list[str]:
        return self._files.paths

    def _take(self) -> None:
        """Converts the buffered messages to columns."""
        messages, chunks = self._messages, self._chunks
        self._messages, self._chunks = [], []
        rows: list[StagedRow] = [message.data for message in messages]
        for row in rows:
            if row.dropped is not None:
                self.dropped.update(row.dropped)
        columns: dict[str, list[Any]] = {
            "message_id": [message.message_id for message in messages],
            "data": [row.data for row in rows],
            "batch_key": [row.key for row in rows],
            "flush": [message.batch_mode is BatchMode.FLUSH for message in messages],
            "partition": [row.partition for row in rows],
            "metadata": [row.metadata for row in rows],
            "attempt": [message.attempt for message in messages],
            "redelivered": [message.redelivered for message in messages],
            "received_at": [message.received_at for message in messages],
            "position": [message.position for message in messages],
            "chunk": chunks,
            "size": [message.size for message in messages],
            **self._custody(messages),
        }
        for name, values in columns.items():
            self._values.setdefault(name, []).extend(values)

    def _table(self) -> Any:
        from airflow_broadway.staging.arrow_schema import table_of_columns
        from airflow_broadway.staging.tables import maps, timestamps

        values = self._values
        columns: dict[str, Any] = {
            **values,
            **self._data(values["data"]),
            "metadata": maps(values["metadata"]),
            "received_at": timestamps(values["received_at"]),
        }
        return table_of_columns(columns, self._columns)

    def _data(self, data: list[Any]) -> dict[str, Any]:
        """Returns the data columns: one with a schema, else one of bytes and one of JSON.

        If both are null the data is ``None``, for example of a Kafka tombstone.
        """
        if self._schema is not None:
            from airflow_broadway.staging.arrow_schema import columns_from_rows

            return {"data": columns_from_rows(data, self._schema)}
        return {
            "data_bytes": [value if type(value) is bytes else None for value in data],
            "data_json": [None if type(value) is bytes else value for value in data],
        }

    def _custody(self, messages: list[Message]) -> dict[str, Any]:
        """Returns the columns that settlement needs."""
        acks = [message.acknowledger for message in messages]
        deliveries: list[Delivery] = [
            ack.data if type(ack.data) is Delivery else _PLAIN for ack in acks
        ]
        columns: dict[str, Any] = {
            "_receipt": [delivery.receipt for delivery in deliveries],
            "_on_success": [delivery.on_success for delivery in deliveries],
            "_on_failure": [delivery.on_failure for delivery in deliveries],
            "_acked": [is_settled(message) for message in messages],
        }
        if not self.configured:
            own = (*columns["_on_success"], *columns["_on_failure"])
            self.configured = any(name is not None for name in own)
        if self._producer.keeps_payload:
            stored = [delivery if self._keeps(delivery) else _PLAIN for delivery in deliveries]
            columns["_payload"] = [delivery.payload for delivery in stored]
            columns["_properties"] = [delivery.properties for delivery in stored]
        return columns

    def _keeps(self, delivery: Delivery) -> bool:
        """Whether the settlement of the message may need its payload."""
        if self._keep_all:
            return True
        if delivery.on_success is None and delivery.on_failure is None:
            return self._keep_plain
        return bool(self._producer.may_publish(delivery))


class _EntriesFile:
    """The entry file; created with the first entry."""

    def __init__(self, folder: Folder, path: str) -> None:
        self.path = path
        self.summing = Summing()
        self._folder = folder
        self._sink: Sink | None = None

    def add(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        raw = ("\n".join(lines) + "\n").encode()
        if self._sink is None:
            self._sink = self._folder.sink(self.path)
        with translated(f"write {self.path}", self._folder.store.uri):
            self._sink.file.write(raw)
        self.summing.add(raw, len(lines))

    def close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with translated(f"write {self.path}", self._folder.store.uri):
                try:
                    sink.commit()
                finally:
                    sink.abort()

    def abort(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abort()
