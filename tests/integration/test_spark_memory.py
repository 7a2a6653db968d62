"""Batches that are large for their driver: a real spark-submit with 512 MB."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_broadway.adapters.host import Host
from airflow_broadway.core.formats.parts import part_id
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
from airflow_broadway.runs.spark_batches import SparkBatches
from airflow_broadway.staging.arrow_schema import SPARK_FILE_METADATA
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(540)]

MILLIONS = 2_000_000

PIPELINE = """
from airflow_broadway import Batcher, Broadway
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.spark import failed


class Large(Broadway):
    producer = Producer(max_crashes=1)
    batchers = {"default": Batcher(schema="n bigint")}

    def handle_message(self, processor, message, context):
        return message

    def handle_batch(self, batcher, messages, info, context):
        if context == "fails":
            return failed(messages, reason="no")
        if not messages.where("data.n = 0").count():
            return None
        jvm = messages.sparkSession._jvm
        held = jvm.java.util.ArrayList()
        while True:
            held.add(jvm.java.nio.ByteBuffer.allocate(50_000_000))
"""


class Place:
    """A run with one batch, and the operator that handles it in a driver of 512 MB."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, context: str) -> None:
        (root / "large_pipeline.py").write_text(PIPELINE)
        monkeypatch.syspath_prepend(str(root))
        monkeypatch.setenv("AIRFLOW_HOME", str(root))
        monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        connection = {"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))
        monkeypatch.setattr(SparkBatches, "leases_kept", lambda *_: nullcontext())
        (root / "staging").mkdir()
        ti = SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1)
        dates = dict.fromkeys(("logical_date", "data_interval_start", "data_interval_end"))
        airflow: Any = {"ti": ti, "dag_run": SimpleNamespace(**dates), "params": {}}
        self.context = airflow
        staging = f"file://{root}/staging"
        run = Host(airflow).open_run(staging, Counting(name="Large"))
        self.staged = Staged(root / "staging" / run.path, pipeline="Large")
        self.staged.root_id = run.store.root_id()
        self.plan = self.staged.plan(
            "default", [Planned("b0", rows(1 if context == "fails" else 2))]
        )
        self.operator = BroadwaySparkSubmitOperator(
            task_id="t",
            pipeline={"class": "large_pipeline:Large", "options": {"context": context}},
            batches=[{"plan": self.plan.path}],
            staging=staging,
            driver_memory="512m",
            name="d.t",
        )

    def enlarge(self, count: int) -> None:
        """Enlarges the batch to ``count`` messages."""
        path = self.staged.root / self.plan.path / self.plan.data[0]
        schema = pq.read_schema(path)
        template = pq.read_table(path)
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for start in range(0, count, 100_000):
                numbers = pa.array(range(start, start + 100_000), pa.int64())
                table = template.take(pa.array([0] * 100_000))
                ids = pa.array([f"{n:032d}" for n in range(start, start + 100_000)])
                data = pa.StructArray.from_arrays([numbers], fields=[pa.field("n", pa.int64())])
                for name, column in (("message_id", ids), ("data", data), ("position", numbers)):
                    index = table.column_names.index(name)
                    table = table.set_column(index, schema.field(name), column)
                writer.write_table(table.replace_schema_metadata(SPARK_FILE_METADATA))
        head, [batch] = self._read()
        text = head.dumps(), json.dumps({**json.loads(batch.dumps()), "size": count})
        (self.staged.root / self.plan.path / "plan.jsonl").write_text("\n".join(text) + "\n")

    def _read(self) -> tuple[BatchPlan, list[Any]]:
        head, batches = BatchPlan.read(self.staged.files, self.plan.path)
        return head, list(batches)


def test_two_million_failures_fit_in_a_512_mb_driver(tmp_path, monkeypatch):
    place = Place(tmp_path, monkeypatch, "fails")
    place.enlarge(MILLIONS)
    returned = place.operator.execute(place.context)
    assert (returned["batches"], returned["failed"], returned["failed_messages"]) == (
        1,
        0,
        MILLIONS,
    )
    outcome = place.staged.outcome("default", "b0")
    assert outcome.entries is not None
    ids = set()
    for line in place.staged.files.lines(outcome.entries):
        ids.add(json.loads(line)["id"])
    assert len(ids) == MILLIONS


def test_a_message_that_exhausts_driver_memory_is_dead_lettered_alone(tmp_path, monkeypatch):
    place = Place(tmp_path, monkeypatch, "eats")
    returned = place.operator.execute(place.context)

    assert (returned["batches"], returned["failed_messages"]) == (2, 1)
    outcomes = place.staged.outcomes("default")
    assert set(outcomes) == {"b0", part_id("b0", 0), part_id("b0", 1)}
    assert outcomes[part_id("b0", 1)].successful == 1
    [line] = outcomes[part_id("b0", 0)].lines or [""]
    assert json.loads(line)["id"] == "m0"
    assert json.loads(line)["reason"].startswith("crashed: it ended 1 process")
