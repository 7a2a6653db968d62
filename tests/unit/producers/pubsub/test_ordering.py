"""Ordering keys: a redelivery blocks the later messages of its key, and nothing else."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, LEAVE, RELEASE
from airflow_broadway.core.model.message import Message
from tests.unit.producers.halves import DEAD, RETRY, settlement
from tests.unit.producers.pubsub.kit import (
    INVALID,
    TRANSIENT,
    Generation,
    SubscriptionHarness,
    settings,
)

#: A subscription that confirms each id, in order.
STRICT = {"enable_message_ordering": True, "enable_exactly_once_delivery": True}
strict = settings(**STRICT)
ordered = settings(enable_message_ordering=True)
both_deliveries = pytest.mark.parametrize(
    "sub",
    [{"enable_message_ordering": True}, STRICT],
    indirect=True,
    ids=["at least once", "exactly once"],
)
each_refusal = pytest.mark.parametrize("refusal", [INVALID, TRANSIENT])


def take_two_keys(sub: SubscriptionHarness) -> tuple[Generation, list[Message]]:
    """Publishes and receives ``a1 b1 a2 b2 a3 b3``, in the keys a and b."""
    put(sub)
    run = sub.begin(message_ordering=True)
    return run, run.take()


def put(sub: SubscriptionHarness) -> None:
    for number in (1, 2, 3):
        for key in "ab":
            sub.put(f"{key}{number}", ordering_key=key)


@both_deliveries
@pytest.mark.parametrize("verdict", [RETRY, RELEASE, RETRY._replace(delay=60.0), LEAVE])
def test_redelivery_blocks_later_messages_of_key(verdict, sub):
    run, messages = take_two_keys(sub)

    report = run.settle(messages, {"a2": verdict})

    # a1 and all of b are finished; a3 was handled, and is redelivered in order.
    assert (report.acked, report.lapsed, report.failed) == (4, 0, 0)
    assert report.requeued + report.released + report.left == 2
    if verdict.delay or verdict is LEAVE:
        assert sub.drain() == []
        sub.clock.advance(verdict.delay or 600.0)
    assert sub.drain() == ["a2", "a3"]


@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("delay", [0.0, 300.0])
@ordered
def test_early_release_blocks_later_messages_of_key(delay, elsewhere, sub):
    """Later messages wait as long as that one, also if another process settles the rest."""
    run, messages = take_two_keys(sub)
    [a2] = [message for message in messages if message.data == b"a2"]
    now = run.settle_now([a2], RETRY._replace(delay=delay))
    run.source.stop()
    if elsewhere:
        run.source.close()
    request = settlement([message for message in messages if message is not a2])
    other = run.other()
    deadlines: list[int] = []

    def record(call: str, request: Any) -> None:
        if call == "ModifyAckDeadline":
            deadlines.append(request.ack_deadline_seconds)

    sub.broker.answer = record
    report = other.settle(run.source.lease, replace(request, settled_now=now))

    assert deadlines == [delay]
    assert (report.acked, report.released, report.requeued) == (4, 1, 0)
    if delay:
        sub.clock.advance(delay - 1.0)
        assert sub.drain() == []
        sub.clock.advance(1.0)
    assert sub.drain() == ["a2", "a3"]
    other.close()


@both_deliveries
def test_finished_messages_block_nothing(sub):
    """Acknowledgements are sent in order, including those of dead letters."""
    dead = sub.server.topic()
    dead_letters = sub.server.subscription(dead)
    put(sub)
    run = sub.begin(message_ordering=True, dead_letter=dead, on_failure="dead_letter")
    before = sub.broker.requests["Acknowledge"]

    report = run.settle(run.take(), {"a2": DEAD, "b1": DEAD})

    assert report == SettleReport(acked=4, dead_lettered=2)
    assert sub.broker.requests["Acknowledge"] - before == 1
    assert sub.left() == 0
    letters = sub.server.drain(dead_letters)
    assert sorted((letter.data, letter.ordering_key) for letter in letters) == [
        (b"a2", "a"),
        (b"b1", "b"),
    ]


@both_deliveries
def test_early_verdicts_block_in_any_order(sub):
    """A stage reports successes before failures."""
    run, messages = take_two_keys(sub)
    entries = [entry_of(m, RETRY if m.data == b"a2" else ACK) for m in messages]
    entries.sort(key=lambda entry: entry.verdict is RETRY)

    report = run.custodian.settle_now(run.source.lease, entries)

    assert (report.acked, report.requeued, report.released) == (4, 1, 1)
    assert sub.drain() == ["a2", "a3"]


@both_deliveries
def test_ack_waits_for_earlier_messages_of_key(sub):
    """Pub/Sub would silently undo it if one of those were redelivered."""
    run, messages = take_two_keys(sub)
    by_body = {message.data.decode(): message for message in messages}
    entries = [entry_of(by_body[body], ACK) for body in ("a3", "a1", "b1", "b3")]

    report = run.custodian.settle_now(run.source.lease, entries)

    early = {by_body[body].message_id for body in ("a3", "b3")}
    assert report == SettleReport(acked=2, failed=2, undone=frozenset(early))
    assert sub.left() == 4
    last = run.settle(messages, {"a2": RETRY})
    assert (last.acked, last.requeued, last.released) == (2, 1, 1)
    assert sub.drain() == ["a2", "a3"]


@each_refusal
@strict
def test_later_messages_wait_for_one_lost_on_receive(refusal, sub):
    put(sub)
    lost: list[str] = []

    def confirm(ack_id: str) -> Any:
        lease = sub.broker.subscriptions[sub.name].flying.get(ack_id)
        if lost or lease is None or lease.message.data != b"a2":
            return None
        lost.append(ack_id)
        return refusal

    sub.broker.confirm = confirm
    bodies = [message.data.decode() for message in sub.begin(message_ordering=True).take()]

    assert lost
    assert [body for body in bodies if body[0] == "b"] == ["b1", "b2", "b3"]
    assert [body for body in bodies if body[0] == "a"] == ["a1"]


def buffer(run: Generation, wait: float) -> dict[bytes, str]:
    """Pulls all messages into the buffer, where they wait; returns receipts by body."""
    answer = run.source._broker.receive(6)
    run.source._ready += [(answer.at, received) for received in answer.messages]
    run.source._clock.sleep(wait)
    return {received.raw.message.data: received.receipt for received in answer.messages}


@each_refusal
@strict
def test_later_messages_wait_for_one_lost_in_buffer(refusal, sub):
    put(sub)
    run = sub.begin(message_ordering=True)
    a2 = buffer(run, 0.4 * run.producer.lease)[b"a2"]
    sub.broker.confirm = lambda ack_id: refusal if ack_id == a2 else None

    # It is lost in one portion; the next one has its successors.
    portions = [list(run.source.secure(run.source.receive(n, timeout=0))) for n in (2, 4)]

    bodies = [[message.data.decode() for message in portion] for portion in portions]
    assert bodies == [["a1"], ["b1", "b2", "b3"]]
    entries = [entry_of(message, ACK) for message in chain(*portions)]
    assert run.custodian.settle_now(run.source.lease, entries) == SettleReport(acked=4)
    if refusal.startswith("PERMANENT_"):  # both are redelivered to this run, and still wait
        sub.clock.advance(run.producer.lease)
        assert run.take() == []
    sub.broker.confirm = lambda _: None
    run.source.close()
    assert sub.drain() == ["a2", "a3"]


@strict
def test_leased_messages_survive_loss_in_their_key(sub):
    """They are settled by their newest receipts, and not released."""
    put(sub)
    run = sub.begin(message_ordering=True)
    a2 = buffer(run, 0.4 * run.producer.lease)[b"a2"]
    sub.broker.confirm = lambda ack_id: INVALID if ack_id == a2 else None
    messages = run.take()
    sub.clock.advance(run.producer.lease + 1.0)  # without renewal
    pulled = sub.clock.now().timestamp()
    again = buffer(run, 0.4 * run.producer.lease)
    sub.broker.confirm = lambda ack_id: TRANSIENT if ack_id == again[b"b1"] else None

    assert run.take() == []

    receipts = run.source._receipts
    assert {m.data: receipts.handles[m.message_id] for m in messages} == {
        m.data: again[m.data] for m in messages
    }
    # The lease of b1 is as old as its pull.
    assert receipts._spans[-1][0] == pulled + run.producer.lease
    assert {*run.source._spare.values()} == {again[b"a2"], again[b"a3"]}


@ordered
def test_messages_without_key_are_independent(sub):
    run, messages = sub.taken("x", "y", "z", message_ordering=True)
    assert [run.producer.group_of(message) for message in messages] == [None] * 3
    assert run.settle(messages, {"x": RETRY}) == SettleReport(acked=2, requeued=1)


@ordered
def test_key_is_one_processor_partition(sub):
    run, messages = take_two_keys(sub)
    assert {run.producer.group_of(message) for message in messages} == {"a", "b"}
    assert len({run.producer.partition_of(message) for message in messages}) == 2
