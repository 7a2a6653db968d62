"""Workers that share no staging folder: no task mistakes missing files for an empty run."""

from __future__ import annotations

import copy
import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException
from airflow.sdk import DAG

from airflow_broadway.core.custody.run_summary import lines_of
from airflow_broadway.core.errors import StagingError
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.runs.spark_batches import SparkBatches
from airflow_broadway.sensors.ack import BroadwayAckSensor
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from tests.unit.operators.context import task_context
from tests.unit.runs.steps import AS_AIRFLOW, PlainSums, Sums


class Hosts:
    """The tasks of one run, wired by hand, each on a host with its own staging folder."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, pipeline: type[Sums] = Sums, sent: int = 5
    ) -> None:
        self.folder = folder
        self.patch = patch
        self.pushed: dict[str, list[Any]] = {"process": [], "late": []}
        producer = {"path": str(folder / "queue.db")}
        self.pipeline = pipeline(producer=producer, context={"calls": str(folder / "calls.db")})
        with SqliteQueue(folder / "queue.db", "sums") as queue:
            queue.send([b"%d" % number for number in range(1, sent + 1)])
        with DAG("d", schedule=None) as self.dag:
            self.process = BroadwayProcessorOperator(
                task_id="process", pipeline=self.pipeline, idle_seconds=0.0
            )
            if self.pipeline.batchers:
                self.late = BroadwayBatcherOperator(
                    task_id="late",
                    pipeline=self.pipeline,
                    batcher="default",
                    processed=self.process.output,
                )
            self.ack = BroadwayAckSensor(
                task_id="ack", pipeline=self.pipeline, watch=list(self.dag.task_ids)
            )

    def staged(self, host: str) -> StagedRun:
        return StagedRun(self.store(host), pipeline="Sums", dag_id="d", run_id="r")

    def store(self, host: str) -> Store:
        return Store.open(f"file://{self.folder}/{host}")

    def copy(self, host: str, other: str) -> None:
        """Copy a host's staging folder to another host, its id with it."""
        self.store(host).root_id()
        shutil.copytree(self.folder / host, self.folder / other)

    def context(self, task_id: str) -> Any:
        context = task_context(task_id=task_id)
        ti = context["ti"]
        ti.dag = context["dag"] = self.dag
        ti.start_date = datetime.now(UTC)
        ti.get_first_reschedule_date = lambda context: None
        ti.get_task_states = lambda dag_id, run_ids, task_ids: {
            "r": {task: "running" if task == "ack" else "success" for task in task_ids}
        }
        ti.xcom_pull = lambda task_ids: [
            value for task_id in task_ids for value in self.pushed[task_id] or [None]
        ]
        return context

    def run(self, task: Any, host: str) -> Any:
        """Execute a task on a host, whose staging folder has the host's name."""
        self.patch.setattr("socket.gethostname", lambda: host)
        task.staging = f"file://{self.folder}/{host}"
        if task is not self.ack:
            if task is not self.process:
                task.processed = self.pushed["process"]
            self.pushed[task.task_id].append(task.execute(self.context(task.task_id)))
            return self.pushed[task.task_id][-1]
        result: Any = copy.copy(self.ack).poke(self.context("ack"))  # as in a new process
        return result.xcom_value

    def both(self, writer: str, reader: str) -> str:
        """A pattern that names both hosts, both roots and the setting."""
        names = [
            *(re.escape(repr(host)) for host in (writer, reader)),
            *(self.store(host).root_id() for host in (writer, reader)),
            r"`\[broadway\] staging`",
        ]
        return "(?s)" + "".join(f"(?=.*{name})" for name in names)


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    return Hosts(tmp_path, monkeypatch)


def test_sensor_without_the_files_fails_and_names_both_hosts(hosts):
    reference = hosts.run(hosts.process, "one")
    assert (reference["host"], reference["root_id"]) == ("one", hosts.store("one").root_id())
    hosts.run(hosts.late, "one")

    with pytest.raises(AirflowException, match=hosts.both("one", "two")) as raised:
        hosts.run(hosts.ack, "two")
    assert str(raised.value).startswith(
        "5 messages of 1 process task cannot be settled or accounted for here: "
    )

    # A retry on the host that has them settles them
    assert hosts.run(hosts.ack, "one")["accounted"] == 5


def test_sensor_settles_its_own_files_before_failing(tmp_path, monkeypatch):
    hosts = Hosts(tmp_path, monkeypatch, PlainSums, sent=3)
    hosts.run(hosts.process, "one")
    hosts.run(hosts.process, "two")  # received nothing

    with pytest.raises(AirflowException, match=hosts.both("two", "one")):
        hosts.run(hosts.ack, "one")

    report = json.loads(hosts.staged("one").files.read("report.json"))
    assert report["totals"]["accounted"] == report["totals"]["received"] == 3
    assert not report["balanced"]
    assert re.match(hosts.both("two", "one"), report["unseen"])
    assert report["errors"] == [report["unseen"]]


@pytest.mark.parametrize("copied", [False, True])
def test_remote_unbatched_sensor_explains_that_the_process_task_settled(
    tmp_path, monkeypatch, copied
):
    hosts = Hosts(tmp_path, monkeypatch, PlainSums, sent=3)
    if copied:
        hosts.copy("one", "two")
    hosts.run(hosts.process, "one")
    with SqliteQueue(tmp_path / "queue.db", "sums") as queue:
        assert sum(queue.depth()[:4]) == 0

    with pytest.raises(AirflowException) as raised:
        hosts.run(hosts.ack, "two")
    text = str(raised.value)
    assert "were settled by the task that received them, and cannot be accounted for here" in text
    assert "`[broadway] staging`" in text
    assert "clear" not in text  # that would receive other messages


def test_copied_root_has_the_same_id_and_other_files(hosts):
    # As of a virtual machine's image, or a container's
    hosts.copy("one", "two")
    hosts.run(hosts.process, "one")
    planned = hosts.run(hosts.late, "one")

    with pytest.raises(AirflowException, match=r"set `\[broadway\] staging` .* copy of another"):
        hosts.run(hosts.ack, "two")
    run = hosts.staged("two")
    rule = (
        r"1 plan of batches that host 'one' wrote are not in .*/two/Sums/d/r as host 'two' sees it,"
        r" .* set `\[broadway\] staging` to a folder that all hosts share"
    )
    with pytest.raises(StagingError, match=rule):
        SparkBatches(run, hosts.pipeline, [planned], AS_AIRFLOW)


def test_batch_task_on_another_host_fails_and_names_both(hosts):
    hosts.run(hosts.process, "one")

    with pytest.raises(StagingError, match=hosts.both("one", "two")):
        hosts.run(hosts.late, "two")


def test_spark_task_on_another_host_fails_and_names_both(hosts, monkeypatch):
    hosts.run(hosts.process, "one")
    planned = hosts.run(hosts.late, "one")
    monkeypatch.setattr("socket.gethostname", lambda: "two")
    run = hosts.staged("two")

    with pytest.raises(StagingError, match=hosts.both("one", "two")):
        SparkBatches(run, hosts.pipeline, [planned], AS_AIRFLOW)


def test_removed_files_are_not_an_empty_run(hosts):
    hosts.run(hosts.process, "one")
    hosts.run(hosts.late, "one")
    shutil.rmtree(hosts.folder / "one" / hosts.staged("one").path)

    with pytest.raises(AirflowException, match=r"names 5 messages .* sees 0 messages of it"):
        hosts.run(hosts.ack, "one")


def test_hand_wired_sensor_may_watch_other_tasks(hosts):
    hosts.run(hosts.process, "one")
    hosts.run(hosts.late, "one")
    hosts.pushed["late"] += [None, 7, "text", ["a"], {"generation": ""}]

    assert hosts.run(hosts.ack, "one")["received"] == 5


# -- nothing received ------------------------------------------------------------------------------


def test_run_without_messages_reports_requests_and_depth(tmp_path, monkeypatch, caplog):
    # Another run holds all messages
    hosts = Hosts(tmp_path, monkeypatch, PlainSums, sent=3)
    with SqliteQueue(tmp_path / "queue.db", "sums") as queue:
        queue.receive("other", 3)

    reference = hosts.run(hosts.process, "one")
    assert reference["received"] == 0
    assert reference["receives"] == 1
    assert reference["depth"]["leased"] == 3
    line = "No message was received by 1 request (stopped by empty).  The queue: 0 ready, 0 wait"
    [record] = [record for record in caplog.records if record.getMessage().startswith(line)]
    assert record.levelname == "INFO"

    hosts.run(hosts.ack, "one")
    report = json.loads(hosts.staged("one").files.read("report.json"))
    assert report["generations"][0]["depth"]["leased"] == 3
    assert lines_of(report)[1].startswith(line)


def test_run_without_requests_warns_with_the_depth(tmp_path, monkeypatch, caplog):
    # The task is stopped before it asks
    hosts = Hosts(tmp_path, monkeypatch, PlainSums, sent=3)
    monkeypatch.setattr("airflow_broadway.core.stages.stop.Stop.reason", lambda self: "signal")

    reference = hosts.run(hosts.process, "one")

    assert reference["receives"] == 0
    [record] = [
        record for record in caplog.records if "No messages were requested" in record.getMessage()
    ]
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "No messages were requested from the broker (stopped by signal).  The queue: 3 ready, 0"
        " wait for a retry, 0 held by runs; the oldest is "
    )
