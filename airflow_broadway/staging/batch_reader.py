"""Reads planned batches as messages, for Python batchers."""

from __future__ import annotations

import bisect
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Self

import pyarrow as pa

from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch, plain_key
from airflow_broadway.core.model.acks import NO_ACK, Acknowledger, AckRef
from airflow_broadway.core.model.message import BatchMode, Message
from airflow_broadway.core.schema.encoding import load, load_key, load_metadata
from airflow_broadway.staging.arrow_schema import from_arrow
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.tables import ParquetFile, holds

#: Messages of row groups that are cached between batches, since small batches share groups.
CACHED_MESSAGES = 32_768
#: Maximum number of open files; a batch may be in several.
OPEN_FILES = 4


#: The rows of a row group: their batch numbers, and their messages.
_Group = tuple[list[int], list[Message]]


class BatchReader:
    """Reads the batches of one Python batcher's plan; thread-safe.

    Adjacent batches of the plan share row groups, so reading in plan order is cheapest.  A few
    files stay open, since opening one in an object store costs two round trips.
    """

    def __init__(self, run: StagedRun, plan: BatchPlan) -> None:
        run.store.check_root(plan.root_id, plan.host)
        self._files = run.files
        self._plan = plan
        #: One thread reads and decodes at a time, since the others need the same row groups.
        self._lock = threading.Lock()
        self._open: OrderedDict[int, ParquetFile] = OrderedDict()
        #: Data file → first and last batch per row group.
        self._bounds: dict[int, list[tuple[int, int]]] = {}
        self._cache: OrderedDict[tuple[int, int], _Group] = OrderedDict()
        self._cached = 0

    def read(self, planned: PlannedBatch, ack: Acknowledger | None = None) -> list[Message]:
        """Returns the messages of a batch, in order of arrival at the batcher.

        A message's data is unchanged; with a schema it is a ``dict`` of the schema's columns.

        :param ack: Settles messages that no callback settled immediately, by generation.
        """
        rows: list[tuple[int, Message]] = []
        for file in planned.files:
            for batches, messages in self._groups(file, planned.rows):
                for low, high in planned.rows:
                    start = bisect.bisect_left(batches, low)
                    stop = bisect.bisect_right(batches, high, start)
                    rows.extend(zip(batches[start:stop], messages[start:stop], strict=True))
        if len(planned.rows) > 1 or planned.rows[0][0] != planned.rows[0][1]:
            rows.sort(key=lambda row: row[0])  # stable: keeps the order of arrival per batch
        generations, part = self._plan.generations, planned.part
        return [
            message.with_acknowledger(
                NO_ACK if data is None else AckRef(ack, generations[source], data)
            )
            for _, message in rows
            for _, source, data in (message.acknowledger,)
            if part is None or planned.has(source, message.position)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the open files, unless an abandoned thread is reading one."""
        if self._lock.acquire(blocking=False):
            try:
                self._close(0)
            finally:
                self._lock.release()

    def _groups(self, file: int, rows: list[list[int]]) -> Iterator[_Group]:
        """Yields the row groups of a file with rows of a batch."""
        with self._lock:
            if file not in self._bounds:
                opened = self._opened(file)
                self._bounds[file] = [
                    opened.bounds(group, "batch") for group in range(opened.groups)
                ]
            bounds = self._bounds[file]
        for group, (first, last) in enumerate(bounds):
            if holds(rows, first, last):
                with self._lock:
                    row_group = self._group(file, group)
                yield row_group

    def _group(self, file: int, group: int) -> _Group:
        """Returns the rows of a row group, from the cache or the file."""
        key = file, group
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        table = self._opened(file).read(group)
        batches: Any = table["batch"].to_pylist()
        plan, acks = self._plan, _acks(table)
        messages = messages_of(table, plan.schema, plan.batcher, python=True, acks=acks)
        self._cache[key] = batches, messages
        self._cached += table.num_rows
        while self._cached > CACHED_MESSAGES and len(self._cache) > 1:
            _, (_, dropped) = self._cache.popitem(last=False)
            self._cached -= len(dropped)
        return batches, messages

    def _opened(self, file: int) -> ParquetFile:
        if file not in self._open:
            self._close(OPEN_FILES - 1)
            self._open[file] = ParquetFile(
                self._files, f"{self._plan.path}/{self._plan.data[file]}"
            )
        self._open.move_to_end(file)
        return self._open[file]

    def _close(self, limit: int) -> None:
        """Closes files until at most ``limit`` are open."""
        while len(self._open) > limit:
            self._open.popitem(last=False)[1].close()


def messages_of(
    table: pa.Table, schema: str | None, batcher: str, *, python: bool, acks: Iterable[AckRef] = ()
) -> list[Message]:
    """Converts the rows of a message file, or of a Python batcher's data file, to messages.

    :param python: Whether they were staged for a Python batcher.
    :param acks: Their acknowledgers; by default they have none.
    """
    key_of: Callable[[Any], Any] = load_key if python else plain_key
    texts = _column(table, "batch_key")
    # Keys of sets or dictionaries are not shared by messages.
    keys = {text: key_of(json.loads(text)) for text in {*texts} if text[0] != "{"}
    metadata = _Metadata(table["metadata"], python=python)
    rows = zip(
        _data(table, schema, load if python else json.loads),
        _column(table, "message_id"),
        [keys[text] if text in keys else key_of(json.loads(text)) for text in texts],
        _column(table, "_flush", "flush"),
        map(partial, repeat(metadata.load), range(table.num_rows)),
        _column(table, "attempt"),
        _column(table, "redelivered"),
        from_arrow(table["received_at"]),
        _column(table, "position"),
        _column(table, "_size", "size"),
        acks or [NO_ACK] * table.num_rows,
        strict=True,
    )
    return [
        Message(
            data,
            metadata=fields,
            message_id=message_id,
            batcher=batcher,
            batch_key=key,
            batch_mode=BatchMode.FLUSH if flush else BatchMode.BULK,
            attempt=attempt,
            redelivered=redelivered,
            received_at=at,
            position=place,
            size=size,
            acknowledger=ack,
        )
        for data, message_id, key, flush, fields, attempt, redelivered, at, place, size, ack in rows
    ]


class _Metadata:
    """The metadata of messages, decoded when that of one is first read."""

    def __init__(self, column: pa.ChunkedArray[Any], *, python: bool) -> None:
        self._column = column
        self._load = load_metadata if python else dict
        self._texts: list[dict[str, str]] | None = None

    def load(self, row: int) -> dict[str, Any]:
        """Returns the metadata of a row.

        :raises StagingDamaged: If it cannot be decoded.
        """
        if self._texts is None:  # not a cached_property: a lock may be held during a fork
            self._texts = from_arrow(self._column)
        try:
            return self._load(self._texts[row])
        except (ArithmeticError, LookupError, TypeError, ValueError):
            keys = ", ".join(self._texts[row])  # not their values, which may be secret
            raise StagingDamaged(f"the metadata [{keys}] cannot be decoded") from None


def _column(table: pa.Table, *names: str) -> list[Any]:
    """Returns the values of the first of these columns that exists in the table."""
    values: list[Any] = table[
        next(name for name in names if name in table.column_names)
    ].to_pylist()
    return values


def _data(table: pa.Table, schema: str | None, read: Callable[[str], Any]) -> list[Any]:
    if schema is not None:
        return from_arrow(table["data"])
    texts: list[Any] = table["data_json"].to_pylist()
    blobs: list[Any] = table["data_bytes"].to_pylist()
    return [blob if text is None else read(text) for text, blob in zip(texts, blobs, strict=True)]


def _acks(table: pa.Table) -> Iterator[AckRef]:
    """Yields the index of each message's generation, and its delivery unless it is settled."""
    fields = "source", "_acked", "_receipt", "_payload", "_properties", "_on_success", "_on_failure"
    nulls, there = [None] * table.num_rows, table.column_names
    columns = [table[name].to_pylist() if name in there else nulls for name in fields]
    for source, is_settled, *delivery in zip(*columns, strict=True):
        yield AckRef(None, source, None if is_settled else Delivery(*delivery))


def rows_of(
    run: StagedRun, plan: BatchPlan, batches: Sequence[PlannedBatch], columns: Sequence[str]
) -> Iterator[tuple[PlannedBatch, dict[str, Any]]]:
    """Yields the messages of some batches of one plan, with those columns that exist.

    :param columns: With ``batch``, ``source`` and ``position``.
    :raises StagingDamaged: If a file is missing.
    """
    by_number: dict[int, list[PlannedBatch]] = {}
    for batch in batches:
        for first, last in batch.rows:
            for number in range(first, last + 1):
                by_number.setdefault(number, []).append(batch)
    ranges = [[number, number] for number in sorted(by_number)]
    for index in sorted({index for batch in batches for index in batch.files}):
        with open_staged(run, f"{plan.path}/{plan.data[index]}") as file:
            there = [name for name in columns if name in file.columns]
            for group in range(file.groups):
                if not holds(ranges, *file.bounds(group, "batch")):
                    continue
                for row in file.read(group, there).to_pylist():
                    for batch in by_number.get(row["batch"], ()):
                        if batch.has(row["source"], row["position"]):
                            yield batch, row


def open_staged(run: StagedRun, path: str) -> ParquetFile:
    """Opens a file of the run.

    :raises StagingDamaged: If it is missing.
    """
    try:
        return ParquetFile(run.files, path)
    except FileNotFoundError:
        raise StagingDamaged(f"{path} is not there") from None
