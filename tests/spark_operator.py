"""The submitting operator, called without Airflow on a plan that a test wrote."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.dataset as ds
import pytest

from airflow_broadway.adapters.host import Host
from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
from airflow_broadway.runs.spark_batches import SparkBatches
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged

#: The begin of each module, after ``FOLDER``.  A row waits while the file ``wait`` is there.
_HEAD = """
import os, time
from airflow_broadway import Batcher, Broadway, Rows
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.sinks import ParquetFolder
from airflow_broadway.spark import failed


def slowly(n: int) -> int:
    with open(f"{FOLDER}/busy/{os.getpid()}", "a") as file:
        file.write(f"{n}\\n")
    while os.path.exists(f"{FOLDER}/wait"):
        time.sleep(0.1)
    return n


class Lake(Broadway):
    producer = Producer()
    batchers = {
        "default": Batcher(
            schema="n bigint", concurrency=2, sink=ParquetFolder(path=f"{FOLDER}/lake")
        )
    }

    def handle_message(self, processor, message, context):
        return message

    def handle_batch(self, batcher, messages, info, context):
        from pyspark.sql import functions as F

        n = F.udf(slowly, "bigint").asNondeterministic()
"""


class Lake:
    """A run of the pipeline ``lake_pipeline:Lake``, whose module only this process has on its path,
    and which writes the rows of its batches to the folder ``lake``.

    :param code: The rest of its ``handle_batch``, for which ``n(column)`` is a slow function.
    """

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, code: str, batches: Sequence[Planned]
    ) -> None:
        self.folder, self.batches = folder, batches
        (folder / "code").mkdir()
        (folder / "busy").mkdir()
        text = f"FOLDER = {str(folder)!r}\n{_HEAD}{code}"
        (folder / "code" / "lake_pipeline.py").write_text(text)
        patch.delitem(sys.modules, "lake_pipeline", raising=False)
        patch.syspath_prepend(str(folder / "code"))
        patch.setenv("AIRFLOW_HOME", str(folder))
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setattr(SparkBatches, "leases_kept", lambda *_: nullcontext())
        self._staging = f"file://{folder}/staging"
        (folder / "staging").mkdir()
        ids = {"dag_id": "d", "run_id": "r", "task_id": "t"}
        ti = SimpleNamespace(**ids, map_index=-1, try_number=1, xcom_push=lambda **_: None)
        dates = dict.fromkeys(("logical_date", "data_interval_start", "data_interval_end"))
        context: Any = {"ti": ti, "dag_run": SimpleNamespace(**dates), "params": {}}
        self._context = context
        run = Host(self._context).open_run(self._staging, Counting(name="Lake"))
        self.staged = Staged(folder / "staging" / run.path, pipeline="Lake")
        self.staged.root_id = run.store.root_id()
        self.plan = self.staged.plan("default", batches, sink=f"file://{folder}/lake")

    def operator(self, **arguments: Any) -> BroadwaySparkSubmitOperator:
        """Returns the operator of the run's task."""
        return BroadwaySparkSubmitOperator(
            task_id="t",
            pipeline="lake_pipeline:Lake",
            batches=[{"plan": self.plan.path}],
            staging=self._staging,
            name="d.t",
            **arguments,
        )

    def execute(self, **arguments: Any) -> Any:
        """Executes the task; returns its reference."""
        return self.execute_operator(self.operator(**arguments))

    def execute_operator(self, operator: BroadwaySparkSubmitOperator) -> Any:
        """Executes the task by its operator; returns its reference."""
        return operator.execute(self._context)

    def begun(self) -> int:
        """Returns the number of rows that Spark's Python has begun to handle."""
        return sum(len(file.read_text().splitlines()) for file in (self.folder / "busy").iterdir())

    def rows(self) -> Counter[str]:
        """Returns how often the table has each message's row."""
        table: Any = ds.dataset(self.folder / "lake", format="parquet").to_table()
        return Counter(table["message_id"].to_pylist())

    def planned_rows(self) -> Counter[str]:
        """Returns each message of the batches, once."""
        return Counter(row.message_id for batch in self.batches for row in batch.rows)
