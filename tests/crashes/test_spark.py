"""The crash points of Spark batchers: the driver, and the task that waits for it."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import BatchInfo
from airflow_broadway.testing.crashes.campaign import Campaign
from airflow_broadway.testing.crashes.case import Case, Recovery
from airflow_broadway.testing.crashes.points import Call, Fault, Injection, Point
from airflow_broadway.testing.crashes.spark import warm_spark
from airflow_broadway.testing.crashes.subject import Embedded
from tests.crashes.campaigns import MESSAGES
from tests.crashes.pipelines import OnSpark

pytestmark = [pytest.mark.spark, pytest.mark.slow]

BATCH = Call("handle_batch", "default")
DRIVER = Call("driver", "")
KILLED = "one/driver/1 handle_batch default #1: killed after"


@pytest.fixture(scope="module")
def jvm():
    with warm_spark():
        yield


@pytest.fixture(scope="module")
def campaign(jvm, tmp_path_factory):
    result = Campaign(partial(Embedded, OnSpark), MESSAGES, tmp_path_factory.mktemp("cases"))
    result.baseline()
    return result


@pytest.mark.parametrize(
    ("task", "call", "fault", "recovery"),
    [
        # The driver dies in its second batch: the first batch has its outcome.
        ("driver", (BATCH, 2), Fault.KILLED_BEFORE, Recovery.RETRY),
        # The driver is suspended, and then finds that the next try has handled its batches.
        ("driver", (BATCH, 1), Fault.SUSPENDED_BEFORE, Recovery.RETRY),
        # The task dies, and its driver runs concurrently with the next try's.
        ("spark", (DRIVER, 1), Fault.KILLED_HALFWAY, Recovery.RETRY),
        # spark-submit fails after the driver has succeeded.
        ("spark", (DRIVER, 1), Fault.RESPONSE_LOST, Recovery.RETRY),
    ],
)
def test_every_message_is_accounted_for(campaign, task, call, fault, recovery):
    point = Point(f"one/{task}/1", *call)

    result = campaign.run(Case((Injection(point, fault),), recovery))

    assert result.passed, (result.account.lines, result.folder)


class Works(OnSpark):
    """Starts a job of a minute in the first ``handle_batch``, and creates a file during it."""

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        spark = messages.sparkSession
        tracker = spark.sparkContext.statusTracker()
        if os.path.exists("begun"):
            assert not tracker.getActiveJobsIds()
            return None
        job = spark.range(1).selectExpr("java_method('java.lang.Thread', 'sleep', id + 60000)")

        def begin() -> None:
            while not tracker.getActiveJobsIds():
                time.sleep(0.01)
            open("begun", "w").close()

        threading.Thread(target=begin).start()
        return job.collect() and None


@pytest.mark.usefixtures("jvm")
def test_spark_jobs_end_with_their_driver(tmp_path):
    case = Case.parse("one/driver/1 create begun #1: killed after")

    result = Campaign(partial(Embedded, Works), MESSAGES, tmp_path).run(case)

    assert result.passed, (result.account.lines, result.folder)
    # A message that no callback received would have been dead-lettered.
    assert set(result.account.outcomes.values()) == {"acked", "dead"}
    assert list(result.account.outcomes.values()).count("dead") == 2


class Appends(OnSpark):
    """Appends the rows of each batch, so that a repeated batch duplicates them."""

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        # An absolute path: the JVM has another working folder.

        messages.select("data").write.mode("append").text(str(Path.cwd() / "rows"))


class Replaces(OnSpark):
    """Overwrites the rows of a repeated batch."""

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        place = Path.cwd() / "rows" / batch_info.batch_id
        messages.select("data").write.mode("overwrite").text(str(place))


def rows(folder: Path) -> list[str]:
    parts = sorted(folder.glob("rows/**/part-*"))
    return [line for part in parts for line in part.read_text().split()]


def test_an_appending_spark_sink_is_reported(broadway_crash_test):
    with pytest.raises(AssertionError, match="is there twice, and should be once"):
        broadway_crash_test(Appends, MESSAGES, sink=rows, only=[KILLED])


def test_an_overwriting_spark_sink_passes(broadway_crash_test):
    assert broadway_crash_test(Replaces, MESSAGES, sink=rows, only=[KILLED]).cases == 1


def test_the_driver_has_crash_points(campaign):
    points, _ = campaign.baseline().points

    calls = [point.call for point in points if point.execution == "one/driver/1"]
    assert calls[0].target.endswith("work/spark-000001.json")
    assert calls.count(BATCH) == 2
    assert calls[-1] == Call("return", "")
