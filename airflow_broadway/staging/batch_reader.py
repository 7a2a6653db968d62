"""Read planned batches back as messages, for batchers that run Python."""

from __future__ import annotations

import bisect
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import pyarrow as pa

from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch, plain_key
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import BatchMode, Message
from airflow_broadway.core.schema.plain import load, load_key, load_metadata
from airflow_broadway.staging.arrow_schema import from_arrow
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.tables import ParquetFile, holds

#: Messages of row groups that are kept between batches: small batches share groups.
CACHED_MESSAGES = 32_768
#: Files that are open at a time; a batch may lie in several.
OPEN_FILES = 4


class StagedReceipt(NamedTuple):
    """What settling one staged message needs.

    :param source: Index of its generation in :attr:`BatchPlan.generations`.
    :param acked: A callback settled it at once: nobody is to settle it again.
    """

    message_id: str
    source: int
    delivery: Delivery
    acked: bool


_Staged = tuple[Message, StagedReceipt]
#: The rows of a row group: the number of each one's batch, and its message.
_Group = tuple[list[int], list[_Staged]]

#: Makes the acknowledger of a message.
AckRefOf = Callable[[StagedReceipt], AckRef]


class BatchReader:
    """Reads the batches of one Python batcher's plan; many threads may read at once.

    Batches that are neighbours in the plan share row groups: in its order they are read cheapest.
    A few files stay open, since opening one in an object store costs two round trips.
    """

    def __init__(self, run: StagedRun, plan: BatchPlan) -> None:
        run.store.check_root(plan.root_id, plan.host)
        self._files = run.files
        self._plan = plan
        #: One thread reads and decodes at a time: the others want the same row groups.
        self._lock = threading.Lock()
        self._open: OrderedDict[int, ParquetFile] = OrderedDict()
        #: Data file → for each row group its first and last batch.
        self._bounds: dict[int, list[tuple[int, int]]] = {}
        self._cache: OrderedDict[tuple[int, int], _Group] = OrderedDict()
        self._cached = 0

    def read(self, planned: PlannedBatch, ack_ref_of: AckRefOf | None = None) -> list[Message]:
        """Return the messages of a batch, in order of arrival at the batcher.

        A message's data is what it was; with a schema it is a ``dict`` of the schema's columns.

        :param ack_ref_of: Makes the acknowledger of each message that no callback settled at once.
        """
        found: list[tuple[int, _Staged]] = []
        for file in planned.files:
            for batches, messages in self._groups(file, planned.rows):
                for low, high in planned.rows:
                    start = bisect.bisect_left(batches, low)
                    stop = bisect.bisect_right(batches, high, start)
                    found.extend(zip(batches[start:stop], messages[start:stop], strict=True))
        if len(planned.rows) > 1 or planned.rows[0][0] != planned.rows[0][1]:
            found.sort(key=lambda each: each[0])  # stable: each batch stays in order of arrival
        if planned.part is not None:
            found = [
                (number, (message, receipt))
                for number, (message, receipt) in found
                if planned.has(receipt.source, message.position)
            ]
        if ack_ref_of is None:
            return [message for _, (message, _) in found]
        return [
            message if receipt.acked else message.with_acknowledger(ack_ref_of(receipt))
            for _, (message, receipt) in found
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open files, unless a thread that nobody waits for is reading one."""
        if self._lock.acquire(blocking=False):
            try:
                self._close(0)
            finally:
                self._lock.release()

    def _groups(self, file: int, rows: list[list[int]]) -> Iterator[_Group]:
        """The row groups of a file that hold any of a batch's rows."""
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
                    found = self._group(file, group)
                yield found

    def _group(self, file: int, group: int) -> _Group:
        """The rows of a row group, read or kept."""
        key = file, group
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        table = self._opened(file).read(group)
        batches: Any = table["batch"].to_pylist()
        made = messages_of(table, self._plan.schema, self._plan.batcher, python=True)
        kept = batches, list(zip(made, _receipts(table), strict=True))
        self._cache[key] = kept
        self._cached += table.num_rows
        while self._cached > CACHED_MESSAGES and len(self._cache) > 1:
            _, (_, dropped) = self._cache.popitem(last=False)
            self._cached -= len(dropped)
        return kept

    def _opened(self, file: int) -> ParquetFile:
        if file not in self._open:
            self._close(OPEN_FILES - 1)
            self._open[file] = ParquetFile(
                self._files, f"{self._plan.path}/{self._plan.data[file]}"
            )
        self._open.move_to_end(file)
        return self._open[file]

    def _close(self, kept: int) -> None:
        """Close files until no more than ``kept`` are open."""
        while len(self._open) > kept:
            self._open.popitem(last=False)[1].close()


def messages_of(
    table: pa.Table, schema: str | None, batcher: str, *, python: bool
) -> list[Message]:
    """The rows of a message file, or of a Python batcher's data file, as messages.

    :param python: Whether they were staged for a Python batcher.
    """
    key_of: Callable[[Any], Any] = load_key if python else plain_key
    metadata = from_arrow(table["metadata"])
    if python:
        metadata = [load_metadata(each) if each else each for each in metadata]
    rows = zip(
        _data(table, schema, load if python else json.loads),
        _column(table, "message_id"),
        [key_of(json.loads(text)) for text in _column(table, "batch_key")],
        _column(table, "_flush", "flush"),
        metadata,
        _column(table, "attempt"),
        _column(table, "redelivered"),
        from_arrow(table["received_at"]),
        _column(table, "position"),
        _column(table, "_size", "size"),
        strict=True,
    )
    return [
        Message(
            data,
            metadata=known,
            message_id=message_id,
            batcher=batcher,
            batch_key=key,
            batch_mode=BatchMode.FLUSH if at_once else BatchMode.BULK,
            attempt=attempt,
            redelivered=again,
            received_at=at,
            position=position,
            size=size,
        )
        for data, message_id, key, at_once, known, attempt, again, at, position, size in rows
    ]


def _column(table: pa.Table, *names: str) -> list[Any]:
    """The values of the first of these columns that the table has."""
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


def _receipts(table: pa.Table) -> Iterator[StagedReceipt]:
    names = ("message_id", "source", *(each for each in table.column_names if each[0] == "_"))
    column: dict[str, list[Any]] = {name: table[name].to_pylist() for name in names}
    nothing = [None] * table.num_rows
    for message_id, source, receipt, success, failure, acked, payload, properties in zip(
        column["message_id"],
        column["source"],
        column["_receipt"],
        column["_on_success"],
        column["_on_failure"],
        column["_acked"],
        column.get("_payload", nothing),
        column.get("_properties", nothing),
        strict=True,
    ):
        delivery = Delivery(
            receipt=receipt,
            payload=payload,
            properties=properties,
            on_success=success,
            on_failure=failure,
        )
        yield StagedReceipt(message_id, source, delivery, acked)
