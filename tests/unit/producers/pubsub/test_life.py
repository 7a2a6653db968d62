"""Receiving, holding and settling at Pub/Sub, on a clock that is moved by hand."""

import logging
import shutil
from dataclasses import replace
from typing import Any

import pytest

from airflow_broadway.core import telemetry
from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, LEAVE, RELEASE, Action, Facts, Verdict
from airflow_broadway.core.errors import LeaseLapsed, ProducerError, ProducerUnavailable
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kit.generation_log import GenerationLog
from tests.pubsub_stub.errors import Refused
from tests.unit.producers.pubsub.kit import Place, place, settlement

RETRY = Verdict(Action.RETRY, 0.0, "bad", "process")


def later(seconds: float) -> Verdict:
    return RETRY._replace(delay=seconds)


def hold_up(at: Place, call: str, seconds: float) -> None:
    """The next such request fails after so long; those after it are answered."""
    down = [Refused("UNAVAILABLE", "down")]

    def answer(asked: str, _: object) -> Refused | None:
        if asked != call or not down:
            return None
        at.clock.advance(seconds)
        return down.pop()

    at.broker.answer = answer


def redelivery(found: list) -> dict[str, tuple[int, bool]]:  # type: ignore[type-arg]
    return {each.data.decode(): (each.attempt, each.redelivered) for each in found}


# ---------------------------------------------------------------------------------- the lease


def test_what_is_pulled_is_held_for_the_lease_and_not_for_the_subscriptions_deadline(tmp_path):
    with place(tmp_path, ack_deadline_seconds=10) as at:
        at.put("a", "b")
        run = at.begin()
        found = run.take()

        at.clock.advance(599.0)

        assert at.waiting() == []
        assert run.settle(found) == SettleReport(acked=2)
        assert at.left() == 0


def test_a_subscription_whose_own_deadline_is_the_lease_costs_no_request_to_hold(tmp_path):
    with place(tmp_path, ack_deadline_seconds=600) as at:
        at.put("a")
        run = at.begin()
        run.take()
        assert at.broker.requests["ModifyAckDeadline"] == 0
        at.clock.advance(599.0)
        assert at.waiting() == []


def test_a_deadline_that_is_lowered_while_a_run_is_at_work_costs_a_delivery_and_no_message(
    tmp_path,
):
    """It is read when a run begins: the guide says to lower it between runs only."""
    with place(tmp_path, ack_deadline_seconds=600) as at:
        run = at.begin()
        at.broker.subscriptions[at.name].settings.ack_deadline_seconds = 10
        at.put("a")
        found = run.take()

        at.clock.advance(11.0)

        assert at.left() == 1
        next_run = at.begin()
        again = next_run.take()
        assert redelivery(again) == {"a": (1, False)}
        assert run.settle(found).failed == 0
        assert next_run.settle(again) == SettleReport(acked=1)
        assert at.left() == 0


def test_a_lease_is_renewed_in_bulk_from_another_process(tmp_path):
    with place(tmp_path) as at:
        at.put(*map(str, range(3000)))
        run = at.begin()
        found = run.take()
        run.source.stop()
        lease = run.source.lease
        run.source.close()
        before = at.broker.requests["ModifyAckDeadline"]
        other = run.other()

        for _ in range(20):
            at.clock.advance(300.0)
            renewed = other.renew(lease)
            assert renewed is not None
            lease = renewed

        assert at.broker.requests["ModifyAckDeadline"] - before == 2 * 20
        assert run.settle(found, by=other) == SettleReport(acked=3000)
        assert at.left() == 0
        other.close()


def test_no_request_is_made_for_a_lease_that_has_lapsed(tmp_path):
    """The server would take it: nothing but our own clock tells of a lapse."""
    with place(tmp_path) as at:
        at.put("a", "b")
        run = at.begin()
        found = run.take()
        at.clock.advance(600.0)
        at.broker.requests.clear()

        assert run.custodian.renew(run.source.lease) is None
        assert run.settle(found) == SettleReport(lapsed=2)

        assert at.broker.requests["Acknowledge"] == 0
        assert sorted(at.waiting()) == ["a", "b"]


def test_a_settlement_that_is_held_up_beyond_its_lease_asks_nothing_more(tmp_path):
    with place(tmp_path) as at:
        at.put(*map(str, range(5000)))
        run = at.begin()
        found = run.take()

        def held_up(call: str, _: object) -> None:
            if call == "Acknowledge":
                at.clock.advance(600.0)

        at.broker.answer = held_up
        report = run.settle(found)

        assert (report.acked, report.lapsed) == (2500, 2500)
        assert at.broker.requests["Acknowledge"] == 1


def test_what_an_outage_held_up_beyond_its_lease_is_not_acknowledged_any_more(tmp_path):
    """Pub/Sub would take the old id, and end a message that another run has by then."""
    with place(tmp_path) as at:
        at.put("a")
        run = at.begin()
        found = run.take()
        at.clock.advance(590.0)
        hold_up(at, "Acknowledge", 20.0)

        with pytest.raises(ProducerUnavailable, match="cannot be reached for Acknowledge"):
            run.settle(found)

        assert at.broker.requests["Acknowledge"] == 1
        assert run.settle(found, by=run.other()) == SettleReport(lapsed=1)
        assert at.left() == 1


def test_what_an_outage_kept_from_being_held_in_time_is_not_handed_out(tmp_path):
    """Pub/Sub has handed it to others by then, and takes the old id without a word."""
    with place(tmp_path, ack_deadline_seconds=10) as at:
        at.put("a")
        run = at.begin()
        hold_up(at, "ModifyAckDeadline", 10.0)

        assert run.source.receive(10, timeout=0) == []
        assert at.waiting() == ["a"]


def test_a_renewal_that_an_outage_held_up_beyond_the_lease_renews_nothing(tmp_path):
    with place(tmp_path) as at:
        at.put("a")
        run = at.begin()
        found = run.take()
        at.clock.advance(590.0)
        hold_up(at, "ModifyAckDeadline", 20.0)

        assert run.custodian.renew(run.source.lease) is None
        assert run.settle(found) == SettleReport(lapsed=1)
        assert at.left() == 1


# ---------------------------------------------------------------------------------- attempts


def test_attempts_count_recorded_failures_and_marks_tell_of_what_came_before(tmp_path):
    with place(tmp_path) as at:
        at.put("ack", "retry", "release", "noop")
        first = at.begin()
        found = first.take()
        assert set(redelivery(found).values()) == {(1, False)}
        first.settle(found, {"retry": RETRY, "release": RELEASE, "noop": LEAVE})
        at.clock.advance(600.0)

        second = at.begin()
        again = second.take()

        assert redelivery(again) == {"retry": (2, True), "release": (1, True), "noop": (1, True)}
        second.settle(again, {"retry": RETRY}, RELEASE)
        third = redelivery(at.begin().take())
        assert third == {"retry": (3, True), "release": (1, True), "noop": (1, True)}


def test_what_a_dead_generation_held_is_marked_before_anybody_settles_it(tmp_path):
    with place(tmp_path) as at:
        at.put("a")
        dead = at.begin()
        dead.take()  # and is heard of no more
        running = at.begin()
        at.put("b")
        assert redelivery(running.take()) == {"b": (1, False)}

        at.clock.advance(600.0)

        assert redelivery(running.take_more()) == {"a": (1, True)}


def test_a_lapse_that_is_settled_while_a_run_receives_is_marked_all_the_same(tmp_path, monkeypatch):
    with place(tmp_path) as at:
        at.put("a")
        dead = at.begin()
        held = dead.take()
        running = at.begin()
        at.clock.advance(600.0)
        failures = running.source._folder.failures
        known = failures.of

        def settled_meanwhile(*args: Any) -> dict[str, int]:
            found = known(*args)
            assert dead.settle(held, by=dead.other()) == SettleReport(lapsed=1)
            return found

        monkeypatch.setattr(failures, "of", settled_meanwhile)
        assert redelivery(running.take()) == {"a": (1, True)}


def test_a_renewal_says_nothing_of_what_was_secured_after_it(tmp_path):
    """What waited in the process is held from its pull on, and so for less than what is renewed."""
    with place(tmp_path) as at:
        at.put("early")
        dead = at.begin()
        dead.take()
        at.clock.advance(100.0)
        at.put("late")
        late = dead.source.receive(10, timeout=5.0)
        at.clock.advance(150.0)
        assert dead.custodian.renew(dead.source.lease) is not None
        dead.source.secure(late)  # held until 700, "early" until 850; then it dies

        at.clock.advance(455.0)

        assert redelivery(at.begin().take()) == {"late": (1, True)}


def test_what_a_run_settled_at_once_and_pubsub_delivers_again_is_marked(tmp_path, monkeypatch):
    with place(tmp_path) as at:
        at.put("a")
        run = at.begin()
        [a] = run.take()
        ack_id = run.source._receipts.handles[a.message_id]
        monkeypatch.setattr(run.custodian._broker.client, "remove", lambda ids: {})  # forgotten
        now = run.custodian.settle_now(run.source.lease, [entry_of(a, ACK)])
        assert now == SettleReport(acked=1)
        at.server.subscriber.modify_ack_deadline(
            subscription=at.name, ack_ids=[ack_id], ack_deadline_seconds=0
        )
        assert run.source.receive(1000, timeout=20.0) == []
        run.source.stop()
        assert redelivery(at.begin().take()) == {"a": (1, True)}


def test_a_late_answer_does_not_give_back_what_the_run_holds(tmp_path):
    with place(tmp_path) as at:
        at.put("a")
        run = at.begin()
        [a] = run.take()
        ack_id = run.source._receipts.handles[a.message_id]
        at.server.subscriber.modify_ack_deadline(
            subscription=at.name, ack_ids=[ack_id], ack_deadline_seconds=0
        )
        [again] = run.source._broker.receive(1).messages
        run.source._release_late([again])
        assert at.waiting() == []


def test_a_late_answer_of_long_ids_is_given_back_whole(tmp_path):
    with place(tmp_path) as at:
        at.put("a")
        run = at.begin()
        [a] = run.source._broker.receive(1).messages
        long = [a._replace(key=str(n), receipt=f"{at.name}:{n:01000d}") for n in range(999)]
        run.source._release_late([*long, a])
        assert at.waiting() == ["a"]


def test_nothing_is_secured_while_a_newer_execution_gives_it_back(tmp_path, monkeypatch):
    """Whoever was thought dead wakes between two lines: its callbacks must not see the message."""
    with place(tmp_path) as at:
        at.put("a", "b")
        run = at.begin()
        [a] = run.source.secure(run.source.receive(1, timeout=0))
        b = run.source.receive(1, timeout=0)
        lease, write = run.source.lease, run.source._receipts.hold

        def swept_before(*args: Any) -> None:
            run.source._folder.close(run.env.generation)
            assert run.other().settle(lease, settlement([a], rest=RELEASE)).released == 1
            write(*args)

        monkeypatch.setattr(run.source._receipts, "hold", swept_before)
        with pytest.raises(LeaseLapsed, match="settled while it still received"):
            run.source.secure(b)
        run.source.stop()
        assert redelivery(at.begin().take()) == {"a": (1, True), "b": (1, False)}


def test_what_is_secured_before_settling_is_noted_is_settled_too(tmp_path, monkeypatch):
    """Its callbacks may have seen it: who gets it next must know."""
    with place(tmp_path) as at:
        at.put("a", "b")
        run = at.begin()
        [a] = run.source.secure(run.source.receive(1, timeout=0))
        b = run.source.receive(1, timeout=0)
        lease = run.source.lease
        run.source._folder.close(run.env.generation)  # from now on the sweep reads files
        begin = GenerationLog.begin
        handed_out: list[Message] = []

        def secured_before(self: GenerationLog) -> None:
            handed_out.extend(run.source.secure(b))
            begin(self)

        monkeypatch.setattr(GenerationLog, "begin", secured_before)
        report = run.other().settle(lease, settlement([a], rest=RELEASE))

        assert len(handed_out) == 1
        assert report.released == 2
        run.source.stop()
        assert redelivery(at.begin().take()) == {"a": (1, True), "b": (1, True)}


def test_what_others_hold_as_they_should_marks_nothing(tmp_path):
    with place(tmp_path) as at:
        at.put("a")
        at.begin().take()
        at.put("b")
        other = at.begin()
        assert redelivery(other.take()) == {"b": (1, False)}
        at.clock.advance(10.0)
        at.put("c")
        assert redelivery(other.take_more()) == {"c": (1, False)}


def test_without_a_staging_folder_the_process_counts_failures():
    with place() as at:
        at.put("a")
        for attempt in (1, 2, 3):
            run = at.begin()
            [found] = run.take()
            assert (found.attempt, found.redelivered) == (attempt, attempt > 1)
            run.settle([found], {"a": RETRY})


def test_a_dead_letter_policys_count_marks_too(tmp_path):
    with place(tmp_path) as at:
        policy = {"dead_letter_topic": at.topic, "max_delivery_attempts": 50}
        name = at.server.subscription(at.topic, dead_letter_policy=policy)
        at.put("a")
        [stranger] = at.server.pull(name)
        at.server.subscriber.modify_ack_deadline(
            subscription=name, ack_ids=[stranger.ack_id], ack_deadline_seconds=0
        )

        [found] = at.begin(subscription=name).take()

        assert (found.attempt, found.redelivered) == (1, True)
        assert found.metadata["deliveryAttempt"] == 2


# ---------------------------------------------------------------------------------- settling


def test_a_retry_comes_again_after_its_delay(tmp_path):
    with place(tmp_path) as at:
        at.put("a", "b", "c")
        run = at.begin()
        report = run.settle(run.take(), {"a": later(30.2), "b": later(60.0)})
        assert report == SettleReport(acked=1, requeued=2)
        for seconds, found in ((30.0, []), (1.0, ["a"]), (29.0, ["b"])):
            at.clock.advance(seconds)
            assert at.waiting() == found


def test_a_retry_that_is_settled_at_once_keeps_its_delay(tmp_path):
    with place(tmp_path) as at:
        at.put("a", "b")
        run = at.begin()
        a, b = run.take()
        now = run.custodian.settle_now(run.source.lease, [entry_of(a, later(60.0))])
        assert now == SettleReport(requeued=1)
        run.source.stop()
        run.source.close()
        given = replace(settlement([b]), settled_now=now)
        assert run.other().settle(run.source.lease, given) == SettleReport(acked=1)
        at.clock.advance(59.0)
        assert at.waiting() == []
        at.clock.advance(1.0)
        assert at.waiting() == ["a"]


def test_dead_letters_go_to_the_topic_of_the_policy_where_the_producer_names_none(tmp_path):
    with place(tmp_path) as at:
        dead = at.server.topic()
        grave = at.server.subscription(dead)
        policy = {"dead_letter_topic": dead, "max_delivery_attempts": 10}
        name = at.server.subscription(at.topic, dead_letter_policy=policy)
        at.put("a")
        run = at.begin(subscription=name, on_failure="dead_letter")
        found = run.take()
        verdict = Verdict(Action.DEAD_LETTER, 0.0, "bad", "process")
        assert run.settle(found, {"a": verdict}) == SettleReport(dead_lettered=1)
        [letter] = at.server.drain(grave)
        assert (letter.data, letter.attributes["broadway_reason"]) == (b"a", "bad")


def test_a_delay_that_is_too_long_is_cut_and_said(tmp_path):
    with place(tmp_path) as at:
        at.put("a")
        run = at.begin()
        report = run.settle(run.take(), {"a": later(3600.0)})
        assert report.requeued == 1
        [error] = report.errors
        assert "600 s at most" in error
        at.clock.advance(600.0)
        assert at.waiting() == ["a"]


@pytest.mark.parametrize(
    ("action", "delay"), [("nack", 0.0), (("nack", 45), 45.0), (["nack", 0], 0.0)]
)
def test_a_nack_is_by_its_own_delay_however_often(action, delay):
    with place() as at:
        at.put("a")
        run = at.begin(on_failure=action)
        [found] = run.take()
        failed = found.failed("bad")
        for attempt in (1, 50):
            facts = Facts(run.producer.on_failure, attempt, reason="bad")
            assert run.producer.judge(facts) == Verdict(Action.RETRY, delay, "bad")
        assert run.producer.verdict(failed, failed=True, stage="process").delay == delay


def test_what_is_in_no_manifest_is_given_back_at_once(tmp_path):
    with place(tmp_path) as at:
        at.put("a", "b")
        run = at.begin()
        run.take()
        report = run.custodian.settle(run.source.lease, Settlement(rest=RELEASE))
        assert report == SettleReport(released=2)
        assert sorted(at.waiting()) == ["a", "b"]


def test_settling_again_reports_the_same_and_asks_nothing(tmp_path):
    with place(tmp_path) as at:
        at.put("a", "b")
        run = at.begin()
        found = run.take()
        first = run.settle(found, {"a": RETRY})
        asked = dict(at.broker.requests)
        assert run.settle(found, {"a": RETRY}, by=run.other()) == first
        assert dict(at.broker.requests) == asked


def test_messages_settled_at_once_are_not_received_again_by_their_run(tmp_path):
    with place(tmp_path) as at:
        at.put("a", "b")
        run = at.begin()
        found = run.take()
        [a] = [each for each in found if each.data == b"a"]
        now = run.custodian.settle_now(run.source.lease, [entry_of(a, RETRY)])
        assert now == SettleReport(requeued=1)
        assert run.take() == []

        run.source.stop()
        rest = [each for each in found if each is not a]
        settled = Settlement(rest=ACK, expected=1, settled_now=now, everything=lambda: iter(()))
        assert len(rest) == 1
        assert run.custodian.settle(run.source.lease, settled).acked == 1
        assert at.waiting() == ["a"]


def test_what_is_left_over_goes_back_when_the_run_ends(tmp_path):
    with place(tmp_path) as at:
        at.put(*"abcdef")
        run = at.begin()
        run.source.receive(3, timeout=0)  # never secured
        run.source.stop()
        assert sorted(at.waiting()) == list("abcdef")[:6]


def test_what_cannot_be_read_and_comes_again_goes_back_by_its_newest_receipt(tmp_path, monkeypatch):
    with place(tmp_path) as at:
        at.put("a")
        run = at.begin()

        def unreadable(received: Any) -> None:
            raise ValueError("unreadable")

        monkeypatch.setattr(run.source._broker, "read", unreadable)
        assert run.take() == []  # put aside, for the end of the run
        at.clock.advance(601.0)
        assert run.take_more() == []  # delivered again, since its lease was over
        assert at.waiting() == []

        run.source.close()

        assert at.waiting() == ["a"]


def test_without_its_files_a_run_settles_nothing_and_all_of_it_comes_again(tmp_path):
    with place(tmp_path) as at:
        at.put("a", "b")
        run = at.begin()
        found = run.take()
        run.source.stop()
        run.source.close()
        shutil.rmtree(tmp_path / "pubsub")
        assert run.settle(found, by=run.other()).lapsed == 2
        assert at.left() == 2
        at.clock.advance(600.0)
        assert sorted(at.waiting()) == ["a", "b"]


def test_what_a_seek_delivers_again_begins_with_the_failures_on_record(tmp_path):
    with place(tmp_path, retain_acked_messages=True) as at:
        before = at.clock.now()
        at.put("a")
        first = at.begin()
        first.settle(first.take(), {"a": RETRY})
        second = at.begin()
        second.settle(second.take())
        assert at.left() == 0
        at.server.subscriber.seek(request={"subscription": at.name, "time": before})
        assert redelivery(at.begin().take()) == {"a": (2, True)}


# ---------------------------------------------------------------------------------- exactly once


def test_an_id_that_is_refused_for_good_is_lapsed_and_the_others_are_settled(tmp_path):
    with place(tmp_path, enable_exactly_once_delivery=True) as at:
        at.put(*map(str, range(10)))
        run = at.begin()
        found = run.take()
        stolen = run.source._receipts.handles[found[3].message_id]
        at.server.subscriber.modify_ack_deadline(
            subscription=at.name, ack_ids=[stolen], ack_deadline_seconds=0
        )

        report = run.settle(found)

        assert (report.acked, report.lapsed, report.failed) == (9, 1, 0)
        assert "PERMANENT_FAILURE_INVALID_ACK_ID" in report.errors[0]
        assert redelivery(at.begin().take()) == {found[3].data.decode(): (1, True)}


def test_a_full_request_may_be_refused_for_each_of_its_ids(tmp_path):
    """What is said of them is far more than gRPC takes as metadata by itself."""
    with place(tmp_path, enable_exactly_once_delivery=True) as at:
        at.put(*map(str, range(2500)))
        run = at.begin()
        found = run.take()
        at.broker.confirm = lambda _: "PERMANENT_FAILURE_INVALID_ACK_ID"

        assert run.settle(found).lapsed == 2500
        assert at.broker.requests["Acknowledge"] == 1


def test_what_is_refused_for_now_is_sent_again_and_alone(tmp_path):
    with place(tmp_path, enable_exactly_once_delivery=True) as at:
        at.put("a", "b", "c")
        run = at.begin()
        found = run.take()
        busy = [run.source._receipts.handles[found[1].message_id]] * 2
        at.broker.confirm = lambda ack_id: (
            "TRANSIENT_FAILURE_OTHER" if ack_id in busy and busy.pop() else None
        )

        assert run.settle(found) == SettleReport(acked=3)

        assert at.broker.requests["Acknowledge"] == 3
        assert at.broker.entries["Acknowledge"] == 3 + 1 + 1
        assert at.left() == 0


def test_what_is_void_after_it_was_refused_for_now_has_lapsed(tmp_path):
    """Pub/Sub said of each time that it had not acknowledged it."""
    with place(tmp_path, enable_exactly_once_delivery=True) as at:
        at.put("a", "b")
        run = at.begin()
        found = run.take()
        lapsed = run.source._receipts.handles[found[1].message_id]
        words = ["PERMANENT_FAILURE_INVALID_ACK_ID", "TRANSIENT_FAILURE_OTHER"]
        at.broker.confirm = lambda ack_id: words.pop() if ack_id == lapsed else None

        report = run.settle(found)

        assert (report.acked, report.lapsed, report.failed) == (1, 1, 0)
        assert at.left() == 1


def test_an_answer_that_was_lost_before_one_was_refused_for_now_makes_no_lapse(tmp_path):
    with place(tmp_path, enable_exactly_once_delivery=True) as at:
        at.put("a")
        run = at.begin()
        found = run.take()
        lost = [Refused("UNAVAILABLE", "connection reset", done=True)]
        at.broker.answer = lambda call, _: lost.pop() if call == "Acknowledge" and lost else None
        words = [None, "TRANSIENT_FAILURE_OTHER", "PERMANENT_FAILURE_INVALID_ACK_ID"]
        at.broker.confirm = lambda _: words[at.broker.requests["Acknowledge"] - 1]

        assert run.settle(found) == SettleReport(acked=1)


def test_an_answer_that_was_lost_does_not_make_what_was_done_a_lapse(tmp_path):
    with place(tmp_path, enable_exactly_once_delivery=True) as at:
        at.put("a", "b")
        run = at.begin()
        found = run.take()
        lost = [Refused("UNAVAILABLE", "connection reset", done=True)]
        at.broker.answer = lambda call, _: lost.pop() if call == "Acknowledge" and lost else None
        again = "PERMANENT_FAILURE_INVALID_ACK_ID"
        at.broker.confirm = lambda _: again if at.broker.requests["Acknowledge"] > 1 else None

        assert run.settle(found) == SettleReport(acked=2)

        assert at.broker.requests["Acknowledge"] == 2
        assert at.left() == 0


def test_what_a_killed_settlement_had_acknowledged_is_no_lapse_and_what_it_never_asked_for_is(
    tmp_path, monkeypatch
):
    """It was killed between its first request and the note of that."""
    with place(tmp_path, enable_exactly_once_delivery=True) as at:
        at.put(*map(str, range(5000)))
        run = at.begin()
        found = run.take()
        client = run.custodian._broker.client
        acknowledge = client.remove
        void: list[str] = []

        def killed(ids: list[str]) -> None:
            void.extend(ids)
            acknowledge(ids)
            raise KeyboardInterrupt

        monkeypatch.setattr(client, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            run.settle(found)
        assert at.left() == len(void) == 2500
        run.source.close()
        never = next(each for each in at.broker.subscriptions[at.name].flying if each not in void)
        gone = {*void, never}
        at.broker.confirm = lambda each: (
            "PERMANENT_FAILURE_INVALID_ACK_ID" if each in gone else None
        )

        report = run.settle(found, by=run.other())

        assert (report.acked, report.lapsed, report.failed) == (4999, 1, 0)


def test_a_settlement_that_was_killed_between_waves_asks_for_the_rest_alone(tmp_path, monkeypatch):
    with place(tmp_path, enable_exactly_once_delivery=True) as at:
        at.put(*map(str, range(5000)))
        run = at.begin()
        found = run.take()
        client = run.custodian._broker.client
        acknowledge = client.remove

        def once(ids: list[str]) -> dict[str, str]:
            monkeypatch.setattr(client, "remove", killed)
            return dict(acknowledge(ids))

        def killed(ids: list[str]) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(client, "remove", once)
        with pytest.raises(KeyboardInterrupt):
            run.settle(found)
        assert at.left() == 2500
        run.source.close()
        at.broker.entries.clear()

        assert run.settle(found, by=run.other()) == SettleReport(acked=5000)

        assert at.broker.entries["Acknowledge"] == 2500
        assert at.left() == 0


def test_an_acknowledgement_of_which_nobody_knows_marks_what_comes_again(tmp_path):
    """An id that is void at the second try was acknowledged by the first, or taken away."""
    with place(tmp_path, enable_exactly_once_delivery=True) as at:
        at.put("a")
        run = at.begin()
        found = run.take()
        lost = [Refused("UNAVAILABLE", "connection reset")]
        at.broker.answer = lambda call, _: lost.pop() if call == "Acknowledge" and lost else None
        at.broker.confirm = lambda ack_id: "PERMANENT_FAILURE_INVALID_ACK_ID"
        assert run.settle(found) == SettleReport(acked=1)
        at.broker.confirm = lambda ack_id: None
        at.clock.advance(600.0)
        assert redelivery(at.begin().take()) == {"a": (1, True)}


def test_a_message_that_is_taken_away_while_a_lease_is_renewed_is_marked_elsewhere(
    tmp_path, caplog
):
    with place(tmp_path, enable_exactly_once_delivery=True) as at:
        at.put("a", "b")
        run = at.begin()
        found = run.take()
        ids = run.source._receipts.handles
        at.server.subscriber.modify_ack_deadline(
            subscription=at.name, ack_ids=[ids[found[0].message_id]], ack_deadline_seconds=0
        )
        at.clock.advance(300.0)

        with caplog.at_level(logging.ERROR):
            assert run.custodian.renew(run.source.lease) is not None

        assert "holds 1 of 2 messages no longer" in caplog.text
        assert redelivery(at.begin().take()) == {"a": (1, True)}
        at.clock.advance(300.0)
        at.broker.entries.clear()
        assert run.custodian.renew(run.source.lease) is not None
        assert at.broker.entries["ModifyAckDeadline"] == 1  # the void id is not asked for again
        report = run.settle(found)
        assert (report.acked, report.lapsed) == (1, 1)


# ---------------------------------------------------------------------------------- trouble


def test_a_short_outage_is_waited_out(tmp_path):
    with place(tmp_path) as at:
        at.put("a")
        run = at.begin()
        down = [Refused("UNAVAILABLE", "down")] * 3
        at.broker.answer = lambda call, _: down.pop() if down else None
        found = run.take()
        assert len(found) == 1
        down += [Refused("INTERNAL", "oops")] * 3
        assert run.settle(found) == SettleReport(acked=1)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("UNAVAILABLE", "cannot be reached for Acknowledge"),
        ("RESOURCE_EXHAUSTED", "throttles Acknowledge on .*, a quota is used up"),
        ("UNAUTHENTICATED", "does not accept the credentials for Acknowledge"),
    ],
)
def test_an_outage_that_lasts_ends_a_settlement_which_goes_on_when_it_is_over(
    code, words, tmp_path
):
    with place(tmp_path) as at:
        at.put("a", "b")
        run = at.begin()
        found = run.take()
        at.broker.answer = lambda call, _: Refused(code, "down")
        with pytest.raises(ProducerUnavailable, match=words):
            run.settle(found)
        at.broker.answer = lambda call, _: None
        assert run.settle(found, by=run.other()) == SettleReport(acked=2)


@pytest.mark.parametrize("code", ["DEADLINE_EXCEEDED", "UNAVAILABLE"])
def test_what_a_lost_answer_brought_comes_again_by_the_subscriptions_own_deadline(code, tmp_path):
    with place(tmp_path, ack_deadline_seconds=20) as at:
        at.put("a")
        lost = [Refused(code, "too late", done=True)]
        at.broker.answer = lambda call, _: lost.pop() if call == "Pull" and lost else None

        assert at.begin().take() == []

        assert lost == []
        assert at.begin().take() == []
        at.clock.advance(20.0)
        # Nobody has seen it.
        assert redelivery(at.begin().take()) == {"a": (1, False)}


def test_one_id_that_pubsub_does_not_take_does_not_fail_the_others(tmp_path):
    with place(tmp_path) as at:
        at.put(*map(str, range(20)))
        run = at.begin()
        found = run.take()
        run.source._receipts.handles[found[7].message_id] = "nonsense"
        report = run.settle(found)
        assert (report.acked, report.failed) == (19, 1)
        assert at.left() == 1


def test_each_pull_is_told_as_a_span(tmp_path):
    seen: list[tuple[str, dict[str, Any]]] = []
    events = [f"pubsub.receive_messages.{end}" for end in ("start", "stop", "exception")]
    handler = telemetry.attach(
        lambda event, _, metadata: seen.append((event, dict(metadata))), events=events
    )
    try:
        with place(tmp_path) as at:
            at.put("a")
            run = at.begin()
            assert len(run.source.receive(1, timeout=0)) == 1
            denied = Refused("PERMISSION_DENIED", "User not authorized to perform this action.")
            at.broker.answer = lambda call, _: denied if call == "Pull" else None
            with pytest.raises(ProducerError):
                run.source.receive(7, timeout=0)
            at.broker.answer = lambda *_: None
    finally:
        telemetry.detach(handler)

    ends = [event.rpartition(".")[2] for event, _ in seen]
    assert ends == ["start", "stop", "start", "exception"]
    first, found, second, _ = [metadata for _, metadata in seen]
    shown = {"name", "demand", "max_messages"}
    assert set(first) - {"telemetry_span_context"} == shown
    assert (first["demand"], second["demand"]) == (1, 7)
    assert len(found["messages"]) == 1
