"""Kills a Spark application at random times and starts the next try."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_broadway.core.formats.work import digest_of
from airflow_broadway.submit.environment import LIGHT_JVM, find_spark
from airflow_broadway.submit.package import Shipment, ship
from tests.unit.spark.plans import Planned, Staged, rows
from tests.waiting import eventually

# Slow: in make test, test_run_kills kills Spark tasks as well.
pytestmark = [pytest.mark.spark, pytest.mark.faults, pytest.mark.slow]

BATCHES = 24

PIPELINE = """
import json, os, time
from airflow_broadway import Batcher, Broadway
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.spark import failed


class Slow(Broadway):
    producer = Producer()
    batchers = {"default": Batcher(schema="n bigint", concurrency=2)}

    def handle_batch(self, batcher, messages, info, context):
        assert info.attempt == self.run.try_number
        with open(os.environ["CALLS"], "a") as file:
            file.write(json.dumps([info.batch_id, info.attempt]) + "\\n")
        path = info.path(os.environ["LAKE"])
        messages.select("message_id", "data.n").write.mode("overwrite").parquet(path)
        time.sleep(0.4)
        return failed(messages.where("data.n = 0"), reason="zero")
"""


class SparkSubmit:
    """A spark-submit process; gives access to its JVM and its Python driver."""

    def __init__(
        self, staged: Staged, shipment: Shipment, number: int, env: dict[str, str]
    ) -> None:
        program = find_spark("spark-submit", os.environ)
        python = sys.executable
        self.log = staged.root.parent / f"submit-{number}.log"
        work = f"work/handle_batches-{number:06d}.json"
        command = [
            program.binary,
            *("--master", "local[2]", "--conf", "spark.ui.enabled=false"),
            *("--conf", f"spark.driver.extraJavaOptions={LIGHT_JVM}"),
            *("--conf", "spark.log.level=WARN", "--py-files", str(shipment.zip)),
            str(shipment.launcher),
            *("--run", staged.uri, "--work", work, "--sha256", digest_of(staged.files.read(work))),
        ]
        variables = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    **program.env,
                    **variables,
                    **env,
                    "SPARK_LOCAL_IP": "127.0.0.1",
                },
                stdout=log,
                stderr=log,
            )

    def driver(self) -> int:
        """Returns the pid of the Python driver.

        The JVM has other children: commands that Hadoop starts, such as ``chmod``, and zombies.
        """
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):  # the child has ended, or is a zombie
                if "--work" in child.cmdline():
                    return child.pid
        raise AssertionError("the JVM has no driver")

    def wait(self, seconds: float = 120) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(("seed", "victims"), [(7, ["jvm", "driver", "term"])])
def test_every_batch_is_handled_and_recorded_once(tmp_path, monkeypatch, seed, victims):
    # Given a run of 24 batches, and an application that works on them
    rng = random.Random(seed)
    (tmp_path / "slow_pipeline.py").write_text(PIPELINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    staged = Staged(tmp_path / "run", pipeline="Slow")
    batches = [
        Planned(f"b{n:02}", rows(50, prefix=f"b{n:02}-"), batch_key=n) for n in range(BATCHES)
    ]
    plan = staged.plan("default", batches)
    ref = {"class": "slow_pipeline:Slow", "options": {}}
    shipment = ship("slow_pipeline:Slow", tmp_path / "ship")
    calls_file, lake = tmp_path / "calls", tmp_path / "lake"
    env = {"CALLS": str(calls_file), "LAKE": f"file://{lake}"}

    def calls() -> list[list[Any]]:
        if not calls_file.exists():
            return []
        return [json.loads(line) for line in calls_file.read_text().splitlines()]

    # When each try but the last is killed at a random time
    for number, victim in enumerate(victims, 1):
        staged.work(ref, plan, try_number=number)
        before = len(calls())
        submission = SparkSubmit(staged, shipment, number, env)
        try:
            eventually(lambda before=before: len(calls()) > before)
            driver = submission.driver()
            time.sleep(rng.uniform(0, 1.0))
            pid, signal_number = {
                "jvm": (submission.process.pid, signal.SIGKILL),
                "driver": (driver, signal.SIGKILL),
                "term": (submission.process.pid, signal.SIGTERM),
            }[victim]
            os.kill(pid, signal_number)
            assert submission.wait() != 0
            # Then none of its processes survives, and batches are left
            eventually(lambda driver=driver: not alive(driver), 15)
        finally:
            submission.end()
        recorded = staged.outcomes("default")
        assert len(recorded) < BATCHES, "the kill came too late"
        assert all(not outcome.error for outcome in recorded.values()), recorded

    # and the last try succeeds
    last = len(victims) + 1
    recorded = staged.outcomes("default")
    staged.work(ref, plan, try_number=last)
    submission = SparkSubmit(staged, shipment, last, env)
    try:
        assert submission.wait() == 0, submission.log.read_text()[-3000:]
    finally:
        submission.end()

    # Then every batch has one outcome, which later tries did not change
    after = staged.outcomes("default")
    assert sorted(after) == [f"b{n:02}" for n in range(BATCHES)]
    assert all(after[name] == outcome for name, outcome in recorded.items())
    for outcome in after.values():
        assert (outcome.successful, outcome.failed, outcome.error) == (49, 1, "")
        assert len(staged.entries(outcome)) == 1
    # and no try handled a batch that an earlier try had recorded
    tries = Counter(batch_id for batch_id, _ in calls())
    for batch_id, attempt in calls():
        assert attempt <= after[batch_id].try_number
    assert max(tries.values()) <= len(victims) + 1
    # and the output contains every message once
    import pyarrow.dataset as ds

    ids = ds.dataset(lake, format="parquet").to_table(columns=["message_id"])["message_id"]
    assert len(ids) == len(set(ids.to_pylist())) == 50 * BATCHES
