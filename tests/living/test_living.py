"""Nothing is lost while messages go on coming: a round of each broker; `make faults` has many."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.sqs_harness import SharedClock, moved_server
from tests.living.brokers import LivingBroker
from tests.living.brokers_kafka import LivingKafka
from tests.living.brokers_pubsub import LivingPubSub
from tests.living.brokers_rabbitmq import LivingRabbit, MortalRabbit
from tests.living.brokers_sqlite import LivingSqlite
from tests.living.brokers_sqs import LivingSqs
from tests.living.endings import ENDINGS
from tests.living.ledger import Account, account, bound
from tests.living.preemptions import Preemption, preempt
from tests.living.rounds import Round, play, weathers_for
from tests.living.sink import Handled
from tests.pubsub_server import StubServer
from tests.rabbitmq_fixtures import skip_without_own_server, wanted_server
from tests.rabbitmq_server import RabbitServer

pytestmark = pytest.mark.broker


def played(
    make: Callable[[Path], LivingBroker],
    folder: Path,
    *,
    runs: int,
    first: int = 0,
    weather: str = "calm",
) -> Account:
    return play(
        Round(
            make=make,
            folder=folder,
            rate=100.0,
            runs=runs,
            weather=weather,
            first=first,
            dice=random.Random(1),
        )
    )


def test_runs_of_the_embedded_queue_in_traffic_lose_nothing(tmp_path):
    found = played(LivingSqlite, tmp_path, runs=len(ENDINGS))

    assert found.good, str(found)
    assert found.handled > 100


def test_runs_of_rabbitmq_in_traffic_lose_nothing(tmp_path):
    server = wanted_server()

    # The second half: the tasks of a group, each ending once.
    found = played(
        lambda folder: LivingRabbit(server, folder), tmp_path, runs=len(ENDINGS), first=len(ENDINGS)
    )

    assert found.good, str(found)
    assert found.handled > 100


def test_runs_of_a_quorum_queue_of_rabbitmq_in_traffic_lose_nothing(tmp_path):
    server = wanted_server()

    found = played(lambda folder: LivingRabbit(server, folder, queue="quorum"), tmp_path, runs=6)

    assert found.good, str(found)
    assert found.handled > 100


@pytest.mark.parametrize(
    "fifo", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["standard", "fifo"]
)
def test_runs_of_sqs_in_traffic_lose_nothing(tmp_path, fifo):
    server, clock = moved_server()

    found = played(lambda folder: LivingSqs(server, clock, fifo=fifo), tmp_path, runs=5)

    assert found.good, str(found)
    assert found.handled > 20


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"keyed": True}, marks=pytest.mark.slow),
        pytest.param({"enable_exactly_once_delivery": True}, marks=pytest.mark.slow),
    ],
    ids=["plain", "keys", "exactly once"],
)
def test_runs_of_pubsub_in_traffic_lose_nothing(tmp_path, more):
    clock = str(tmp_path / "clock")
    with StubServer(SharedClock(clock)) as server:
        found = played(lambda folder: LivingPubSub(server, clock, **more), tmp_path, runs=5)

    assert found.good, str(found)
    assert found.handled > 20


@pytest.mark.parametrize(
    ("order", "traffic"),
    [
        ("none", "transactions"),
        ("partition", "growing"),
        pytest.param("key", "plain", marks=pytest.mark.slow),
        pytest.param("none", "plain", marks=pytest.mark.slow),
        pytest.param("partition", "transactions", marks=pytest.mark.slow),
    ],
)
def test_runs_of_kafka_in_traffic_lose_nothing(apache_kafka, tmp_path, order, traffic):
    found = played(
        lambda folder: LivingKafka(apache_kafka, folder, order=order, traffic=traffic),
        tmp_path,
        runs=5,
    )

    assert found.good, str(found)
    assert found.handled > 20


@pytest.mark.parametrize(
    "weather",
    [
        "killed_at_writes",
        pytest.param("killed", marks=pytest.mark.slow),
        pytest.param("two_at_once", marks=pytest.mark.slow),
        pytest.param("zombies", marks=pytest.mark.slow),
    ],
)
def test_runs_of_kafka_that_die_or_meet_others_lose_nothing(kafka, tmp_path, weather):
    found = played(
        lambda folder: LivingKafka(kafka, folder, order="none"),
        tmp_path,
        runs=6,
        first=len(ENDINGS),
        weather=weather,
    )

    assert found.good, str(found)
    assert found.handled > 20


def test_runs_that_are_killed_at_any_of_their_writes_lose_nothing(tmp_path):
    found = played(LivingSqlite, tmp_path, runs=8, weather="killed_at_writes")

    assert found.good, str(found)
    assert found.handled > 20


@pytest.mark.slow
@pytest.mark.parametrize("queue", ["classic", "quorum"])
def test_runs_of_rabbitmq_whose_broker_dies_lose_nothing(tmp_path, queue):
    skip_without_own_server()
    with RabbitServer.start(tmp_path / "server") as server:
        found = played(
            lambda folder: MortalRabbit(server, folder, queue=queue),
            tmp_path,
            runs=6,
            weather="broker_dies",
        )

    assert found.good, str(found)
    assert found.handled > 100


def test_each_broker_has_the_weathers_that_it_can_have():
    everywhere = set(weathers_for(LivingSqlite))

    assert set(weathers_for(LivingKafka)) - everywhere == {"far_away", "stalls"}
    assert set(weathers_for(LivingPubSub)) - everywhere == {"far_away", "stalls"}
    assert set(weathers_for(LivingSqs)) - everywhere == {"far_away", "stalls"}
    assert set(weathers_for(LivingRabbit)) - everywhere == {"far_away", "stalls"}
    assert set(weathers_for(MortalRabbit)) - set(weathers_for(LivingRabbit)) == {"broker_dies"}
    assert {"killed", "killed_at_writes", "zombies"} <= everywhere


def test_a_report_that_counts_what_another_counts_too_is_a_mistake():
    lines = [
        Handled(number, str(number), 1, run != "first", run, run)
        for run in ("first", "zombie")
        for number in range(10)
    ]
    confirmed = dict.fromkeys(range(10), 0.0)
    one = {"acked": 10, "dead_lettered": 0}

    def mistakes(**reports: dict[str, int]) -> list[str]:
        made = account(confirmed, 10, lines, [])
        bound(made, reports, lines)
        return made.mistakes

    assert mistakes(first=one, zombie={**one, "acked": 0}) == []
    assert mistakes(first=one, zombie={**one, "acked": 1}) == [
        "the reports say 11 acked, and at most 10 were"
    ]
    assert mistakes(other={**one, "acked": 1}) == ["other: 1 acked, 0 handled"]
    assert mistakes(first={**one, "dead_lettered": 1}) == [
        "the reports say 1 dead-lettered, and at most 0 were"
    ]


# -- kills from outside ----------------------------------------------------------------------------


def preempted(make: Callable[[Path], LivingBroker], folder: Path) -> None:
    found, kills = preempt(
        Preemption(
            make=make,
            folder=folder,
            rate=100.0,
            seconds=0.0,
            kills=10,
            longest=0.8,
            dice=random.Random(2),
        )
    )
    assert kills == 10
    assert found.good, str(found)
    assert found.handled > 100


def test_runs_of_the_embedded_queue_that_are_all_killed_leave_nothing_behind(tmp_path):
    preempted(LivingSqlite, tmp_path)


def test_runs_of_rabbitmq_that_are_all_killed_leave_nothing_behind(tmp_path):
    server = wanted_server()
    preempted(lambda folder: LivingRabbit(server, folder), tmp_path)


def test_runs_of_sqs_that_are_all_killed_leave_nothing_behind(tmp_path):
    server, clock = moved_server()
    preempted(lambda folder: LivingSqs(server, clock), tmp_path)


def test_runs_of_pubsub_that_are_all_killed_leave_nothing_behind(tmp_path):
    clock = str(tmp_path / "clock")
    with StubServer(SharedClock(clock)) as server:
        preempted(lambda folder: LivingPubSub(server, clock), tmp_path)


def test_runs_of_kafka_that_are_all_killed_leave_nothing_behind(apache_kafka, tmp_path):
    # In order, a failure holds back what is behind it until its retry.
    preempted(lambda folder: LivingKafka(apache_kafka, folder, order="none"), tmp_path)
