"""Settlements that are interrupted before their end is recorded."""

from __future__ import annotations

import pytest

from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.testing.contract import settlement_of
from tests.faults.brokers_rabbitmq import dead_letters
from tests.faults.case_result import CaseResult
from tests.faults.rabbitmq_cases.harness import QueueHarness
from tests.faults.rabbitmq_cases.registry import case


class _SimulatedKill(Exception):
    """Simulates a SIGKILL."""


@case(slow=False)
def a_settlement_is_killed_before_it_is_noted(harness: QueueHarness, name: str) -> CaseResult:
    harness.fill(300)
    lease, messages = harness.receive_run("g1")
    dead = Verdict(Action.DEAD_LETTER, 0.0, "every third", "process")
    retried = Verdict(Action.RETRY, 0.0, "retry", "process")
    verdicts = {
        m.message_id: dead if int(m.data) % 3 == 0 else retried
        for m in messages
        if int(m.data) % 3 != 1
    }

    def die(*_: object, **__: object) -> None:
        raise _SimulatedKill

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QueueJournal, "note_settled", die)
        with pytest.raises(_SimulatedKill):
            harness.settle(lease, settlement_of(messages, verdicts))
    assert not any(letter.marked for letter in dead_letters(harness.server, harness.queues.dead))

    # The repeated settlement publishes everything again: the second dead letters are marked, and a
    # run that receives both copies of a retry handles one.
    report = harness.settle_all(lease, messages, verdicts)

    assert (report.acked, report.dead_lettered, report.requeued) == (100, 100, 100), report
    letters = dead_letters(harness.server, harness.queues.dead)
    assert sum(letter.marked for letter in letters) == 100
    assert harness.drain() == [number for number in range(300) if number % 3 == 2]
    result = harness.result(name, 300)
    assert result.duplicates == 100, result
    return result
