"""The verdict on each message, and settling by what was written down before."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kit.generation_log import GenerationLog
from airflow_broadway.producers.kit.plan import plan_of, settle_by_log, settle_now_by_log
from airflow_broadway.producers.kit.state_files import MemoryFiles

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "why", "batch")


@pytest.fixture
def log() -> GenerationLog:
    return GenerationLog(MemoryFiles(), "g1")


def killed(verdicts: object) -> None:
    raise KeyboardInterrupt


def nothing(verdicts: Mapping[str, Verdict]) -> None:
    assert not verdicts


def entries(*ids: str, verdict: Verdict = ACK) -> list[Entry]:
    return [Entry(each, "", verdict) for each in ids]


def settlement(*named: str, dead: tuple[str, ...] = (), rest: Verdict = ACK) -> Settlement:
    return Settlement(
        rest=rest,
        entries=lambda: iter(entries(*dead, verdict=DEAD)),
        everything=lambda: iter(entries(*named)),
        expected=len(named),
    )


def test_each_held_message_has_its_own_verdict_or_that_of_the_rest() -> None:
    plan = plan_of(["a", "b"], settlement("a", "b", dead=("b",)))

    assert plan.verdicts == {"a": ACK, "b": DEAD}
    assert plan.gone == frozenset()


def test_what_is_in_no_manifest_is_given_back() -> None:
    assert plan_of(["a", "b"], settlement("a")).verdicts == {"a": ACK, "b": RELEASE}


def test_what_is_named_and_not_held_is_gone_unless_it_was_settled_at_once() -> None:
    plan = plan_of(["a"], settlement("a", "b", "c", dead=("d",)), at_once={"c"})

    assert plan.verdicts == {"a": ACK}
    assert plan.gone == {"b", "d"}


def test_without_a_manifest_everything_gets_the_rest() -> None:
    plan = plan_of(["a", "b"], Settlement(rest=RELEASE))

    assert plan.verdicts == {"a": RELEASE, "b": RELEASE}


def test_where_manifest_and_lease_agree_the_long_list_is_not_read() -> None:
    assert plan_of(["a"], Settlement(rest=ACK, expected=1), agree=True).verdicts == {"a": ACK}
    with pytest.raises(ProducerError, match="holds 1 message and its manifest names 2"):
        plan_of(["a"], Settlement(rest=ACK, expected=2))


def test_whoever_goes_on_after_a_kill_does_what_was_begun(log: GenerationLog) -> None:
    with pytest.raises(KeyboardInterrupt):
        settle_by_log(log, ["a", "b"], settlement("a", "b", dead=("b",)), killed)

    # When a sweep that knows of no manifest finds one of them still held
    done: dict[str, Verdict] = {}
    report = settle_by_log(log, ["b"], Settlement(rest=RELEASE), done.update)

    assert done == {"a": ACK, "b": DEAD}
    assert report == SettleReport(acked=1, dead_lettered=1)
    assert settle_by_log(log, ["b"], Settlement(rest=RELEASE), killed) == report


def test_what_was_settled_at_once_is_not_settled_again(log: GenerationLog) -> None:
    done: dict[str, Verdict] = {}
    now = [*entries("a", verdict=DEAD), *entries("of nobody")]

    report = settle_now_by_log(log, ["a", "b"], now, done.update)

    assert done == {"a": DEAD}
    assert report == SettleReport(dead_lettered=1, lapsed=1, undone=frozenset({"of nobody"}))
    done.clear()
    assert settle_now_by_log(log, ["b"], now, done.update) == report
    assert done == {}
    untold = Settlement(rest=RELEASE, settled_now=SettleReport())
    assert settle_by_log(log, ["b"], untold, done.update) == SettleReport(
        dead_lettered=1, released=1
    )


def test_what_was_noted_at_once_and_never_done_is_done_in_the_end(log: GenerationLog) -> None:
    with pytest.raises(KeyboardInterrupt):
        settle_now_by_log(log, ["a", "b"], entries("a", verdict=DEAD), killed)

    # Whoever asks again hears what stands
    again = settle_now_by_log(log, ["a", "b"], entries("a"), nothing)
    assert again == SettleReport(dead_lettered=1)
    done: dict[str, Verdict] = {}
    report = settle_by_log(log, ["a", "b"], settlement("b"), done.update)

    assert {key: verdict.action for key, verdict in done.items()} == {
        "a": Action.DEAD_LETTER,
        "b": Action.ACK,
    }
    assert report == SettleReport(acked=1)  # who settled at once counted the other
