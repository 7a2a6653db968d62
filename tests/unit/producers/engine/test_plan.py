"""The verdict on each message of a lease."""

from __future__ import annotations

import pytest

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.engine.plan import plan_of

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "why", "batch")


def entries(*ids: str, verdict: Verdict = ACK) -> list[Entry]:
    return [Entry(each, "", verdict) for each in ids]


def settlement(*named: str, dead: tuple[str, ...] = (), rest: Verdict = ACK) -> Settlement:
    return Settlement(
        rest=rest,
        entries=lambda: iter(entries(*dead, verdict=DEAD)),
        everything=lambda: iter(entries(*named)),
        expected=len(named),
    )


def test_each_held_message_has_its_own_verdict_or_that_of_the_rest():
    plan = plan_of(["a", "b"], settlement("a", "b", dead=("b",)))

    assert plan.verdicts == {"a": ACK, "b": DEAD}
    assert plan.gone == frozenset()


def test_what_is_in_no_manifest_is_given_back():
    assert plan_of(["a", "b"], settlement("a")).verdicts == {"a": ACK, "b": RELEASE}


def test_what_is_named_and_not_held_is_gone_unless_it_was_settled_at_once():
    plan = plan_of(["a"], settlement("a", "b", "c", dead=("d",)), at_once={"c"})

    assert plan.verdicts == {"a": ACK}
    assert plan.gone == {"b", "d"}


def test_without_a_manifest_everything_gets_the_rest():
    plan = plan_of(["a", "b"], Settlement(rest=RELEASE))

    assert plan.verdicts == {"a": RELEASE, "b": RELEASE}


def test_where_manifest_and_lease_agree_the_long_list_is_not_read():
    assert plan_of(["a"], Settlement(rest=ACK, expected=1), agree=True).verdicts == {"a": ACK}
    with pytest.raises(ProducerError, match="holds 1 message and its manifest names 2"):
        plan_of(["a"], Settlement(rest=ACK, expected=2))
