"""Attacks on one run while others are at work: kills and stops from outside, and a new name."""

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
from tests.living.brokers import DEAD, Lapsing
from tests.living.pipelines import fails_for_good
from tests.living.preemptions import HARM, close_quietly
from tests.living.series import Series
from tests.living.sink import handled
from tests.living.workers import Worker

pytestmark = [pytest.mark.broker, pytest.mark.slow]

#: A run that takes what comes until something ends it.
_HUNGRY = {"wait_seconds": 60.0, "idle_seconds": 60.0, "max_seconds": 60.0}
#: Seconds of a lease that lapses in a test.
_SHORT = 4.0


@pytest.fixture(params=["sqlite", "rabbitmq", "sqs", "pubsub", "apache_kafka"])
def broker(request, open_broker, tmp_path):
    options = {"order": "none"} if request.param == "apache_kafka" else {}
    return open_broker(request.param, **options)(tmp_path)


@pytest.fixture
def series(broker, tmp_path):
    with Series(broker, tmp_path, rate=0.0) as made:
        yield made


def wait_for_messages(series: Series, worker: Worker, run: str, folder: Path) -> None:
    """Waits until a run has received, and been at work for a while."""
    while not list((folder / "staging").rglob(f"{run}/generations/*")):
        assert not worker.done, series.end(worker)
        time.sleep(0.02)
    time.sleep(0.5)


def publish(series: Series, count: int) -> None:
    """Waits until so many messages more are confirmed, and publishes no more."""
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
        series.begin(worker, run=run, flow="unsettled", harm=HARM)
        assert not worker.answer()["raised"]

        # When its sensor is killed at its first write, at a later one, …
        for write in itertools.count(1, 2):
            sensor = Worker(tmp_path / "sensor.log")
            harm = HARM if kills == 20 else {**HARM, "freeze_at_any": write}
            series.begin(sensor, run=run, flow="ack", harm=harm)
            if not sensor.frozen():
                assert not series.end(sensor)["raised"]
                sensor.end()
                break
            sensor.end()
            kills += 1
    worker.end()

    # Then the reports of the sensors that came to their end agree with the queues and the sink.
    # A republished message, retry or dead letter, may be there twice, and is marked
    summary = series.close(exact=broker.kind == "sqlite")
    assert summary.good, str(summary)
    assert {message.number for message in series.left if message.place == DEAD} <= {
        number for number in range(series.publisher.published) if fails_for_good(number)
    }
    if broker.kind == "sqlite":
        assert summary.again == 0, str(summary)
    assert summary.handled > 60 * rounds


def test_a_run_keeps_its_messages_while_its_neighbour_is_killed_thirty_times(
    broker, series, tmp_path
):
    # Given a run that handles its messages slowly
    dice = random.Random(3)
    series.publisher.rate = 100.0
    steady = Worker(tmp_path / "steady.log")
    budget = {**_HUNGRY, "max_messages": 200}
    kwargs: dict[str, Any] = {"flow": "staged", "harm": HARM}
    series.begin(steady, run="steady", budget=budget, context={"slow": 0.03}, **kwargs)

    # When runs next to it are killed
    for number in range(30):
        worker = Worker(tmp_path / "killed.log")
        series.begin(worker, run=f"killed-{number}", running=["steady"], budget=_HUNGRY, **kwargs)
        time.sleep(dice.uniform(0.1, 0.5))
        worker.end()
    answer = series.end(steady)
    steady.end()

    # Then it has settled all that it received, and so do others with what the killed ones held
    assert not answer["raised"]
    assert answer["report"]["balanced"]
    assert answer["report"]["received"] >= 200
    assert answer["report"]["released"] == answer["report"]["lapsed"] == 0
    lines = handled(tmp_path / "sink.jsonl")
    summary = close_quietly(series, broker, tmp_path)
    assert summary.good, str(summary)
    mine = [line.message_id for line in lines if line.run == "steady"]
    others = {
        line.message_id
        for line in handled(tmp_path / "sink.jsonl")
        if line.run != "steady" and line.attempt == 1 and not line.redelivered
    }
    assert len(mine) == len(set(mine)) > 100
    assert not others & set(mine)


def test_a_pipeline_renamed_between_crashes_blames_and_loses_nothing(broker, series, tmp_path):
    # Given a pipeline that was killed under one name, then under another, and so on
    publish(series, 300)
    lapses = isinstance(broker, Lapsing)
    lease = {} if lapses else {"producer": {"lease": _SHORT}}
    kwargs: dict[str, Any] = {"flow": "staged", "harm": HARM, **lease}
    names = ("LivingBefore", "LivingAfter")
    for number in range(8):
        worker, run = Worker(tmp_path / "killed.log"), f"killed-{number}"
        slow = {"context": {"slow": 0.02}, "budget": _HUNGRY}
        series.begin(worker, run=run, named=names[number % 2], **slow, **kwargs)
        wait_for_messages(series, worker, run, tmp_path)
        worker.end()
        if isinstance(broker, Lapsing):
            broker.lapse()

    # When what the other name held has lapsed, and it runs under the second one
    time.sleep(0.0 if lapses else _SHORT + 0.5)
    summary = close_quietly(series, broker, tmp_path, named=names[1])

    # Then nothing is lost or dead-lettered without cause, and each name has its own crashes
    assert summary.good, str(summary)
    store, now = Store.open(f"file://{tmp_path}/staging"), SharedClock(str(tmp_path / "n")).now()
    histories = [load_crash_history(store, name, now) for name in names]
    assert all(history.crashes for history in histories)
    assert not any(history.alone for history in histories)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "its child killed"])
def test_a_paused_run_whose_suspects_are_taken_over_blames_none(broker, series, tmp_path, killed):
    # Given a crash on record, and messages that a run handles in a child process
    publish(series, 60)
    producer = {"max_crashes": 1}
    kwargs: dict[str, Any] = {"flow": "staged", "harm": HARM, "producer": producer}
    worker = Worker(tmp_path / "killed.log")
    series.begin(worker, run="killed", context={"slow": 0.05}, budget=_HUNGRY, **kwargs)
    wait_for_messages(series, worker, "killed", tmp_path)
    worker.end()
    if isinstance(broker, Lapsing):
        broker.lapse()
    late = Worker(tmp_path / "late.log")
    series.begin(late, run="late", context={"slow": 0.05}, budget={"wait_seconds": 1.0}, **kwargs)
    children: list[psutil.Process] = []
    while not children and not late.done:  # it has suspects
        children = late.children()
        time.sleep(0.05)
    assert children, "no message was a suspect"
    time.sleep(1.5)

    # When it is stopped, and another run takes all over, before it goes on
    late.signal(signal.SIGSTOP)
    while not broker.free():
        late.signal(signal.SIGCONT)
        time.sleep(0.01)
        late.signal(signal.SIGSTOP)
    if killed:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    if isinstance(broker, Lapsing):
        broker.lapse()
    other = Worker(tmp_path / "other.log")
    series.run(other, budget={"wait_seconds": 1.0}, **kwargs)
    other.end()
    late.signal(signal.SIGCONT)
    series.end(late)
    late.end()

    # Then no message is dead-lettered but those that fail for good, and none is lost
    summary = close_quietly(series, broker, tmp_path, producer=producer)
    assert summary.good, str(summary)
