"""Writes a run's files by hand, in the formats of ``core.formats``, for tests of Spark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_broadway.core.custody.protocol import Entry, Lease
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.entries import EntryLine, load_line
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.core.formats.outcome import Outcome, entry_lines
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.reference import make_ref
from airflow_broadway.core.schema.ddl import parse_schema
from airflow_broadway.staging.arrow_schema import SPARK_FILE_METADATA, arrow_struct
from airflow_broadway.staging.plan_data_files import spark_key
from tests.unit.planned import planned_batch

METADATA = pa.map_(pa.string(), pa.string())
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
GENERATION = "0" * 31 + "1"

#: A schema with a column of each type, and a row of it.
EVERY_TYPE = (
    "b boolean, t tinyint, s smallint, i int, l bigint, f float, d double, m decimal(38,10),"
    " x string not null, y binary, dt date, ts timestamp, tn timestamp_ntz, a array<int>,"
    " p map<string, double>, st struct<`odd name`: int, deep: array<struct<k: string>>>"
)
VALUES: Final[dict[str, Any]] = {
    "b": True,
    "t": -128,
    "s": 32767,
    "i": 2**31 - 1,
    "l": -(2**63),
    "f": 0.5,
    "d": 1e300,
    "m": Decimal("1234567890123456789012345678.0123456789"),
    "x": "ü\u0000✓",
    "y": b"\x00\xff",
    "dt": date(1500, 2, 28),
    "ts": datetime(2026, 3, 29, 1, 30, 0, 123456, tzinfo=UTC),
    "tn": datetime(1600, 1, 1, 12),  # noqa: DTZ001 - a timestamp_ntz has none
    "a": [1, None, 3],
    "p": {"k": 1.5, "n": None},
    "st": {"odd name": 1, "deep": [{"k": "v"}, {"k": None}]},
}


@dataclass(frozen=True)
class Row:
    """One staged message."""

    message_id: str
    data: Any
    batch_key: Any = "default"
    metadata: dict[str, str] = field(default_factory=dict)
    attempt: int = 1
    redelivered: bool = False
    received_at: datetime = EPOCH
    receipt: str = ""
    payload: bytes | None = None
    properties: str | None = None
    on_success: str | None = None
    on_failure: str | None = None
    acked: bool = False
    source: int = 0


#: Fields of a planned batch that a test sets directly.
SAME = ("batch_key", "keys", "partition", "trigger", "error")


@dataclass(frozen=True)
class Planned:
    """One batch to plan."""

    batch_id: str
    rows: Sequence[Row]
    batch_key: Any = "default"
    keys: int = 1
    partition: int | None = None
    trigger: str = "size"
    error: str = ""
    generations: tuple[str, ...] = (GENERATION,)


def rows(
    count: int, data: Any = lambda n: {"n": n}, *, prefix: str = "m", **more: Any
) -> list[Row]:
    """Messages ``m0``, ``m1`` … with the data that a function makes of their numbers."""
    return [Row(f"{prefix}{n}", data(n), receipt=f"r{n}", **more) for n in range(count)]


def plan_path(batcher: str) -> str:
    """Where :meth:`Staged.plan` writes."""
    return f"batches/{batcher}/inputs/1-try"


class Staged:
    """The folder of one run."""

    def __init__(self, root: Path, *, pipeline: str = "Counting") -> None:
        self.root = root
        self.uri = f"file://{root}"
        self.files = LocalFiles(root)
        self.pipeline = pipeline
        self.root_id = "root"
        self.lease()

    def lease(self, *, generation: str = GENERATION, seconds: float = 3600) -> None:
        """Write a generation's lease, ending in so many seconds."""
        deadline = datetime.now(UTC) + timedelta(seconds=seconds)
        lease = Lease(kind="sqlite", generation=generation, seconds=900, deadline=deadline)
        self.files.replace(paths.lease(generation), json.dumps(lease.to_json()))

    def settle(self, *, generation: str = GENERATION) -> None:
        """Begin to settle a generation."""
        assert self.files.create(paths.intent(generation), "{}")

    def plan(
        self,
        batcher: str,
        batches: Sequence[Planned],
        *,
        schema: str | None = "n bigint",
        as_bytes: bool = False,
        batches_per_file: int = 1000,
        sink: str | None = None,
    ) -> BatchPlan:
        """Write a plan with its data files."""
        path = plan_path(batcher)
        data: list[str] = []
        planned: list[PlannedBatch] = []
        position = 0
        for start in range(0, len(batches), batches_per_file):
            name = f"data-{len(data):05d}.parquet"
            tables = []
            for number, batch in enumerate(batches[start : start + batches_per_file], start):
                table = _table(batch.rows, number, position, parse(schema), as_bytes=as_bytes)
                tables.append(table)
                position += len(batch.rows)
                planned.append(_planned(batch, number, len(data)))
            (self.root / path).mkdir(parents=True, exist_ok=True)
            _write(self.root / path / name, tables)
            data.append(name)
        plan = BatchPlan(
            path=path,
            pipeline=self.pipeline,
            batcher=batcher,
            generations=sorted({g for batch in batches for g in batch.generations}),
            data=data,
            schema=schema,
            as_bytes=as_bytes,
            messages=position,
            batches=len(planned),
            triggers={"size": len(planned)},
            root_id=self.root_id,
            host="host",
            sink=sink,
        )
        lines = [plan.dumps(), *(batch.dumps() for batch in planned)]
        self.files.write_lines(f"{path}/plan.jsonl", lines)
        return plan

    def work(
        self, pipeline: Any, *plans: BatchPlan, name: str = "handle_batches", try_number: int = 1
    ) -> Work:
        """Write the work file of a try."""
        work = Work(
            name=name,
            try_number=try_number,
            pipeline=pipeline if isinstance(pipeline, dict) else make_ref(pipeline()),
            run=replace(RunInfo(), try_number=try_number).to_json(),
            plans=[plan.path for plan in plans],
        )
        assert self.files.create(paths.of_try(name, try_number), work.dumps())
        return work

    def outcome(self, batcher: str, batch_id: str) -> Outcome:
        """A batch's outcome."""
        path = paths.outcome(plan_path(batcher), batch_id)
        return Outcome.loads(self.files.read(path), path)

    def outcomes(self, batcher: str) -> dict[str, Outcome]:
        """All outcomes of a batcher."""
        names = self.files.list(paths.outcomes(plan_path(batcher)))
        ids = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return {batch_id: self.outcome(batcher, batch_id) for batch_id in ids}

    def entries(self, outcome: Outcome) -> dict[str, Entry]:
        """Returns an outcome's entries by message id."""
        entries = [line.entry for line in self.lines(outcome)]
        by_id = {entry.message_id: entry for entry in entries}
        assert len(by_id) == len(entries)
        return by_id

    def lines(self, outcome: Outcome) -> list[EntryLine]:
        """The same with their sources, ordered."""
        if outcome.exceptions is None:
            return []
        lines = entry_lines(self.files, outcome.exceptions, outcome.entries_sum)
        entries = [load_line(line) for line in lines]
        return sorted(entries, key=lambda line: (line.entry.message_id, line.source or 0))


def parse(schema: str | None) -> pa.DataType | None:
    return None if schema is None else arrow_struct(parse_schema(schema))


def _planned(batch: Planned, number: int, file: int) -> PlannedBatch:
    share = len(batch.rows) // len(batch.generations)
    return planned_batch(
        batch.batch_id,
        rows=[[number, number]],
        files=[file],
        size=len(batch.rows),
        bytes=10 * len(batch.rows),
        redelivered=sum(row.redelivered for row in batch.rows),
        sources=dict.fromkeys(batch.generations, share),
        **{name: getattr(batch, name) for name in SAME},
    )


def _table(
    rows: Sequence[Row], number: int, position: int, data: pa.DataType | None, *, as_bytes: bool
) -> pa.Table:
    if data is None:
        data = pa.binary() if as_bytes else pa.string()
    columns: dict[str, tuple[pa.DataType, list[Any]]] = {
        "message_id": (pa.string(), [row.message_id for row in rows]),
        "data": (data, [row.data for row in rows]),
        "batch_key": (pa.string(), [spark_key(json.dumps(row.batch_key)) for row in rows]),
        "metadata": (METADATA, [list(row.metadata.items()) for row in rows]),
        "attempt": (pa.int32(), [row.attempt for row in rows]),
        "redelivered": (pa.bool_(), [row.redelivered for row in rows]),
        "received_at": (pa.timestamp("us", tz="UTC"), [row.received_at for row in rows]),
        "position": (pa.int64(), [position + index for index in range(len(rows))]),
        "batch": (pa.int64(), [number] * len(rows)),
        "source": (pa.int32(), [row.source for row in rows]),
        "_receipt": (pa.string(), [row.receipt for row in rows]),
        "_on_success": (pa.string(), [row.on_success for row in rows]),
        "_on_failure": (pa.string(), [row.on_failure for row in rows]),
        "_acked": (pa.bool_(), [row.acked for row in rows]),
    }
    if any(row.payload is not None for row in rows):
        columns["_payload"] = (pa.binary(), [row.payload for row in rows])
        columns["_properties"] = (pa.string(), [row.properties for row in rows])
    return pa.table({name: pa.array(values, kind) for name, (kind, values) in columns.items()})


def _write(path: Path, tables: Sequence[pa.Table]) -> None:
    schema = tables[0].schema.with_metadata(SPARK_FILE_METADATA)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.replace_schema_metadata(SPARK_FILE_METADATA))
