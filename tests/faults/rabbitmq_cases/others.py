"""Settlements that are killed half done."""

from __future__ import annotations

import pytest

from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.testing.contract import settlement_of
from tests.faults.brokers_rabbitmq import dead_letters
from tests.faults.found import Found
from tests.faults.rabbitmq_cases.place import Place
from tests.faults.rabbitmq_cases.registry import case


class _Killed(Exception):
    """Instead of a kill -9."""


@case(slow=False)
def a_settlement_is_killed_before_it_is_noted(place: Place, name: str) -> Found:
    place.fill(300)
    lease, messages = place.hold("g1")
    dead = Verdict(Action.DEAD_LETTER, 0.0, "every third", "process")
    again = Verdict(Action.RETRY, 0.0, "once more", "process")
    verdicts = {
        m.message_id: dead if int(m.data) % 3 == 0 else again
        for m in messages
        if int(m.data) % 3 != 1
    }

    def die(*_: object, **__: object) -> None:
        raise _Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QueueJournal, "note_settled", die)
        with pytest.raises(_Killed):
            place.settle(lease, settlement_of(messages, verdicts))
    assert not any(letter.marked for letter in dead_letters(place.server, place.queues.dead))

    # Repeated, it publishes again what it had published: each such dead letter is marked, and a
    # run that meets both copies of a retry takes one.
    report = place.settle_all(lease, messages, verdicts)

    assert (report.acked, report.dead_lettered, report.requeued) == (100, 100, 100), report
    letters = dead_letters(place.server, place.queues.dead)
    assert sum(letter.marked for letter in letters) == 100
    assert place.rest() == [number for number in range(300) if number % 3 == 2]
    result = place.found(name, 300)
    assert result.duplicates == 100, result
    return result
