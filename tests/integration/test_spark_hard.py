"""Hard cases on Spark: order over several generations, UDFs that kill their workers, pandas."""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.reference import make_ref
from airflow_broadway.spark import failed
from airflow_broadway.spark.application import run_work
from airflow_broadway.spark.session import ClassicSessions
from airflow_broadway.staging.planner import plan_batches
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows
from tests.unit.spark.session import spark_session
from tests.unit.staging.kit import message, open_run, pipeline_of, publish

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def run(staged: Staged, callback: Any, count: int = 2) -> dict[str, Any]:
    """Runs batches ``b0``, ``b1`` … of ten messages in sequence; returns their outcomes."""
    Counting.callback = staticmethod(callback)
    batches = [Planned(f"b{n}", rows(10, prefix=f"b{n}-")) for n in range(count)]
    work = staged.work(Counting, staged.plan("default", batches))
    assert run_work(ClassicSessions(spark_session()), staged.uri, staged.files, work) == 0
    return staged.outcomes("default")


def test_a_key_stays_in_order_across_generations(tmp_path):
    # Given messages of two keys that two tasks received by turns, each counting its own
    run = open_run(tmp_path)
    pipeline = pipeline_of(wide=Batcher(schema="n bigint", batch_size=7, concurrency=3))
    generations = []
    for index in (0, 1):
        chunks = [
            [
                message(
                    10 * turn + place,
                    {"n": 20 * turn + 10 * index + place},
                    at=2 * turn + index,
                    message_id=f"{index}-{turn}-{place}",
                    batcher="wide",
                    batch_key="ab"[place % 2],
                )
                for place in range(10)
            ]
            for turn in range(3)
        ]
        generations.append(publish(run, pipeline, chunks, map_index=index))
    plan = plan_batches(run, pipeline, "wide", generations, try_label="1")
    files = LocalFiles(run.files.full(""))
    for name in generations:
        end = datetime.now(UTC) + timedelta(hours=1)
        lease = Lease(kind="silent", generation=name, seconds=900, deadline=end)
        files.replace(paths.lease(name), json.dumps(lease.to_json()))
    work = Work(
        name="t",
        try_number=1,
        pipeline=make_ref(Counting()),
        run=RunInfo().to_json(),
        plans=[plan.path],
    )
    files.create(paths.of_try("t", 1), work.dumps())

    # When they are handled three batches at a time
    seen: dict[Any, list[int]] = {}
    busy: set[Any] = set()
    lock = threading.Lock()

    def callback(messages: DataFrame, info: BatchInfo) -> None:
        with lock:
            assert info.batch_key not in busy
            busy.add(info.batch_key)
        ordered = messages.orderBy("received_at", "position").select("data.n").collect()
        with lock:
            seen.setdefault(info.batch_key, []).extend(row.n for row in ordered)
            busy.remove(info.batch_key)

    Counting.callback = staticmethod(callback)
    assert run_work(ClassicSessions(spark_session()), f"file://{files.root}", files, work) == 0

    # Then each key's messages were handled in order of receipt, over all batches
    assert seen == {"a": list(range(0, 60, 2)), "b": list(range(1, 60, 2))}
    outcomes = [name for name in files.list(paths.outcomes(plan.path)) if name.endswith(".json")]
    assert len(outcomes) == plan.batches == 10


@pytest.mark.parametrize("lazy", [False, True])
def test_a_udf_that_kills_its_worker_fails_its_batch_alone(tmp_path, lazy):
    from pyspark.sql import functions as F  # noqa: N812

    def callback(messages: DataFrame, info: BatchInfo) -> Any:
        deadly = info.batch_id == "b0"

        def die(n: int) -> bool:
            if deadly and n == 7:
                os._exit(9)
            return n > 5

        chosen = messages.where(F.udf(die, "boolean")("data.n"))
        return failed(chosen) if lazy else failed([row.message_id for row in chosen.collect()])

    result = run(Staged(tmp_path), callback, count=3)
    assert {name: (outcome.successful, outcome.failed) for name, outcome in result.items()} == {
        "b0": (0, 10),
        "b1": (6, 4),
        "b2": (6, 4),
    }
    assert "Python worker exited unexpectedly" in result["b0"].error


def test_pandas_udfs_read_data_and_report_failures(tmp_path):
    pandas = pytest.importorskip("pandas")
    from pyspark.sql.pandas import functions

    untyped: Any = functions  # its types accept no class of pandas from a variable

    def callback(messages: DataFrame, info: BatchInfo) -> Any:
        def is_even(numbers: Any) -> Any:
            return numbers % 2 == 0

        # As `(numbers: pandas.Series) -> pandas.Series`, where pandas is installed.
        is_even.__annotations__ = dict.fromkeys(("numbers", "return"), pandas.Series)
        even = untyped.pandas_udf(is_even, "boolean")

        def grouped(parts: Any) -> Any:
            for part in parts:
                yield pandas.DataFrame(
                    {"message_id": part["message_id"], "ok": [n < 5 for n in part["n"]]}
                )

        if info.batch_id == "b0":
            return failed(messages.where(even("data.n")), reason="even")
        flat = messages.select("message_id", "data.n")
        return flat.mapInPandas(grouped, "message_id string, ok boolean")

    result = run(Staged(tmp_path), callback)
    assert {name: (row.error, row.successful, row.failed) for name, row in result.items()} == {
        "b0": ("", 5, 5),
        "b1": ("", 5, 5),
    }
