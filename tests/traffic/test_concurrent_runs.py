"""Kills, stops and renames runs while other runs are active."""

from __future__ import annotations

import itertools
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_broadway.staging.crash_records import load_crash_history
from airflow_broadway.staging.store import Store
from tests.contract.sqs_harness import SharedClock
from tests.traffic.brokers import DEAD, LeaseExpiring
from tests.traffic.pipelines import fails_for_good
from tests.traffic.preemption import FAULTS, finish_without_kills
from tests.traffic.series import Series
from tests.traffic.sink import read_handled
from tests.traffic.workers import Worker

pytestmark = [pytest.mark.broker, pytest.mark.slow]

#: Budget of a run that receives until something ends it.
_HUNGRY = {"wait_seconds": 60.0, "idle_seconds": 60.0, "max_seconds": 60.0}
#: Lease, in seconds, that expires during a test.
_SHORT = 4.0


@pytest.fixture(params=["sqlite", "rabbitmq", "sqs", "pubsub", "apache_kafka"])
def broker(request, open_broker, tmp_path):
    options = {"order": "none"} if request.param == "apache_kafka" else {}
    return open_broker(request.param, **options)(tmp_path)


@pytest.fixture
def series(broker, tmp_path):
    with Series(broker, tmp_path, rate=0.0) as account:
        yield account


def wait_for_messages(series: Series, worker: Worker, run: str, folder: Path) -> None:
    """Waits until a run has received messages, and for half a second more."""
    while not list((folder / "staging").rglob(f"{run}/generations/*")):
        assert not worker.done, series.end(worker)
        time.sleep(0.02)
    time.sleep(0.5)


def publish(series: Series, count: int) -> None:
    """Publishes until ``count`` more messages are confirmed."""
    wanted = len(series.publisher.confirmed) + count
    series.publisher.rate = 1000.0
    while len(series.publisher.confirmed) < wanted:
        time.sleep(0.01)
    series.publisher.rate = 0.0


def test_a_sensor_killed_twenty_times_settles_each_message_once(broker, series, tmp_path):
    worker = Worker(tmp_path / "worker.log")
    kills = rounds = 0
    while kills < 20:
        # Given a run whose batches have outcomes
        rounds += 1
        run = f"round-{rounds}"
        publish(series, 100)
        series.start_run(worker, run=run, flow="unsettled", faults=FAULTS)
        assert not worker.wait_for_response()["raised"]

        # When its sensor is killed at its first write, at a later one, …
        for write in itertools.count(1, 2):
            sensor = Worker(tmp_path / "sensor.log")
            faults = FAULTS if kills == 20 else {**FAULTS, "freeze_at_any": write}
            series.start_run(sensor, run=run, flow="ack", faults=faults)
            if not sensor.wait_until_stopped():
                assert not series.end(sensor)["raised"]
                sensor.kill()
                break
            sensor.kill()
            kills += 1
    worker.kill()

    # Then the reports of the completed sensors agree with the queues and the sink.
    # A retry or dead letter may have been published twice; then it is marked
    summary = series.close(exact=broker.kind == "sqlite")
    assert summary.passed, str(summary)
    assert {message.number for message in series.left if message.place == DEAD} <= {
        number for number in range(series.publisher.published) if fails_for_good(number)
    }
    if broker.kind == "sqlite":
        assert summary.duplicates == 0, str(summary)
    assert summary.handled > 60 * rounds


def test_a_run_keeps_its_messages_while_its_neighbour_is_killed_thirty_times(
    broker, series, tmp_path
):
    # Given a run that handles its messages slowly
    rng = random.Random(3)
    series.publisher.rate = 100.0
    steady = Worker(tmp_path / "steady.log")
    budget = {**_HUNGRY, "max_messages": 200}
    kwargs: dict[str, Any] = {"flow": "staged", "faults": FAULTS}
    series.start_run(steady, run="steady", budget=budget, context={"slow": 0.03}, **kwargs)

    # When runs next to it are killed
    for number in range(30):
        worker = Worker(tmp_path / "killed.log")
        series.start_run(
            worker, run=f"killed-{number}", running=["steady"], budget=_HUNGRY, **kwargs
        )
        time.sleep(rng.uniform(0.1, 0.5))
        worker.kill()
    response = series.end(steady)
    steady.kill()

    # Then it has settled all that it received, and other runs handle the killed runs' messages
    assert not response["raised"]
    assert response["report"]["balanced"]
    assert response["report"]["received"] >= 200
    assert response["report"]["released"] == response["report"]["lapsed"] == 0
    lines = read_handled(tmp_path / "sink.jsonl")
    summary = finish_without_kills(series, broker, tmp_path)
    assert summary.passed, str(summary)
    mine = [line.message_id for line in lines if line.run == "steady"]
    others = {
        line.message_id
        for line in read_handled(tmp_path / "sink.jsonl")
        if line.run != "steady" and line.attempt == 1 and not line.redelivered
    }
    assert len(mine) == len(set(mine)) > 100
    assert not others & set(mine)


def test_a_pipeline_renamed_between_crashes_blames_and_loses_nothing(broker, series, tmp_path):
    # Given a pipeline that was killed under one name, then under another, and so on
    publish(series, 300)
    lapses = isinstance(broker, LeaseExpiring)
    lease = {} if lapses else {"producer": {"lease": _SHORT}}
    kwargs: dict[str, Any] = {"flow": "staged", "faults": FAULTS, **lease}
    names = ("LivingBefore", "LivingAfter")
    for number in range(8):
        worker, run = Worker(tmp_path / "killed.log"), f"killed-{number}"
        slow = {"context": {"slow": 0.02}, "budget": _HUNGRY}
        series.start_run(worker, run=run, named=names[number % 2], **slow, **kwargs)
        wait_for_messages(series, worker, run, tmp_path)
        worker.kill()
        if isinstance(broker, LeaseExpiring):
            broker.expire_leases()

    # When the leases of the first name have expired, and it runs under the second one
    time.sleep(0.0 if lapses else _SHORT + 0.5)
    summary = finish_without_kills(series, broker, tmp_path, named=names[1])

    # Then nothing is lost or dead-lettered without cause, and each name has its own crashes
    assert summary.passed, str(summary)
    store, now = Store.open(f"file://{tmp_path}/staging"), SharedClock(str(tmp_path / "n")).now()
    histories = [load_crash_history(store, name, now) for name in names]
    assert all(history.crashes for history in histories)
    assert not any(history.alone for history in histories)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "its child killed"])
def test_a_paused_run_whose_suspects_are_taken_over_blames_none(broker, series, tmp_path, killed):
    # Given a crash on record, and messages that a run handles in a child process
    publish(series, 60)
    producer = {"max_crashes": 1}
    kwargs: dict[str, Any] = {"flow": "staged", "faults": FAULTS, "producer": producer}
    worker = Worker(tmp_path / "killed.log")
    series.start_run(worker, run="killed", context={"slow": 0.05}, budget=_HUNGRY, **kwargs)
    wait_for_messages(series, worker, "killed", tmp_path)
    worker.kill()
    if isinstance(broker, LeaseExpiring):
        broker.expire_leases()
    late = Worker(tmp_path / "late.log")
    series.start_run(
        late, run="late", context={"slow": 0.05}, budget={"wait_seconds": 1.0}, **kwargs
    )
    children: list[psutil.Process] = []
    while not children and not late.done:  # it has suspects
        children = late.children()
        time.sleep(0.05)
    assert children, "no message was a suspect"
    time.sleep(1.5)

    # When it is stopped, another run takes over its messages, and it continues
    late.signal(signal.SIGSTOP)
    while not broker.is_unlocked():
        late.signal(signal.SIGCONT)
        time.sleep(0.01)
        late.signal(signal.SIGSTOP)
    if killed:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    if isinstance(broker, LeaseExpiring):
        broker.expire_leases()
    other = Worker(tmp_path / "other.log")
    series.run(other, budget={"wait_seconds": 1.0}, **kwargs)
    other.kill()
    late.signal(signal.SIGCONT)
    series.end(late)
    late.kill()

    # Then no message is dead-lettered but those that fail for good, and none is lost
    summary = finish_without_kills(series, broker, tmp_path, producer=producer)
    assert summary.passed, str(summary)
