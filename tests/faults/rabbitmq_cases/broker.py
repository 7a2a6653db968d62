"""A broker that is killed and restarted: in lease, lapse and settlement."""

from __future__ import annotations

import threading
import time

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.model.message import Message
from tests.faults.found import Found
from tests.faults.rabbitmq_cases.place import Place
from tests.faults.rabbitmq_cases.registry import case

_AGAIN = Verdict(Action.RETRY, 0.0, "once more", "process")
_DEAD = Verdict(Action.DEAD_LETTER, 0.0, "every seventh", "process")


def _restart(place: Place) -> None:
    place.server.kill()
    place.server.run()


@case(mortal=True)
def the_broker_is_killed_while_the_holding_queue_is_young(place: Place, name: str) -> Found:
    # RabbitMQ 3.10 may leave a quorum queue of that age without a leader, for ever.
    place.producer = place.producer_of(lease=60.0, reconnect_timeout=60.0)
    place.fill(1_000)
    results: list[tuple[Lease, list[Message]]] = []
    thread = threading.Thread(target=lambda: results.append(place.hold("g1")))
    thread.start()
    while not place.holding_queues():
        time.sleep(0.02)
    time.sleep(0.3)
    _restart(place)
    thread.join()

    [(lease, messages)] = results
    assert place.settle_all(lease, messages).acked == len(messages) == 1_000
    assert place.rest() == []
    result = place.found(name, 1_000)
    result.killed["broker"] = 1
    return result


@case(mortal=True)
def the_broker_is_killed_while_messages_are_leased(place: Place, name: str) -> Found:
    place.producer = place.producer_of(lease=120.0)
    place.fill(3_000)
    lease, messages = place.hold("g1")
    assert len(messages) == 3_000

    _restart(place)

    custodian = place.producer.custodian(place.env("g1"))
    assert custodian.holds(lease)
    custodian.close()
    report = place.settle_all(lease, messages)
    assert report == SettleReport(acked=3_000), report
    place.send(range(3_000, 3_010))
    assert place.rest() == list(range(3_000, 3_010))
    result = place.found(name, 3_010)
    result.killed["broker"] = 1
    return result


@case(mortal=True)
def the_broker_is_killed_while_leases_lapse(place: Place, name: str) -> Found:
    place.producer = place.producer_of(lease=10.0)
    place.fill(3_000)
    lease, messages = place.hold("g1")
    assert len(messages) == 3_000
    left = (lease.deadline - place.env("g").clock.now()).total_seconds()
    time.sleep(max(0.0, left))

    _restart(place)
    time.sleep(5.0)

    assert place.rest() == list(range(3_000))
    result = place.found(name, 3_000)
    result.killed["broker"] = 1
    return result


@case(mortal=True)
def the_broker_is_killed_in_settlement(place: Place, name: str) -> Found:
    place.producer = place.producer_of(lease=120.0)
    count = 4_000
    place.fill(count)
    lease, messages = place.hold("g1")
    verdicts = {
        message.message_id: _AGAIN if int(message.data) % 3 == 0 else _DEAD
        for message in messages
        if int(message.data) % 3 == 0 or int(message.data) % 7 == 0
    }
    errors: list[BroadwayError] = []

    def settle() -> None:
        try:
            place.settle_all(lease, messages, verdicts)
        except BroadwayError as error:
            errors.append(error)

    for pause in (0.05, 0.15):
        thread = threading.Thread(target=settle)
        thread.start()
        time.sleep(pause)
        _restart(place)
        thread.join()

    # The same settlement is repeated until it succeeds; then its report stays the same.
    report = place.settle_all(lease, messages, verdicts)
    assert report == place.settle_all(lease, messages, verdicts)
    assert (report.acked, report.lapsed, report.failed) == (count - len(verdicts), 0, 0), report
    again = {int(m.data) for m in messages if verdicts.get(m.message_id) is _AGAIN}
    assert set(place.rest()) == again
    assert place.dead_numbers() == {n for n in range(0, count, 7) if n % 3}
    result = place.found(name, count)
    result.killed["broker"] = 2
    return result
