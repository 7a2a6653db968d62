"""The verdict on each message of a lease."""

from __future__ import annotations

import pytest

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.engine.plan import plan_of

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "why", "batch")


def entries(*ids: str, verdict: Verdict = ACK) -> list[Entry]:
    return [Entry(item, "", verdict) for item in ids]


def settlement(*named: str, dead: tuple[str, ...] = (), rest: Verdict = ACK) -> Settlement:
    return Settlement(
        rest=rest,
        entries=lambda: iter(entries(*dead, verdict=DEAD)),
        everything=lambda: iter(entries(*named)),
        expected=len(named),
    )


def test_leased_message_gets_own_or_default_verdict():
    plan = plan_of(["a", "b"], settlement("a", "b", dead=("b",)))

    assert plan.verdicts == {"a": ACK, "b": DEAD}
    assert plan.absent == frozenset()


def test_message_outside_manifest_is_released():
    assert plan_of(["a", "b"], settlement("a")).verdicts == {"a": ACK, "b": RELEASE}


def test_named_message_outside_lease_is_absent_unless_settled_early():
    plan = plan_of(["a"], settlement("a", "b", "c", dead=("d",)), at_once={"c"})

    assert plan.verdicts == {"a": ACK}
    assert plan.absent == {"b", "d"}


def test_without_manifest_all_get_default_verdict():
    plan = plan_of(["a", "b"], Settlement(rest=RELEASE))

    assert plan.verdicts == {"a": RELEASE, "b": RELEASE}


def test_full_list_is_not_read_if_manifest_and_lease_agree():
    assert plan_of(["a"], Settlement(rest=ACK, expected=1), agree=True).verdicts == {"a": ACK}
    with pytest.raises(ProducerError, match="holds 1 message and its manifest names 2"):
        plan_of(["a"], Settlement(rest=ACK, expected=2))
