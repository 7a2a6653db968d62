"""Receiving, leasing and settling at Pub/Sub, on a manual clock."""

import logging
import shutil
from dataclasses import replace
from typing import Any

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, LEAVE, RELEASE, Action, Facts, Verdict
from airflow_broadway.core.errors import LeaseLapsed, ProducerError, ProducerUnavailable
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kit.generation_log import GenerationLog
from tests.pubsub_stub.errors import Refused
from tests.unit.producers.halves import DEAD, RETRY, recorded_spans, renewed, settlement
from tests.unit.producers.pubsub.kit import (
    INVALID,
    TRANSIENT,
    exactly_once,
    open_subscription,
    settings,
)

DOWN = Refused("UNAVAILABLE", "down")


def later(seconds: float) -> Verdict:
    return RETRY._replace(delay=seconds)


def redelivery(messages: list[Message]) -> dict[str, tuple[int, bool]]:
    """Returns the attempt and the mark of each message, by body."""
    return {message.data.decode(): (message.attempt, message.redelivered) for message in messages}


# ---------------------------------------------------------------------------------- the lease


@settings(ack_deadline_seconds=10)
def test_pulled_messages_are_leased_beyond_ack_deadline(sub):
    run, messages = sub.taken("a", "b")

    sub.clock.advance(599.0)

    assert sub.drain() == []
    assert run.settle(messages) == SettleReport(acked=2)
    assert sub.left() == 0


@settings(ack_deadline_seconds=600)
def test_ack_deadline_equal_to_lease_needs_no_request(sub):
    sub.taken("a")
    assert sub.broker.requests["ModifyAckDeadline"] == 0
    sub.clock.advance(599.0)
    assert sub.drain() == []


@settings(ack_deadline_seconds=600)
def test_deadline_lowered_during_run_loses_nothing(sub):
    """A run reads it when it begins: the guide says to lower it between runs only."""
    run = sub.begin()
    sub.broker.subscriptions[sub.name].settings.ack_deadline_seconds = 10
    sub.put("a")
    messages = run.take()

    sub.clock.advance(11.0)

    assert sub.left() == 1
    next_run, again = sub.taken()
    assert redelivery(again) == {"a": (1, False)}
    assert run.settle(messages).failed == 0
    assert next_run.settle(again) == SettleReport(acked=1)
    assert sub.left() == 0


def test_lease_is_renewed_in_bulk_by_another_process(sub):
    run, messages = sub.taken(*map(str, range(3000)))
    lease = run.stop()
    before = sub.broker.requests["ModifyAckDeadline"]
    other = run.other()

    for _ in range(20):
        sub.clock.advance(300.0)
        lease = renewed(other, lease)

    assert sub.broker.requests["ModifyAckDeadline"] - before == 2 * 20
    assert run.settle(messages, by=other) == SettleReport(acked=3000)
    assert sub.left() == 0
    other.close()


def test_lapsed_lease_makes_no_request(sub):
    """The server would accept it: only our own clock detects the lapse."""
    run, messages = sub.taken("a", "b")
    sub.clock.advance(600.0)
    sub.broker.requests.clear()

    assert run.renew() is None
    assert run.settle(messages) == SettleReport(lapsed=2)

    assert sub.broker.requests["Acknowledge"] == 0
    assert sorted(sub.drain()) == ["a", "b"]


def test_settlement_delayed_beyond_lease_stops(sub):
    run, messages = sub.taken(*map(str, range(5000)))

    sub.broker.answer = lambda call, _: sub.clock.advance(600.0) if call == "Acknowledge" else None
    report = run.settle(messages)

    assert (report.acked, report.lapsed) == (2500, 2500)
    assert sub.broker.requests["Acknowledge"] == 1


def test_message_is_not_acked_after_lease_lapsed_in_outage(sub):
    """Pub/Sub would accept the old id, and remove a message that another run has leased."""
    run, messages = sub.taken("a")
    sub.clock.advance(590.0)
    sub.refuse_once("Acknowledge", DOWN, after=20.0)

    with pytest.raises(ProducerUnavailable, match="cannot be reached for Acknowledge"):
        run.settle(messages)

    assert sub.broker.requests["Acknowledge"] == 1
    assert run.settle(messages, by=run.other()) == SettleReport(lapsed=1)
    assert sub.left() == 1


@settings(ack_deadline_seconds=10)
def test_message_leased_too_late_is_not_handed_out(sub):
    """Pub/Sub has redelivered it by then, and still accepts the old id."""
    sub.put("a")
    run = sub.begin()
    sub.refuse_once("ModifyAckDeadline", DOWN, after=10.0)

    assert run.source.receive(10, timeout=0) == []
    assert sub.drain() == ["a"]


def test_renewal_delayed_beyond_lease_fails(sub):
    run, messages = sub.taken("a")
    sub.clock.advance(590.0)
    sub.refuse_once("ModifyAckDeadline", DOWN, after=20.0)

    assert run.renew() is None
    assert run.settle(messages) == SettleReport(lapsed=1)
    assert sub.left() == 1


# ---------------------------------------------------------------------------------- attempts


def test_attempts_count_failures_and_redelivery_is_marked(sub):
    first, messages = sub.taken("ack", "retry", "release", "noop")
    assert set(redelivery(messages).values()) == {(1, False)}
    first.settle(messages, {"retry": RETRY, "release": RELEASE, "noop": LEAVE})
    sub.clock.advance(600.0)

    second, again = sub.taken()

    assert redelivery(again) == {"retry": (2, True), "release": (1, True), "noop": (1, True)}
    second.settle(again, {"retry": RETRY}, RELEASE)
    third = redelivery(sub.begin().take())
    assert third == {"retry": (3, True), "release": (1, True), "noop": (1, True)}


def test_lapsed_messages_are_marked_before_settlement(sub):
    sub.taken("a")  # by a run that dies
    running, messages = sub.taken("b")
    assert redelivery(messages) == {"b": (1, False)}

    sub.clock.advance(600.0)

    assert redelivery(running.take_more()) == {"a": (1, True)}


def test_lapse_settled_during_receive_is_marked(monkeypatch, sub):
    dead, leased = sub.taken("a")
    running = sub.begin()
    sub.clock.advance(600.0)
    failures = running.source._folder.failures
    known = failures.of

    def settle_meanwhile(*args: Any) -> Any:
        counts = known(*args)
        assert dead.settle(leased, by=dead.other()) == SettleReport(lapsed=1)
        return counts

    monkeypatch.setattr(failures, "of", settle_meanwhile)
    assert redelivery(running.take()) == {"a": (1, True)}


def test_renewal_excludes_messages_secured_later(sub):
    """A buffered message is leased from its pull on, so for less time than a renewed one."""
    dead, _ = sub.taken("early")
    sub.clock.advance(100.0)
    sub.put("late")
    late = dead.source.receive(10, timeout=5.0)
    sub.clock.advance(150.0)
    assert dead.renew() is not None
    dead.source.secure(late)  # leased until 700, "early" until 850; then the run dies

    sub.clock.advance(455.0)

    assert redelivery(sub.begin().take()) == {"late": (1, True)}


def test_redelivery_of_early_acked_message_is_marked(monkeypatch, sub):
    run, [a] = sub.taken("a")
    ack_id = run.receipt(a)
    monkeypatch.setattr(run.custodian._broker.client, "remove", lambda ids: {})  # forgotten
    assert run.settle_now([a], ACK) == SettleReport(acked=1)
    sub.nack(ack_id)
    assert run.source.receive(1000, timeout=20.0) == []
    run.source.stop()
    assert redelivery(sub.begin().take()) == {"a": (1, True)}


def test_late_answer_keeps_leased_messages(sub):
    run, [a] = sub.taken("a")
    sub.nack(run.receipt(a))
    [again] = run.source._broker.receive(1).messages
    run.source._release_late([again])
    assert sub.drain() == []


def test_late_answer_with_long_ids_is_released(sub):
    sub.put("a")
    run = sub.begin()
    [a] = run.source._broker.receive(1).messages
    long = [a._replace(key=str(n), receipt=f"{sub.name}:{n:01000d}") for n in range(999)]
    run.source._release_late([*long, a])
    assert sub.drain() == ["a"]


def test_swept_generation_secures_nothing(monkeypatch, sub):
    """A run presumed dead resumes: its callbacks must not see the message."""
    sub.put("a", "b")
    run = sub.begin()
    [a], b = run.take(1), run.source.receive(1, timeout=0)
    write = run.source._receipts.hold

    def sweep_before(*args: Any) -> None:
        run.source._folder.close(run.env.generation)
        assert run.settle([a], rest=RELEASE, by=run.other()).released == 1
        write(*args)

    monkeypatch.setattr(run.source._receipts, "hold", sweep_before)
    with pytest.raises(LeaseLapsed, match="settled while it still received"):
        run.source.secure(b)
    run.source.stop()
    assert redelivery(sub.begin().take()) == {"a": (1, True), "b": (1, False)}


def test_message_secure_before_settling_note_is_settled(monkeypatch, sub):
    """Its callbacks may have seen it: the next delivery must be marked."""
    sub.put("a", "b")
    run = sub.begin()
    [a], b = run.take(1), run.source.receive(1, timeout=0)
    run.source._folder.close(run.env.generation)  # from now on the sweep reads files
    begin = GenerationLog.begin
    handed_out: list[Message] = []

    def secure_before(self: GenerationLog) -> None:
        handed_out.extend(run.source.secure(b))
        begin(self)

    monkeypatch.setattr(GenerationLog, "begin", secure_before)
    report = run.settle([a], rest=RELEASE, by=run.other())

    assert len(handed_out) == 1
    assert report.released == 2
    run.source.stop()
    assert redelivery(sub.begin().take()) == {"a": (1, True), "b": (1, True)}


def test_active_leases_of_others_mark_nothing(sub):
    sub.taken("a")
    other, messages = sub.taken("b")
    assert redelivery(messages) == {"b": (1, False)}
    sub.clock.advance(10.0)
    sub.put("c")
    assert redelivery(other.take_more()) == {"c": (1, False)}


def test_without_staging_folder_process_counts_failures():
    with open_subscription() as sub:
        sub.put("a")
        for attempt in (1, 2, 3):
            run = sub.begin()
            [message] = run.take()
            assert (message.attempt, message.redelivered) == (attempt, attempt > 1)
            run.settle([message], {"a": RETRY})


def test_delivery_count_of_policy_marks_redelivery(sub):
    policy = {"dead_letter_topic": sub.topic, "max_delivery_attempts": 50}
    name = sub.server.subscription(sub.topic, dead_letter_policy=policy)
    sub.put("a")
    [foreign] = sub.server.pull(name)
    sub.nack(foreign.ack_id, subscription=name)

    [message] = sub.begin(subscription=name).take()

    assert (message.attempt, message.redelivered) == (1, True)
    assert message.metadata["deliveryAttempt"] == 2


# ---------------------------------------------------------------------------------- settling


def test_retry_is_redelivered_after_delay(sub):
    run, messages = sub.taken("a", "b", "c")
    report = run.settle(messages, {"a": later(30.2), "b": later(60.0)})
    assert report == SettleReport(acked=1, requeued=2)
    for seconds, bodies in ((30.0, []), (1.0, ["a"]), (29.0, ["b"])):
        sub.clock.advance(seconds)
        assert sub.drain() == bodies


def test_early_retry_keeps_delay(sub):
    run, [a, b] = sub.taken("a", "b")
    now = run.settle_now([a], later(60.0))
    assert now == SettleReport(requeued=1)
    run.stop()
    request = replace(settlement([b]), settled_now=now)
    assert run.other().settle(run.source.lease, request) == SettleReport(acked=1)
    sub.clock.advance(59.0)
    assert sub.drain() == []
    sub.clock.advance(1.0)
    assert sub.drain() == ["a"]


def test_dead_letters_default_to_policy_topic(sub):
    dead = sub.server.topic()
    dead_letters = sub.server.subscription(dead)
    policy = {"dead_letter_topic": dead, "max_delivery_attempts": 10}
    name = sub.server.subscription(sub.topic, dead_letter_policy=policy)
    run, messages = sub.taken("a", subscription=name, on_failure="dead_letter")
    assert run.settle(messages, {"a": DEAD}) == SettleReport(dead_lettered=1)
    [letter] = sub.server.drain(dead_letters)
    assert (letter.data, letter.attributes["broadway_reason"]) == (b"a", "bad")


def test_excessive_delay_is_cut_and_reported(sub):
    run, messages = sub.taken("a")
    report = run.settle(messages, {"a": later(3600.0)})
    assert report.requeued == 1
    [error] = report.errors
    assert "600 s at most" in error
    sub.clock.advance(600.0)
    assert sub.drain() == ["a"]


@pytest.mark.parametrize(
    ("action", "delay"), [("nack", 0.0), (("nack", 45), 45.0), (["nack", 0], 0.0)]
)
def test_nack_uses_own_delay_on_every_attempt(action, delay, sub):
    run, [message] = sub.taken("a", on_failure=action)
    failed = message.failed("bad")
    for attempt in (1, 50):
        facts = Facts(run.producer.on_failure, attempt, reason="bad")
        assert run.producer.judge(facts) == Verdict(Action.RETRY, delay, "bad")
    assert run.producer.verdict(failed, failed=True, stage="process").delay == delay


def test_repeated_settlement_reports_same_without_requests(sub):
    run, messages = sub.taken("a", "b")
    first = run.settle(messages, {"a": RETRY})
    requests = dict(sub.broker.requests)
    assert run.settle(messages, {"a": RETRY}, by=run.other()) == first
    assert dict(sub.broker.requests) == requests


def test_unsecured_messages_are_released_at_end(sub):
    sub.put(*"abcdef")
    run = sub.begin()
    run.source.receive(3, timeout=0)  # never secured
    run.source.stop()
    assert sorted(sub.drain()) == list("abcdef")


def test_unreadable_message_is_released_by_newest_receipt(monkeypatch, sub):
    sub.put("a")
    run = sub.begin()

    def unreadable(received: Any) -> None:
        raise ValueError("unreadable")

    monkeypatch.setattr(run.source._broker, "read", unreadable)
    assert run.take() == []  # kept for the end of the run
    sub.clock.advance(601.0)
    assert run.take_more() == []  # delivered again, since its lease was over
    assert sub.drain() == []

    run.source.close()

    assert sub.drain() == ["a"]


def test_lost_receipt_files_lapse_all_messages(tmp_path, sub):
    run, messages = sub.taken("a", "b")
    run.stop()
    shutil.rmtree(tmp_path / "pubsub")
    assert run.settle(messages, by=run.other()).lapsed == 2
    assert sub.left() == 2
    sub.clock.advance(600.0)
    assert sorted(sub.drain()) == ["a", "b"]


@settings(retain_acked_messages=True)
def test_seek_redelivers_with_recorded_failures(sub):
    before = sub.clock.now()
    first, messages = sub.taken("a")
    first.settle(messages, {"a": RETRY})
    second, messages = sub.taken()
    second.settle(messages)
    assert sub.left() == 0
    sub.server.subscriber.seek(request={"subscription": sub.name, "time": before})
    assert redelivery(sub.begin().take()) == {"a": (2, True)}


# ---------------------------------------------------------------------------------- exactly once


@exactly_once
def test_permanently_refused_id_lapses_alone(sub):
    run, messages = sub.taken(*map(str, range(10)))
    sub.nack(run.receipt(messages[3]))

    report = run.settle(messages)

    assert (report.acked, report.lapsed, report.failed) == (9, 1, 0)
    assert INVALID in report.errors[0]
    assert redelivery(sub.begin().take()) == {messages[3].data.decode(): (1, True)}


@exactly_once
def test_every_id_of_full_request_may_be_refused(sub):
    """Their refusals exceed gRPC's default limit of metadata."""
    run, messages = sub.taken(*map(str, range(2500)))
    sub.broker.confirm = lambda _: INVALID

    assert run.settle(messages).lapsed == 2500
    assert sub.broker.requests["Acknowledge"] == 1


@exactly_once
@pytest.mark.parametrize(
    ("lost", "answers", "counts"),
    [
        pytest.param(False, [TRANSIENT, TRANSIENT, None], {"acked": 2}, id="transient"),
        pytest.param(False, [TRANSIENT, INVALID], {"acked": 1, "lapsed": 1}, id="then invalid"),
        pytest.param(True, [None, TRANSIENT, INVALID], {"acked": 2}, id="lost, transient, invalid"),
        pytest.param(True, [None, INVALID], {"acked": 2}, id="lost, invalid"),
    ],
)
def test_refused_id_is_retried_alone_and_lapses_unless_an_answer_was_lost(
    lost, answers, counts, sub
):
    run, messages = sub.taken("a", "b")
    refused = run.receipt(messages[1])
    if lost:
        sub.refuse_once("Acknowledge", Refused("UNAVAILABLE", "connection reset", done=True))
    sub.broker.confirm = lambda ack_id: (
        answers[sub.broker.requests["Acknowledge"] - 1] if ack_id == refused else None
    )

    report = run.settle(messages)

    assert replace(report, errors=()) == SettleReport(**counts)
    assert sub.broker.requests["Acknowledge"] == len(answers)
    # "a" is sent once, and again only after a lost answer.
    assert sub.broker.entries["Acknowledge"] == len(answers) + 1 + lost
    assert sub.left() == counts.get("lapsed", 0)


@exactly_once
def test_killed_settlement_counts_only_unasked_ids_as_lapse(monkeypatch, sub):
    """The kill came between its first request and the note of it."""
    run, messages = sub.taken(*map(str, range(5000)))
    client = run.custodian._broker.client
    acknowledge = client.remove
    void: list[str] = []

    def killed(ids: list[str]) -> None:
        void.extend(ids)
        acknowledge(ids)
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        run.settle(messages)
    assert sub.left() == len(void) == 2500
    run.source.close()
    unasked = next(key for key in sub.broker.subscriptions[sub.name].flying if key not in void)
    sub.broker.confirm = lambda ack_id: INVALID if ack_id in {*void, unasked} else None

    report = run.settle(messages, by=run.other())

    assert (report.acked, report.lapsed, report.failed) == (4999, 1, 0)


@exactly_once
def test_killed_settlement_resumes_with_remaining_ids(monkeypatch, sub):
    run, messages = sub.taken(*map(str, range(5000)))
    client = run.custodian._broker.client
    acknowledge = client.remove

    def once(ids: list[str]) -> dict[str, str]:
        monkeypatch.setattr(client, "remove", killed)
        return dict(acknowledge(ids))

    def killed(ids: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "remove", once)
    with pytest.raises(KeyboardInterrupt):
        run.settle(messages)
    assert sub.left() == 2500
    run.source.close()
    sub.broker.entries.clear()

    assert run.settle(messages, by=run.other()) == SettleReport(acked=5000)

    assert sub.broker.entries["Acknowledge"] == 2500
    assert sub.left() == 0


@exactly_once
def test_redelivery_after_unclear_ack_is_marked(sub):
    """An id invalid at the second try was acknowledged by the first, or leased elsewhere."""
    run, messages = sub.taken("a")
    sub.refuse_once("Acknowledge", Refused("UNAVAILABLE", "connection reset"))
    sub.broker.confirm = lambda ack_id: INVALID
    assert run.settle(messages) == SettleReport(acked=1)
    sub.broker.confirm = lambda ack_id: None
    sub.clock.advance(600.0)
    assert redelivery(sub.begin().take()) == {"a": (1, True)}


@exactly_once
def test_message_lost_during_renewal_is_marked_elsewhere(caplog, sub):
    run, messages = sub.taken("a", "b")
    sub.nack(run.receipt(messages[0]))
    sub.clock.advance(300.0)

    with caplog.at_level(logging.ERROR):
        assert run.renew() is not None

    assert "holds 1 of 2 messages no longer" in caplog.text
    assert redelivery(sub.begin().take()) == {"a": (1, True)}
    sub.clock.advance(300.0)
    sub.broker.entries.clear()
    assert run.renew() is not None
    assert sub.broker.entries["ModifyAckDeadline"] == 1  # without the invalid id
    report = run.settle(messages)
    assert (report.acked, report.lapsed) == (1, 1)


# ---------------------------------------------------------------------------------- trouble


def test_short_outage_is_waited_out(sub):
    sub.put("a")
    run = sub.begin()
    down = [DOWN] * 3
    sub.broker.answer = lambda call, _: down.pop() if down else None
    messages = run.take()
    assert len(messages) == 1
    down += [Refused("INTERNAL", "oops")] * 3
    assert run.settle(messages) == SettleReport(acked=1)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("UNAVAILABLE", "cannot be reached for Acknowledge"),
        ("RESOURCE_EXHAUSTED", "throttles Acknowledge on .*, a quota is used up"),
        ("UNAUTHENTICATED", "does not accept the credentials for Acknowledge"),
    ],
)
def test_long_outage_ends_settlement_until_next_try(code, words, sub):
    run, messages = sub.taken("a", "b")
    sub.broker.answer = lambda call, _: Refused(code, "down")
    with pytest.raises(ProducerUnavailable, match=words):
        run.settle(messages)
    sub.broker.answer = lambda call, _: None
    assert run.settle(messages, by=run.other()) == SettleReport(acked=2)


@pytest.mark.parametrize("code", ["DEADLINE_EXCEEDED", "UNAVAILABLE"])
@settings(ack_deadline_seconds=20)
def test_lost_pull_is_redelivered_after_ack_deadline(code, sub):
    sub.put("a")
    sub.refuse_once("Pull", Refused(code, "too late", done=True))

    assert sub.begin().take() == []

    assert sub.begin().take() == []
    sub.clock.advance(20.0)
    # No callback has seen it.
    assert redelivery(sub.begin().take()) == {"a": (1, False)}


def test_malformed_id_fails_alone(sub):
    run, messages = sub.taken(*map(str, range(20)))
    run.source._receipts.handles[messages[7].message_id] = "nonsense"
    report = run.settle(messages)
    assert (report.acked, report.failed) == (19, 1)
    assert sub.left() == 1


def test_pull_emits_telemetry_span(sub):
    with recorded_spans("pubsub.receive_messages") as spans:
        sub.put("a")
        run = sub.begin()
        assert len(run.source.receive(1, timeout=0)) == 1
        sub.deny("Pull")
        with pytest.raises(ProducerError):
            run.source.receive(7, timeout=0)
        sub.broker.answer = lambda *_: None

    assert [end for end, _ in spans] == ["start", "stop", "start", "exception"]
    first, received, second, _ = [metadata for _, metadata in spans]
    assert set(first) - {"telemetry_span_context"} == {"name", "demand", "max_messages"}
    assert (first["demand"], second["demand"]) == (1, 7)
    assert len(received["messages"]) == 1
