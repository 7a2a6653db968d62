"""Ordering keys: what comes again holds back what follows it in its key, and nothing else."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, LEAVE, RELEASE, Action, Verdict
from tests.unit.producers.pubsub.kit import Generation, Place, place, settlement

RETRY = Verdict(Action.RETRY, 0.0, "bad", "process")
DEAD = Verdict(Action.DEAD_LETTER, 0.0, "bad", "process")
#: A subscription that says of each id whether it is taken, in order.
STRICT = {"enable_message_ordering": True, "enable_exactly_once_delivery": True}

refused_as = pytest.mark.parametrize(
    "word", ["PERMANENT_FAILURE_INVALID_ACK_ID", "TRANSIENT_FAILURE_OTHER"]
)


def put(at: Place) -> None:
    """``a1 b1 a2 b2 a3 b3``, in the keys a and b."""
    for number in (1, 2, 3):
        for key in "ab":
            at.put(f"{key}{number}", ordering_key=key)


def lanes(found: list[str]) -> dict[str, list[str]]:
    return {key: [each for each in found if each[0] == key] for key in "ab"}


@pytest.mark.parametrize("exactly_once", [False, True])
@pytest.mark.parametrize("verdict", [RETRY, RELEASE, RETRY._replace(delay=60.0), LEAVE])
def test_what_comes_again_holds_back_the_later_ones_of_its_key(verdict, exactly_once, tmp_path):
    settings = {"enable_message_ordering": True, "enable_exactly_once_delivery": exactly_once}
    with place(tmp_path, **settings) as at:
        put(at)
        run = at.begin(message_ordering=True)
        found = run.take()

        report = run.settle(found, {"a2": verdict})

        # a1 and all of b are done; a3 was handled, and is handled again in order.
        assert (report.acked, report.lapsed, report.failed) == (4, 0, 0)
        assert report.requeued + report.released + report.left == 2
        if verdict.delay or verdict is LEAVE:
            assert at.waiting() == []
            at.clock.advance(verdict.delay or 600.0)
        assert at.waiting() == ["a2", "a3"]


@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("delay", [0.0, 300.0])
def test_what_was_given_back_at_once_holds_back_the_later_ones_too(delay, elsewhere, tmp_path):
    """The later ones, and not those before it, for as long as that one; also where whoever settles
    the rest is another process than the one in which it failed.
    """
    with place(tmp_path, enable_message_ordering=True) as at:
        put(at)
        run = at.begin(message_ordering=True)
        found = run.take()
        [a2] = [each for each in found if each.data == b"a2"]
        verdict = RETRY._replace(delay=delay)
        now = run.custodian.settle_now(run.source.lease, [entry_of(a2, verdict)])
        run.source.stop()
        if elsewhere:
            run.source.close()
        given = settlement([each for each in found if each is not a2])
        other = run.other()
        asked: list[int] = []

        def note(call: str, request: Any) -> None:
            if call == "ModifyAckDeadline":
                asked.append(request.ack_deadline_seconds)

        at.broker.answer = note
        report = other.settle(run.source.lease, replace(given, settled_now=now))

        assert asked == [delay]
        assert (report.acked, report.released, report.requeued) == (4, 1, 0)
        if delay:
            at.clock.advance(delay - 1.0)
            assert at.waiting() == []
            at.clock.advance(1.0)
        assert at.waiting() == ["a2", "a3"]
        other.close()


@pytest.mark.parametrize("exactly_once", [False, True])
def test_what_is_done_with_holds_nothing_back(exactly_once, tmp_path):
    """Acknowledgements go out in order, those of dead letters among them."""
    settings = {"enable_message_ordering": True, "enable_exactly_once_delivery": exactly_once}
    with place(tmp_path, **settings) as at:
        dead = at.server.topic()
        grave = at.server.subscription(dead)
        put(at)
        run = at.begin(message_ordering=True, dead_letter=dead, on_failure="dead_letter")
        before = at.broker.requests["Acknowledge"]

        report = run.settle(run.take(), {"a2": DEAD, "b1": DEAD})

        assert report == SettleReport(acked=4, dead_lettered=2)
        assert at.broker.requests["Acknowledge"] - before == 1
        assert at.left() == 0
        letters = at.server.drain(grave)
        assert sorted((each.data, each.ordering_key) for each in letters) == [
            (b"a2", "a"),
            (b"b1", "b"),
        ]


@pytest.mark.parametrize("exactly_once", [False, True])
def test_verdicts_that_are_carried_out_at_once_hold_back_too_whatever_their_order(
    exactly_once, tmp_path
):
    """A stage names what succeeded before what failed."""
    settings = {"enable_message_ordering": True, "enable_exactly_once_delivery": exactly_once}
    with place(tmp_path, **settings) as at:
        put(at)
        run = at.begin(message_ordering=True)
        found = run.take()
        verdicts = {"a2": RETRY}
        entries = [entry_of(each, verdicts.get(each.data.decode(), ACK)) for each in found]
        entries.sort(key=lambda entry: entry.verdict is RETRY)

        report = run.custodian.settle_now(run.source.lease, entries)

        assert (report.acked, report.requeued, report.released) == (4, 1, 1)
        assert at.waiting() == ["a2", "a3"]


@pytest.mark.parametrize("exactly_once", [False, True])
def test_an_acknowledgement_waits_for_those_before_it_in_its_key(exactly_once, tmp_path):
    """Pub/Sub would take it back, without a word, if one of those came again."""
    settings = {"enable_message_ordering": True, "enable_exactly_once_delivery": exactly_once}
    with place(tmp_path, **settings) as at:
        put(at)
        run = at.begin(message_ordering=True)
        found = run.take()
        by_body = {each.data.decode(): each for each in found}
        entries = [entry_of(by_body[each], ACK) for each in ("a3", "a1", "b1", "b3")]

        report = run.custodian.settle_now(run.source.lease, entries)

        early = {by_body[each].message_id for each in ("a3", "b3")}
        assert report == SettleReport(acked=2, failed=2, undone=frozenset(early))
        assert at.left() == 4
        last = run.settle(found, {"a2": RETRY})
        assert (last.acked, last.requeued, last.released) == (2, 1, 1)
        assert at.waiting() == ["a2", "a3"]


@refused_as
def test_what_follows_one_that_was_taken_back_as_it_came_waits_for_it(word, tmp_path):
    with place(tmp_path, **STRICT) as at:
        put(at)
        lost: list[str] = []

        def confirm(ack_id: str) -> str | None:
            held = at.broker.subscriptions[at.name].flying.get(ack_id)
            if lost or held is None or held.message.data != b"a2":
                return None
            lost.append(ack_id)
            return word

        at.broker.confirm = confirm
        found = [each.data.decode() for each in at.begin(message_ordering=True).take()]

        assert lost
        assert [each for each in found if each[0] == "b"] == ["b1", "b2", "b3"]
        assert [each for each in found if each[0] == "a"] == ["a1"]


def waiting(run: Generation, wait: float) -> dict[bytes, str]:
    """Lets a run pull everything, which then waits in its process; receipts, by body."""
    came = run.source._broker.receive(6)
    run.source._ready += [(came.at, each) for each in came.messages]
    run.source._clock.sleep(wait)
    return {each.raw.message.data: each.receipt for each in came.messages}


@refused_as
def test_what_follows_one_that_was_taken_back_while_it_waited_here_waits_for_it(word, tmp_path):
    with place(tmp_path, **STRICT) as at:
        put(at)
        run = at.begin(message_ordering=True)
        a2 = waiting(run, 0.4 * run.producer.lease)[b"a2"]
        at.broker.confirm = lambda each: word if each == a2 else None

        # It is lost in one portion, and followed in the next.
        portions = [list(run.source.secure(run.source.receive(n, timeout=0))) for n in (2, 4)]

        bodies = [[each.data.decode() for each in portion] for portion in portions]
        assert bodies == [["a1"], ["b1", "b2", "b3"]]
        entries = [entry_of(each, ACK) for each in chain(*portions)]
        assert run.custodian.settle_now(run.source.lease, entries) == SettleReport(acked=4)
        if word.startswith("PERMANENT_"):  # both come again, in this run, and wait still
            at.clock.advance(run.producer.lease)
            assert run.take() == []
        at.broker.confirm = lambda _: None
        run.source.close()
        assert at.waiting() == ["a2", "a3"]


def test_what_a_run_holds_is_kept_though_one_of_its_key_was_taken_back(tmp_path):
    """It is settled by its newest receipt, and not given back."""
    with place(tmp_path, **STRICT) as at:
        put(at)
        run = at.begin(message_ordering=True)
        a2 = waiting(run, 0.4 * run.producer.lease)[b"a2"]
        word = "PERMANENT_FAILURE_INVALID_ACK_ID"
        at.broker.confirm = lambda each: word if each == a2 else None
        found = run.take()
        at.clock.advance(run.producer.lease + 1.0)  # nobody renewed it
        pulled = at.clock.now().timestamp()
        again = waiting(run, 0.4 * run.producer.lease)
        at.broker.confirm = lambda each: "TRANSIENT_FAILURE_OTHER" if each == again[b"b1"] else None

        assert run.take() == []

        receipts = run.source._receipts
        assert {each.data: receipts.handles[each.message_id] for each in found} == {
            each.data: again[each.data] for each in found
        }
        # The hold of b1 is as old as its pull.
        assert receipts._spans[-1][0] == pulled + run.producer.lease
        assert {*run.source._spare.values()} == {again[b"a2"], again[b"a3"]}


def test_messages_without_a_key_go_alone(tmp_path):
    with place(tmp_path, enable_message_ordering=True) as at:
        at.put("x", "y", "z")
        run = at.begin(message_ordering=True)
        found = run.take()
        assert [run.producer.group_of(each) for each in found] == [None] * 3
        assert run.settle(found, {"x": RETRY}) == SettleReport(acked=2, requeued=1)


def test_a_key_is_one_partition_of_the_processors(tmp_path):
    with place(tmp_path, enable_message_ordering=True) as at:
        put(at)
        run = at.begin(message_ordering=True)
        found = run.take()
        assert {run.producer.group_of(each) for each in found} == {"a", "b"}
        assert len({run.producer.partition_of(each) for each in found}) == 2
