"""Airflow's notifiers, called with a run's alerts by its tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import DAG
from airflow.sdk.bases.notifier import BaseNotifier
from airflow.serialization.serialized_objects import DagSerialization

from airflow_broadway import Alerts, Batcher, Message
from airflow_broadway.core.errors import OptionsError, ProducerUnavailable
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.runs.unstaged import UnstagedTask
from airflow_broadway.sensors.ack import BroadwayAckSensor
from airflow_broadway.staging.run_folder import StagedRun
from tests.unit.operators.context import task_context
from tests.unit.passing import Passing


class Bad(Passing):
    """Fails what is odd, for good."""

    producer = SqliteProducer(queue="bad", path="/replaced", on_failure="dead_letter")
    batchers = {"default": Batcher(engine="python")}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed("odd") if int(message.data) % 2 else message


class Orders(Passing):
    """Of a broker that never knows an age."""

    producer = SqsProducer(queue_name="orders")


class Slow(BaseNotifier):
    """A notifier as people write one, with a template."""

    template_fields: Sequence[str] = ("text",)
    sent: ClassVar[list[str]] = []

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def notify(self, context: Any) -> None:
        self.sent.append(self.text)


class OnlyAsync(BaseNotifier):
    """One that is written for the triggerer alone."""

    template_fields: Sequence[str] = ("text",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    async def async_notify(self, context: Any) -> None:
        Slow.sent.append(f"async {self.text}")


TEXT = "{{ broadway_alert.kind }} in {{ broadway_alert.dag_id }}: {{ broadway_alert.message }}"


@pytest.fixture(autouse=True)
def sent() -> list[str]:
    Slow.sent = []
    return Slow.sent


def operator(root: Path, *, count: int = 4, **given: Any) -> BroadwayRunOperator:
    with SqliteQueue(root / "queue.db", "bad") as queue:
        queue.send([b"%d" % number for number in range(count)])
    return BroadwayRunOperator(
        task_id="run",
        pipeline=Bad(producer={"path": str(root / "queue.db")}),
        staging=f"file://{root}/staging",
        idle_seconds=0.0,
        **given,
    )


def context_of(run_id: str = "r") -> Any:
    context = task_context(run_id, task_id="run", running=False)
    with DAG("d", schedule=None) as dag:
        pass
    return {**context, "dag": dag}


def test_a_run_in_one_task_tells_each_notifier_in_its_own_words(
    tmp_path: Path, sent: list[str]
) -> None:
    seen: list[Any] = []
    alerts = Alerts(notifiers=[Slow(TEXT), OnlyAsync(TEXT), seen.append])

    operator(tmp_path, alerts=alerts).execute(context_of())

    words = (
        "dead_letters in d: Bad: 2 messages of run r became dead letters.  Why messages failed:"
        " 2 × odd."
    )
    assert sorted(sent) == [f"async {words}", words]
    [given] = seen
    assert given["ti"].task_id == "run"
    assert given["broadway_alert"]["facts"]["dead_lettered"] == 2


def test_a_notifier_renders_each_alert_anew(tmp_path: Path, sent: list[str]) -> None:
    alerts = Alerts(notifiers=[Slow("{{ broadway_alert.run_id }}")])

    for run_id in ("r1", "r2"):
        operator(tmp_path, alerts=alerts).execute(context_of(run_id))

    assert sent == ["r1", "r2"]


def test_a_notifier_that_fails_changes_nothing_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_broadway.runs.alerts.PAUSE", 0.0)

    def fail(context: Any) -> None:
        raise RuntimeError("away")

    made = operator(tmp_path, alerts=Alerts(notifiers=[fail]))
    assert made.execute(context_of())["dead_lettered"] == 2


def test_a_red_run_and_one_whose_broker_fails_tell_too(
    tmp_path: Path, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alerts = Alerts(notifiers=[Slow("{{ broadway_alert.run_id }}")])
    with pytest.raises(AirflowFailException, match="2 messages failed"):
        operator(tmp_path, alerts=alerts, fail_when=1).execute(context_of("red"))
    run = UnstagedTask.run

    def broken(task: UnstagedTask) -> Any:
        run(task)
        raise ProducerUnavailable("gone at the end")

    monkeypatch.setattr(UnstagedTask, "run", broken)
    with pytest.raises(ProducerUnavailable):
        operator(tmp_path, alerts=alerts).execute(context_of("broken"))
    assert sent == ["red", "broken"]


def test_an_old_backlog_is_told_by_a_run_that_received_nothing_and_its_files_go_in_time(
    tmp_path: Path, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = SqliteQueue.depth
    monkeypatch.setattr(
        SqliteQueue, "depth", lambda queue: depth(queue)._replace(ready=1, oldest_age=9.0)
    )
    with SqliteQueue(tmp_path / "queue.db", "another") as other:
        other.send([b"what makes the file"])  # of a queue without one nothing is known
    alerts = Alerts(notifiers=[Slow("{{ broadway_alert.kind }}")], backlog_age=5.0)

    operator(tmp_path, count=0, alerts=alerts).execute(context_of())

    assert sent == ["backlog_age"]
    marks = list((tmp_path / "staging").rglob("_balanced/*.json"))
    assert len(marks) == 1


def test_dead_letters_of_a_dead_run_are_told_by_the_next_run_in_one_task(
    tmp_path: Path, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a run that recorded its end, and died before it told of it
    with monkeypatch.context() as patch:
        patch.setattr(BroadwayRunOperator, "_tell", lambda *_: None)
        patch.setattr(StagedRun, "forget_open", lambda *_: None)
        operator(tmp_path).execute(context_of("first"))

    alerts = Alerts(notifiers=[Slow("{{ broadway_alert.run_id }}")])
    operator(tmp_path, count=0, alerts=alerts).execute(context_of("second"))

    assert sent == ["first"]


def test_a_broker_that_never_knows_an_age_is_refused_while_the_dag_is_parsed() -> None:
    with pytest.raises(OptionsError, match=r"Alerts\.backlog_age.*never tells how long"):
        Orders.dag("orders", alerts=Alerts(backlog_age=60.0))
    with pytest.raises(OptionsError, match=r"alerts.*expected Alerts"):
        Orders.dag("orders", alerts={"dead_letters": 1})


def test_alerts_come_to_the_sensor_and_are_no_part_of_the_stored_dag() -> None:
    alerts = Alerts(notifiers=[Slow("secret-text")], dead_letters=3)
    dag = Bad.dag("bad", alerts=alerts)

    [sensor] = [task for task in dag.tasks if isinstance(task, BroadwayAckSensor)]
    assert sensor.alerts is alerts
    stored = json.dumps(DagSerialization.to_dict(dag))
    assert "secret-text" not in stored
    assert stored == json.dumps(DagSerialization.to_dict(Bad.dag("bad", alerts=alerts)))
