"""Kills and restarts the broker during receive, lease expiry and settlement."""

from __future__ import annotations

import threading
import time

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.model.message import Message
from tests.faults.case_result import CaseResult
from tests.faults.rabbitmq_cases.harness import QueueHarness
from tests.faults.rabbitmq_cases.registry import case

_RETRY = Verdict(Action.RETRY, 0.0, "retry", "process")
_DEAD_LETTER = Verdict(Action.DEAD_LETTER, 0.0, "every seventh", "process")


def _restart(harness: QueueHarness) -> None:
    harness.server.kill()
    harness.server.run()


@case(kills_server=True)
def the_broker_is_killed_while_the_holding_queue_is_young(
    harness: QueueHarness, name: str
) -> CaseResult:
    # RabbitMQ 3.10 may leave a quorum queue without a leader if it is killed this early, or refuse
    # it once more when it is declared again: until then nothing is received.
    harness.producer = harness.make_producer(lease=60.0, reconnect_timeout=60.0)
    harness.fill(1_000)
    results: list[tuple[Lease, list[Message]]] = []
    thread = threading.Thread(
        target=lambda: results.append(harness.receive_run("g1", 1_000, patience=60.0))
    )
    thread.start()
    while not harness.holding_queues():
        time.sleep(0.02)
    time.sleep(0.3)
    _restart(harness)
    thread.join()

    [(lease, messages)] = results
    assert harness.settle_all(lease, messages).acked == len(messages) == 1_000
    assert harness.drain() == []
    return harness.result(name, 1_000, broker_kills=1)


@case(kills_server=True)
def the_broker_is_killed_while_messages_are_leased(harness: QueueHarness, name: str) -> CaseResult:
    harness.producer = harness.make_producer(lease=120.0)
    harness.fill(3_000)
    lease, messages = harness.receive_run("g1")
    assert len(messages) == 3_000

    _restart(harness)

    custodian = harness.producer.custodian(harness.env("g1"))
    assert custodian.holds(lease)
    custodian.close()
    report = harness.settle_all(lease, messages)
    assert report == SettleReport(acked=3_000), report
    harness.send(range(3_000, 3_010))
    assert harness.drain() == list(range(3_000, 3_010))
    return harness.result(name, 3_010, broker_kills=1)


@case(kills_server=True)
def the_broker_is_killed_while_leases_lapse(harness: QueueHarness, name: str) -> CaseResult:
    harness.producer = harness.make_producer(lease=10.0)
    harness.fill(3_000)
    lease, messages = harness.receive_run("g1")
    assert len(messages) == 3_000
    left = (lease.deadline - harness.env("g").clock.now()).total_seconds()
    time.sleep(max(0.0, left))

    _restart(harness)
    time.sleep(5.0)

    assert harness.drain() == list(range(3_000))
    return harness.result(name, 3_000, broker_kills=1)


@case(kills_server=True)
def the_broker_is_killed_in_settlement(harness: QueueHarness, name: str) -> CaseResult:
    harness.producer = harness.make_producer(lease=120.0)
    count = 4_000
    harness.fill(count)
    lease, messages = harness.receive_run("g1")
    verdicts = {
        message.message_id: _RETRY if int(message.data) % 3 == 0 else _DEAD_LETTER
        for message in messages
        if int(message.data) % 3 == 0 or int(message.data) % 7 == 0
    }
    errors: list[BroadwayError] = []

    def settle() -> None:
        try:
            harness.settle_all(lease, messages, verdicts)
        except BroadwayError as error:
            errors.append(error)

    for pause in (0.05, 0.15):
        thread = threading.Thread(target=settle)
        thread.start()
        time.sleep(pause)
        _restart(harness)
        thread.join()

    # The same settlement is repeated until it succeeds; then its report stays the same.
    report = harness.settle_all(lease, messages, verdicts)
    assert report == harness.settle_all(lease, messages, verdicts)
    assert (report.acked, report.lapsed, report.failed) == (count - len(verdicts), 0, 0), report
    retried = {int(m.data) for m in messages if verdicts.get(m.message_id) is _RETRY}
    assert set(harness.drain()) == retried
    assert harness.dead_numbers() == {n for n in range(0, count, 7) if n % 3}
    return harness.result(name, count, broker_kills=2)
