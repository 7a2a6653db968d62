"""Checks that runs lose no message during continuous publishing: one round per broker.

``make faults`` runs many rounds.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.traffic.accounting import (
    Account,
    check_attempts,
    check_order,
    check_report_limits,
    count_messages,
)
from tests.traffic.brokers import QueuedMessage
from tests.traffic.brokers_kafka import KafkaTraffic
from tests.traffic.brokers_pubsub import PubSubTraffic
from tests.traffic.brokers_rabbitmq import RabbitMQTraffic, RestartableRabbitMQ
from tests.traffic.brokers_sqlite import SqliteTraffic
from tests.traffic.brokers_sqs import SqsTraffic
from tests.traffic.endings import ENDINGS
from tests.traffic.preemption import PreemptionCase, run_preemption
from tests.traffic.rounds import Round, run_round, scenarios_for
from tests.traffic.sink import HandledMessage

pytestmark = pytest.mark.broker

#: Index from which the endings use the flow ``staged``.
STAGED = len(ENDINGS)


def case(
    kind: str,
    runs: int = 5,
    scenario: str = "calm",
    *,
    first: int = 0,
    handled: int = 20,
    slow: bool = False,
    **options: Any,
) -> Any:
    """Returns the parameters of a round, and the minimum number of handled messages."""
    words = [name if value is True else str(value) for name, value in options.items()]
    return pytest.param(
        kind,
        options,
        {"runs": runs, "scenario": scenario, "first": first},
        handled,
        id=" ".join([kind, scenario, *words]),
        marks=pytest.mark.slow if slow else (),
    )


@pytest.mark.parametrize(
    ("kind", "options", "turns", "handled"),
    [
        case("sqlite", len(ENDINGS), handled=100),
        case("rabbitmq", len(ENDINGS), first=STAGED, handled=100),
        case("rabbitmq", 6, queue="quorum", handled=100),
        case("sqs"),
        case("sqs", fifo=True, slow=True),
        case("pubsub"),
        case("pubsub", keyed=True, slow=True),
        case("pubsub", enable_exactly_once_delivery=True, slow=True),
        case("apache_kafka", order="none", traffic="transactions"),
        case("apache_kafka", order="partition", traffic="growing"),
        case("apache_kafka", order="key", slow=True),
        case("apache_kafka", order="none", slow=True),
        case("apache_kafka", order="partition", traffic="transactions", slow=True),
        # -- crashes and concurrent runs
        case("sqlite", 8, "killed_at_writes"),
        case("kafka", 6, "killed_at_writes", first=STAGED, order="none"),
        case("kafka", 6, "killed", first=STAGED, order="none", slow=True),
        case("kafka", 6, "killed_at_writes", first=STAGED, order="key"),
        case("kafka", 6, "killed_at_writes", first=STAGED, order="partition"),
        case("kafka", 6, "two_at_once", first=STAGED, order="none", slow=True),
        case("kafka", 6, "zombies", first=STAGED, order="none", slow=True),
        case("sqs", 12, "killed_at_writes", first=STAGED, fifo=True, slow=True),
        case("pubsub", 12, "killed_at_writes", first=STAGED, keyed=True, slow=True),
        case("pubsub", 12, "killed_at_writes", enable_exactly_once_delivery=True, slow=True),
        case("rabbitmq", 6, "killed_at_writes", queue="quorum", slow=True),
        case("rabbitmq", 6, "two_at_once", slow=True),
        case("rabbitmq", 6, "stalls", slow=True),
        case("rabbitmq", 6, "cut", slow=True),
        case("rabbitmq", 6, "half_closed", slow=True),
        case("restartable rabbitmq", 6, "broker_dies", queue="classic", handled=100, slow=True),
        case("restartable rabbitmq", 6, "broker_dies", queue="quorum", handled=100, slow=True),
    ],
)
def test_runs_in_traffic_lose_nothing(open_broker, tmp_path, kind, options, turns, handled):
    make = open_broker(kind, **options)

    summary = run_round(
        Round(make=make, folder=tmp_path, rate=100.0, rng=random.Random(1), **turns)
    )

    assert summary.passed, str(summary)
    assert summary.handled > handled


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sqlite", {}),
        ("rabbitmq", {}),
        ("sqs", {}),
        ("pubsub", {}),
        # In order, a failure holds back later messages until its retry.
        ("apache_kafka", {"order": "none"}),
    ],
)
def test_runs_killed_from_outside_leave_nothing_behind(open_broker, tmp_path, kind, options):
    account, kills = run_preemption(
        PreemptionCase(
            make=open_broker(kind, **options),
            folder=tmp_path,
            rate=100.0,
            seconds=0.0,
            kills=10,
            max_interval=0.8,
            rng=random.Random(2),
        )
    )

    assert kills == 10
    assert account.passed, str(account)
    assert account.handled > 100


# -- the checks themselves -------------------------------------------------------------------------


def test_every_broker_plays_its_applicable_scenarios():
    everywhere = set(scenarios_for(SqliteTraffic))

    for broker in (KafkaTraffic, PubSubTraffic, SqsTraffic):
        assert set(scenarios_for(broker)) - everywhere == {"far_away", "stalls"}
    broken = {"far_away", "stalls", "cut", "half_closed"}
    assert set(scenarios_for(RabbitMQTraffic)) - everywhere == broken
    assert set(scenarios_for(RestartableRabbitMQ)) - set(scenarios_for(RabbitMQTraffic)) == {
        "broker_dies"
    }
    assert {"killed", "killed_at_writes", "zombies"} <= everywhere


def test_double_counting_reports_are_detected():
    lines = [
        HandledMessage(number, str(number), 1, run != "first", run, run)
        for run in ("first", "zombie")
        for number in range(10)
    ]
    confirmed = dict.fromkeys(range(10), 0.0)
    one = {"acked": 10, "dead_lettered": 0}

    def mistakes(**reports: dict[str, int]) -> list[str]:
        summary = count_messages(confirmed, 10, lines, [])
        check_report_limits(summary, reports, lines)
        return summary.mistakes

    assert mistakes(first=one, zombie={**one, "acked": 0}) == []
    assert mistakes(first=one, zombie={**one, "acked": 1}) == [
        "the reports say 11 acked, at most 10 were counted"
    ]
    assert mistakes(other={**one, "acked": 1}) == ["other: 1 acked, 0 handled"]
    assert mistakes(first={**one, "dead_lettered": 1}) == [
        "the reports say 1 dead-lettered, at most 0 were counted"
    ]


@pytest.mark.parametrize(
    ("handled", "queued", "overtaking"),
    [
        ([1, 3, 5], [], []),
        ([1, 5, 3, 5], [], []),
        ([1, 3, 4, 2, 4], [], []),
        ([1, 5], [3, 5], []),
        ([1, 5, 3], [], [5]),
        ([1, 5], [3], [5]),
    ],
    ids=["in order", "repeated", "two groups", "unsettled", "overtaken", "still queued"],
)
def test_messages_settled_out_of_order_are_detected(handled, queued, overtaking):
    summary = Account()
    lines = [HandledMessage(number, str(number), 1, False, "", "") for number in handled]
    left = [QueuedMessage(number, "source", False) for number in queued]

    check_order(summary, lines, left, lambda number: number % 2)

    wanted = [f"settled before earlier ones: {overtaking}"] if overtaking else []
    assert summary.mistakes == wanted


def test_attempts_used_up_by_a_crash_are_detected():
    summary = Account()
    lines = [HandledMessage(3, "3", 2, True, "", ""), HandledMessage(4, "4", 2, True, "", "")]

    check_attempts(summary, lines)

    assert summary.mistakes == ["handled at a wrong attempt: [4]"]
