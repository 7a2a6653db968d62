"""The ack sensor: parse-time checks, and its requests to Airflow."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, TaskGroup
from airflow.sdk.exceptions import AirflowRescheduleException

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.operators.process import ended_sensor
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.sensors import ack
from airflow_broadway.sensors.ack import BroadwayAckSensor
from airflow_broadway.task_group import _check_lease
from tests.unit.passing import Passing


class Clocked:
    """Stands for the module ``time``; sleeping moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Orders(Passing):
    producer = SqliteProducer(queue="orders", path="/nowhere/orders.db", lease=40.0)


def sensor(**options: Any) -> BroadwayAckSensor:
    with DAG("orders", schedule=None):
        return BroadwayAckSensor(
            **{"task_id": "ack", "pipeline": Orders, "watch": ["process"], **options}
        )


def test_sensor_pokes_four_times_per_lease_and_every_15_seconds():
    assert sensor().poke_interval == 10.0
    assert sensor(pipeline=Orders(producer={"lease": 3600.0})).poke_interval == 15.0


def test_sensor_in_the_triggerer_is_a_process_only_to_renew():
    assert sensor(deferrable=True).poke_interval == 10.0
    hour, day = (Orders(producer={"lease": lease}) for lease in (3600.0, 86_400.0))
    assert sensor(pipeline=Orders(producer={"lease": 900.0}), deferrable=True).poke_interval == 225
    assert sensor(pipeline=hour, deferrable=True).poke_interval == 300.0
    assert sensor(pipeline=day, deferrable=True, poke_interval=900).poke_interval == 900.0


@pytest.mark.parametrize(
    ("seconds", "try_number", "late"), [(9, 1, False), (11, 1, True), (11, 2, False)]
)
def test_sensor_that_waited_for_a_quarter_of_the_lease_says_so(seconds, try_number, late):
    start = datetime.now(UTC)
    ti = SimpleNamespace(
        try_number=try_number,
        start_date=start + timedelta(seconds=seconds),
        get_first_reschedule_date=lambda context: None,
    )
    context: Any = {"ti": ti, "dag_run": SimpleNamespace(start_date=start)}
    look = sensor(pool="acks")

    text = look._describe_delay(context, 40.0)

    assert ("ack waited 11 s for a slot (pool 'acks') and renewed no lease" in text) is late
    with pytest.raises(AirflowFailException) as caught:
        look._conclude(report_of(lapsed=1), text)
    assert str(caught.value).count("waited") == late


def test_templated_lease_is_no_bound():
    assert sensor(pipeline=Orders(producer={"lease": "{{ var.value.x }}"})).poke_interval == 15.0


def test_number_of_producers_cannot_be_a_template():
    with pytest.raises(OptionsError, match=r"producer\.concurrency.*not a template"):
        Orders(producer={"concurrency": "{{ var.value.many }}"}).dag("orders")


def test_templated_lease_of_a_non_renewing_broker_is_no_error_yet():
    class Fixed(SqliteProducer):
        renews = False

    class FixedOrders(Orders):
        producer = Fixed(queue="orders", path="/nowhere/orders.db")

    pipeline = FixedOrders(producer={"lease": "{{ var.value.x }}"})
    with DAG("orders", schedule=None):
        _check_lease(pipeline, TaskGroup("broadway").dag, "process", {})


# ----------------------------------------------------------------------------------------- waiting


class Watched:
    """A sensor whose watched tasks go through these states, one set a second."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *states: str, elapsed: float = 0.0, **options: Any
    ) -> None:
        self.clock = Clocked()
        self.sensor = sensor(**options)
        self._by_second = dict(enumerate(states))
        self._last = states[-1]
        monkeypatch.setattr(ack, "time", self.clock)
        monkeypatch.setattr(self.sensor, "_states", self._states)
        #: The times of reading task states.
        self.reads: list[float] = []
        monkeypatch.setattr(self.sensor, "_elapsed", lambda context: elapsed + self.clock.now)
        self.looks: list[float] = []
        monkeypatch.setattr(self.sensor, "_check_run", self._check_run)

    def _states(self, context: Any) -> dict[str, str | None]:
        self.reads.append(self.clock.now)
        return {"p": self._by_second.get(int(self.clock.now), self._last)}

    def _check_run(self, context: Any) -> dict[str, Any] | None:
        self.looks.append(self.clock.now)
        return {"acked": 1} if ack._over(self.sensor._states(context)) else None

    def poke(self) -> Any:
        return self.sensor.poke({})


def test_short_run_ends_within_a_second_of_its_last_task(monkeypatch):
    watched = Watched(monkeypatch, "running", "running", "running", "success")

    result = watched.poke()

    assert result.is_done
    assert watched.looks == [0.0, pytest.approx(3.0, abs=1.0)]


def test_states_are_read_more_often_after_a_change(monkeypatch):
    watched = Watched(monkeypatch, *["queued"] * 4, *["running"] * 6, "success")

    watched.poke()

    gaps = [(at, after - at) for at, after in pairwise(watched.reads) if after > at]
    least = pytest.approx(ack.MIN_STAY_INTERVAL)
    first_after = next(gap for at, gap in gaps if at >= 4.0)
    last_before = [gap for at, gap in gaps if at < 4.0][-1]
    assert gaps[0][1] == least
    assert first_after == least
    assert ack.MIN_STAY_INTERVAL < last_before <= ack.STAY_INTERVAL == gaps[-1][1]


def test_waiting_sensor_renews_at_its_interval(monkeypatch):
    # Given a lease of 40 seconds, and a run that outlasts a minute
    watched = Watched(monkeypatch, "running")
    before = datetime.now(UTC)

    with pytest.raises(AirflowRescheduleException) as raised:
        watched.poke()

    # Then it has looked every 10 seconds, and goes when the run is no longer young
    gaps = [after - before for before, after in pairwise(watched.looks)]
    assert len(gaps) == 6
    assert all(10.0 <= gap < 11.0 for gap in gaps)
    # for as long as its interval
    assert timedelta(seconds=9) < raised.value.reschedule_date - before < timedelta(seconds=15)


def test_sensor_frees_its_slot_for_a_queued_task(monkeypatch):
    watched = Watched(monkeypatch, "running", "queued")

    with pytest.raises(AirflowRescheduleException):
        watched.poke()

    assert watched.looks == [0.0]
    assert watched.clock.now < 10.0


def test_held_run_is_not_awaited(monkeypatch):
    watched = Watched(monkeypatch, "failed")
    monkeypatch.setattr(watched.sensor, "_check_run", lambda context: None)

    with pytest.raises(AirflowRescheduleException):
        watched.poke()

    assert watched.clock.now == 0.0


def test_poking_sensor_frees_nothing(monkeypatch):
    watched = Watched(monkeypatch, "running", mode="poke")

    assert watched.poke() is False
    assert watched.looks == [0.0]


def report_of(**totals: int) -> dict[str, Any]:
    received = sum(count for name, count in totals.items() if name != "failed")
    return {
        "dag_id": "orders",
        "run_id": "r",
        "path": "file:///report.json",
        "totals": {"failed": 0, "lapsed": 0, "settle_failed": 0}
        | totals
        | {"received": received, "accounted": received},
        "balanced": True,
        "errors": [],
    }


@pytest.mark.parametrize(
    ("options", "totals", "why"),
    [
        ({}, {"acked": 4, "lapsed": 1}, "1 message had lapsed"),
        ({}, {"acked": 4, "settle_failed": 1}, "1 could not be settled"),
        ({}, {"dead_lettered": 5, "failed": 5}, "every message that was handled"),
        ({}, {"requeued": 10, "failed": 10}, "every message that was handled"),
        ({}, {"requeued": 2, "dead_lettered": 1, "failed": 3}, "every message that was handled"),
        ({"fail_when": 1}, {"requeued": 1, "failed": 1}, "every message that was handled"),
        ({"fail_when": 0.1}, {"acked": 9, "dead_lettered": 1, "failed": 1}, "of 10 handled"),
        ({"fail_when": 2}, {"acked": 9, "requeued": 2, "failed": 2}, "2 messages failed"),
    ],
)
def test_lost_or_failed_messages_fail_the_sensor(options, totals, why):
    with pytest.raises(AirflowFailException, match=why):
        sensor(**options)._conclude(report_of(**totals))


@pytest.mark.parametrize(
    ("options", "totals"),
    [
        ({}, {"acked": 4, "dead_lettered": 1, "failed": 1}),
        ({}, {"requeued": 1, "failed": 1}),
        ({}, {}),
        ({}, {"released": 3}),
        ({"fail_when": "never"}, {"dead_lettered": 5, "failed": 5}),
        ({"fail_when": 0.5}, {"acked": 1, "requeued": 2, "failed": 2}),
        ({"fail_when": 0.5}, {"acked": 3, "requeued": 2, "failed": 2}),
    ],
)
def test_tolerated_failures_succeed(options, totals):
    assert sensor(**options)._conclude(report_of(**totals))["received"] == sum(
        count for name, count in totals.items() if name != "failed"
    )


def test_unbalanced_run_fails_without_retry():
    # Given a run of which one message is in no class
    report = report_of(acked=4) | {"balanced": False}
    report["totals"] |= {"received": 5}

    # Then it fails for good, even if any number of messages may fail
    with pytest.raises(AirflowFailException, match="does not balance: 5 received, 4 accounted for"):
        sensor(fail_when="never")._conclude(report)


def test_sensor_failure_contains_no_broker_text(monkeypatch):
    # Given a broker that answers with what a sender wrote
    report = report_of(acked=4, settle_failed=1) | {"errors": ["refused: <b>x</b>"]}

    lines: list[str] = []
    look = sensor()
    monkeypatch.setattr(look.log, "info", lambda text, *values: lines.append(text % values))
    with pytest.raises(AirflowFailException) as caught:
        look._conclude(report)

    # Then the log has it, and what notifiers send has figures
    assert str(caught.value) == (
        "All messages are settled or released, but 1 could not be settled: they are delivered"
        " again, marked as redelivered.  5 messages received: 4 acked, 1 could not be settled."
    )
    assert "Error: refused: <b>x</b>" in lines


def test_failed_task_fails_the_sensor():
    with pytest.raises(AirflowFailException, match=r"tasks failed: broadway\.batch\.late; fix"):
        sensor()._conclude({**report_of(acked=4), "failed_tasks": ["broadway.batch.late"]})


def test_mapped_tasks_are_named_as_in_the_ui():
    with DAG("orders", schedule=None) as dag:
        for task_id in ("process", "batch_1"):
            EmptyOperator(task_id=task_id)
        look = BroadwayAckSensor(task_id="ack", pipeline=Orders, watch=["process", "batch_1"])
    states = {"process_0": "success", "process_1": "failed", "batch_1": "skipped"}
    ti = SimpleNamespace(
        dag_id="orders", run_id="r", get_task_states=lambda dag_id, run_ids, task_ids: {"r": states}
    )
    context: Any = {"ti": ti, "dag": dag}

    assert look._states(context) == {
        "process[0]": "success",
        "process[1]": "failed",
        "batch_1": "skipped",
    }


@pytest.mark.parametrize(("state", "ended"), [("success", "ack"), ("running", None), (None, None)])
def test_process_task_knows_whether_its_sensor_has_ended(state, ended):
    with DAG("orders", schedule=None) as dag:
        process = EmptyOperator(task_id="process")
        BroadwayAckSensor(task_id="ack", pipeline=Orders, watch=["process"])
        EmptyOperator(task_id="other")
    ti = SimpleNamespace(
        dag_id="orders",
        run_id="r",
        get_task_states=lambda dag_id, run_ids, task_ids: {"r": dict.fromkeys(task_ids, state)},
    )
    context: Any = {"ti": ti, "dag": dag}
    assert ended_sensor(process.task_id, context) == ended
    assert ended_sensor("other", context) is None
