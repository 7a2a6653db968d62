"""What the ack sensor knows while the Dag is parsed, and what it asks Airflow for."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG, TaskGroup
from airflow.sdk.exceptions import AirflowRescheduleException

from airflow_broadway.core.broadway import Broadway
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.message import Message
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.sensors import ack
from airflow_broadway.sensors.ack import BroadwayAckSensor


class Clocked:
    """Stands for the module ``time``; sleeping moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", path="/nowhere/orders.db", lease=40.0)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


def sensor(**given: Any) -> BroadwayAckSensor:
    with DAG("orders", schedule=None):
        return BroadwayAckSensor(
            **{"task_id": "ack", "pipeline": Orders, "watch": ["process"], **given}
        )


def test_it_looks_four_times_within_a_lease_and_at_least_every_15_seconds() -> None:
    assert sensor().poke_interval == 10.0
    assert sensor(pipeline=Orders(producer={"lease": 3600.0})).poke_interval == 15.0


def test_a_lease_that_is_a_template_is_no_bound() -> None:
    assert sensor(pipeline=Orders(producer={"lease": "{{ var.value.x }}"})).poke_interval == 15.0


def test_an_interval_too_long_to_renew_the_lease_is_refused() -> None:
    with pytest.raises(OptionsError, match=r"at most half of the producer's lease \(40 s"):
        sensor(poke_interval=21.0)


@pytest.mark.parametrize("given", [{"watch": "process"}, {"watch": []}, {"hold_failed": -1.0}])
def test_nonsense_is_refused_while_the_dag_is_parsed(given: dict[str, Any]) -> None:
    with pytest.raises(OptionsError):
        sensor(**given)


def test_a_number_of_producers_cannot_be_a_template() -> None:
    with pytest.raises(OptionsError, match=r"producer\.concurrency.*not a template"):
        Orders(producer={"concurrency": "{{ var.value.many }}"}).dag("orders")


def test_a_template_lease_of_a_broker_that_cannot_renew_is_no_error_yet() -> None:
    class Fixed(SqliteProducer):
        renews = False

    class FixedOrders(Orders):
        producer = Fixed(queue="orders", path="/nowhere/orders.db")

    from airflow_broadway.task_group import _check_lease

    pipeline = FixedOrders(producer={"lease": "{{ var.value.x }}"})
    with DAG("orders", schedule=None):
        _check_lease(pipeline, TaskGroup("broadway"), {})


# ----------------------------------------------------------------------------------------- waiting


class Watched:
    """A sensor whose watched tasks go through the given states, one set a second."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *states: str, elapsed: float = 0.0, **given: Any
    ) -> None:
        self.clock = Clocked()
        self.sensor = sensor(**given)
        told = dict(enumerate(states))
        last = states[-1]
        monkeypatch.setattr(ack, "time", self.clock)
        monkeypatch.setattr(
            self.sensor, "_states", lambda context: {"p": told.get(int(self.clock.now), last)}
        )
        monkeypatch.setattr(self.sensor, "_elapsed", lambda context: elapsed + self.clock.now)
        self.looks: list[float] = []
        monkeypatch.setattr(self.sensor, "_look", self._look)

    def _look(self, context: Any) -> dict[str, Any] | None:
        self.looks.append(self.clock.now)
        return {"acked": 1} if ack._over(self.sensor._states(context)) else None

    def poke(self) -> Any:
        return self.sensor.poke({})


def test_a_short_run_is_over_within_a_second_of_its_last_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, "running", "running", "running", "success")

    done = watched.poke()

    assert done.is_done
    assert watched.looks == [0.0, 3.0]


def test_while_it_stays_it_renews_as_often_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a lease of 40 seconds, and a run that outlasts a minute
    watched = Watched(monkeypatch, "running")

    with pytest.raises(AirflowRescheduleException) as raised:
        watched.poke()

    # Then it has looked every 10 seconds, and goes when the run is no longer young
    assert watched.looks == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert raised.value.reschedule_date is not None


def test_a_task_that_waits_for_a_slot_is_not_kept_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, "running", "queued")

    with pytest.raises(AirflowRescheduleException):
        watched.poke()

    assert watched.looks == [0.0]
    assert watched.clock.now < 10.0


def test_a_run_that_is_held_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, "failed")
    monkeypatch.setattr(watched.sensor, "_look", lambda context: None)

    with pytest.raises(AirflowRescheduleException):
        watched.poke()

    assert watched.clock.now == 0.0


def test_a_poking_sensor_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, "running", mode="poke")

    assert watched.poke() is False
    assert watched.looks == [0.0]
