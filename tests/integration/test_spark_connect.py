"""Batches in a session of Spark Connect; in a process of its own, which has one kind of session.

Applications refuse Spark Connect, for their code does not reach its server.  This is about what is
ready for it: the handling of batches, once a session and the code are there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PROGRAM = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from airflow_broadway.spark import failed
from airflow_broadway.spark.session import prepare_session
from airflow_broadway.spark.application import run_work
from tests.unit.spark.pipelines import Mending
from tests.unit.spark.plans import EPOCH, Planned, Staged, rows

spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert ".connect." in type(spark).__module__
prepare_session(spark)
staged = Staged(Path(sys.argv[1]))
batches = [Planned(f"b{n}", rows(10, prefix=f"b{n}-"), batch_key=n) for n in range(4)]
plan = staged.plan("wide", batches)


def callback(messages, info):
    messages.createOrReplaceTempView("mine")
    assert {row.message_id for row in messages.sparkSession.table("mine").collect()} == {
        f"{info.batch_id}-{n}" for n in range(10)
    }
    assert messages.sparkSession.conf.get("spark.sql.session.timeZone") == "UTC"
    if info.batch_id == "b1":
        raise ValueError("no")
    if info.batch_id == "b2":
        return messages.selectExpr("message_id", "data.n < 5 AS ok")
    return failed(messages.where("data.n > 7"), reason="big")


Mending.callback = staticmethod(callback)
assert run_work(spark, staged.uri, staged.files, staged.work(Mending, plan)) == 0
found = staged.outcomes("wide")
print([(found[f"b{n}"].successful, found[f"b{n}"].failed) for n in range(4)])
assert all(message.received_at == EPOCH for chunk in Mending.seen for message in chunk)
spark.stop()
"""


def test_batches_without_server_side_code_run_on_spark_connect(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[(8, 2), (0, 10), (5, 5), (8, 2)]"
