"""Settlement cases beyond moto: refused receipts, partial failures, throttling, duplicates."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kit.generation_log import GenerationLog
from tests.fake_sqs import URL, FakeSqs, client_error
from tests.unit.producers.halves import DEAD, renewed
from tests.unit.producers.sqs.kit import FIFO, SqsHalves, halves, options, settlement

RETRY = Verdict(Action.RETRY, 30.0, "later", "process")


def failed(entries: list[dict[str, Any]], code: str, *, fault: bool = False) -> dict[str, Any]:
    """Returns an answer in which the last entry failed."""
    *done, bad = [{"Id": entry["Id"]} for entry in entries]
    refusal = {**bad, "Code": code, "Message": "no", "SenderFault": fault}
    return {"Successful": done, "Failed": [refusal]}


def fail_last(fake: FakeSqs, code: str, times: int, *, fault: bool = False) -> None:
    """Fails the last entry of the next delete requests."""
    answers = [code] * times
    fake.answers(
        "DeleteMessage",
        lambda request: failed(request["Entries"], answers.pop(), fault=fault) if answers else None,
    )


# --------------------------------------------------------------------------- entries that fail


@pytest.mark.parametrize(
    ("code", "fault"), [("InternalError", False), ("RequestThrottled", True), ("Odd", False)]
)
def test_transient_entry_failure_is_retried_alone(code, fault, run):
    messages = run.take_new([*map(str, range(3))])
    fail_last(run.fake, code, 2, fault=fault)
    began = run.clock.monotonic()

    report = run.settle(messages)

    assert report == SettleReport(acked=3)
    assert run.fake.log is not None
    sizes = [
        len(request["Entries"]) for action, request in run.fake.log if action == "DeleteMessage"
    ]
    assert sizes == [3, 1, 1]
    assert run.clock.monotonic() > began  # after a delay


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        ("InternalError", {"released": 1}),
        (None, {"released": 1}),
        ("RequestThrottled", {"lapsed": 1}),  # nothing was done
    ],
)
def test_unconfirmed_release_is_no_lapse(code, counts, run):
    messages = run.take_new(["a"])
    codes = ["AWS.SimpleQueueService.MessageNotInflight", code]

    def answer(request: dict[str, Any]) -> Any:
        failure = codes.pop()
        silent: dict[str, Any] = {"Successful": [], "Failed": []}
        return failed(request["Entries"], failure) if failure else silent

    run.fake.answers("ChangeMessageVisibility", answer)

    report = run.settle(messages, {"a": RELEASE})

    assert replace(report, errors=()) == SettleReport(**counts)
    assert codes == []


def test_persistent_entry_failure_is_reported_and_redelivered(run):
    messages = run.take_new(["a"])
    fail_last(run.fake, "InternalError", 1000)

    report = run.settle(messages)

    assert (report.acked, report.failed) == (0, 1)
    assert report.errors == ("InternalError: no",)
    assert run.fake.requests["DeleteMessage"] == 6
    assert run.fake.left() == 1


@pytest.mark.parametrize(
    ("code", "counts", "error"),
    [
        ("KmsAccessDenied", {"failed": 1}, "KmsAccessDenied: no"),
        (
            "ReceiptHandleIsInvalid",
            {"lapsed": 1},
            "SQS holds messages no longer for this run (ReceiptHandleIsInvalid): they are delivered"
            " again, marked as redelivered",
        ),
    ],
)
def test_sender_fault_is_refused_without_retry(code, counts, error, run):
    messages = run.take_new(["a", "b"])
    fail_last(run.fake, code, 1000, fault=True)

    report = run.settle(messages)

    assert report == SettleReport(acked=1, **counts, errors=(error,))
    assert run.fake.requests["DeleteMessage"] == 1


def test_message_leased_elsewhere_is_lapsed(run):
    messages = run.take_new(["a", "b", "c"])
    for message in messages[1:]:
        run.fake.queue().known[message.message_id].receipt = "another's"

    report = run.settle(messages, {"b": RETRY, "c": RELEASE})

    assert (report.acked, report.lapsed) == (1, 2)
    assert (report.requeued, report.released) == (0, 0)


# ------------------------------------------------------------------------- requests that fail


def test_denied_action_does_not_block_others(run):
    messages = run.take_new([*map(str, range(40))])
    denied = client_error("AccessDenied", "User: arn:… is not authorized", status=403)
    run.fake.answers("ChangeMessageVisibility", denied)

    report = run.settle(messages, {str(number): RELEASE for number in range(25)})

    assert (report.acked, report.failed, report.total) == (15, 25, 40)
    [error] = report.errors
    assert "allow sqs:ChangeMessageVisibility" in error
    assert "arn:" not in error
    assert run.fake.requests["ChangeMessageVisibility"] == 1


@options(staged=True, dead_letter="orders-dead")
def test_outage_leaves_settlement_repeatable(run):
    messages = run.take_new([*map(str, range(5))])
    run.fake.answers("DeleteMessage", client_error("ServiceUnavailable", status=503))
    verdicts = {"0": DEAD, "1": RETRY}
    with pytest.raises(ProducerUnavailable, match="just now"):
        run.settle(messages, verdicts)
    assert run.fake.left() == 5

    run.fake.obey()
    run.source.close()
    report = run.settle(messages, verdicts, by=run.other())

    assert report == SettleReport(acked=3, requeued=1, dead_lettered=1)
    # Sent before its original was deleted, the dead letter exists twice, with one id.
    sent = run.fake.queue(URL + "-dead").sent
    ids = [letter["MessageAttributes"]["broadway_message_id"]["StringValue"] for letter in sent]
    assert ids == [messages[0].message_id] * 2
    assert run.settle(messages, verdicts, by=run.other()) == report


@options(staged=True)
def test_repeated_settlement_removes_leftover_files(tmp_path, run):
    messages = run.take_new(["a", "b"])
    run.source.close()
    with (
        patch.object(GenerationLog, "keep_report", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        run.settle(messages, by=run.other())

    assert run.settle(messages, by=run.other()) == SettleReport(acked=2)

    left = {path.name for path in tmp_path.rglob("*.json")}
    [ended] = {path.name for path in tmp_path.glob("**/ended/*/*.json")}
    assert left == {"settled.json", ended}


# --------------------------------------------------------------------------------- receipts


def test_duplicate_in_one_receive_is_settled_by_newer_receipt(run):
    run.fake.put(["a"])

    def twice(_: object) -> Any:
        run.fake.obey()
        return {"Messages": [run.fake.receive(timeout=0), run.fake.receive()]}

    run.fake.answers("ReceiveMessage", twice)
    messages = run.take()

    assert [message.data for message in messages] == [b"a"]
    assert run.settle(messages) == SettleReport(acked=1)
    assert run.fake.left() == 0


@options(staged=True)
def test_redelivery_within_run_is_handled_once(run):
    messages = run.take_new(["a", "b"])
    # SQS makes one visible too early; the run receives it again.
    early = run.fake.queue().known[messages[0].message_id]
    early.visible = -1.0
    run.fake.queue().ready.append(early)
    run.clock.advance(10.0)

    assert run.take() == []

    run.source.close()
    assert run.settle(messages, by=run.other()) == SettleReport(acked=2)
    assert run.fake.left() == 0


def test_lapse_is_decided_by_own_clock(run):
    messages = run.take_new(["a"])
    run.clock.advance(600.0)

    assert not run.custodian.holds(run.source.lease)
    assert run.renew() is None
    assert run.settle(messages) == SettleReport(lapsed=1)
    assert run.fake.requests["DeleteMessage"] == 0


@options(staged=True)
def test_refused_renewal_lapses_one_message(run):
    messages = run.take_new(["a", "b", "c"])
    run.clock.advance(300.0)
    run.fake.queue().known[messages[1].message_id].receipt = "another's"

    lease = renewed(run.custodian, run.source.lease)

    run.source.close()
    run.clock.advance(300.0)
    renewed(run.other(), lease)
    assert run.fake.entries["ChangeMessageVisibility"] == 5  # without the lost one
    report = run.other().settle(lease, settlement(messages))
    assert (report.acked, report.lapsed) == (2, 1)


@pytest.mark.parametrize("early", [0, 1])
def test_refused_renewal_of_all_ends_the_lease_unless_verdicts_are_to_be_counted(early, run):
    messages = run.take_new(["a", "b"])
    run.settle_now(messages[:early], ACK)
    run.clock.advance(300.0)
    for message in messages[early:]:
        run.fake.queue().known[message.message_id].receipt = "another's"

    assert (run.renew() is None) is (not early)


def test_unstaged_message_is_released(run):
    messages = run.take_new(["a", "b", "c"])

    assert run.settle(messages[:2]) == SettleReport(acked=2, released=1)
    assert run.fake.waiting() == ["c"]


# ------------------------------------------------------------------------- delays and dead letters


@options(lease=43_200.0)
def test_delay_is_cut_to_remaining_twelve_hours(run):
    messages = run.take_new(["a"])
    run.clock.advance(42_000.0)

    report = run.settle(messages, {"a": RETRY._replace(delay=3600.0)})

    assert (report.requeued, report.failed) == (1, 0)
    assert "cut to the 1,199 s that remained" in report.errors[0]
    run.clock.advance(1200.0)
    assert run.fake.waiting() == ["a"]


@options(dead_letter="orders-dead")
def test_refused_dead_letter_keeps_message(run):
    messages = run.take_new(["a", "b"])
    run.fake.answers(
        "SendMessage", lambda request: failed(request["Entries"][::-1], "TooLong", fault=True)
    )

    report = run.settle(messages, {"a": DEAD, "b": DEAD})

    assert (report.dead_lettered, report.failed, report.lapsed) == (1, 1, 0)
    assert report.errors == ("SendMessage: TooLong: no",)
    assert [message.body for message in run.fake.queue().known.values()] == ["a"]


def test_state_files_do_not_accumulate(tmp_path):
    staging = f"file://{tmp_path}"

    def files() -> set[str]:
        return {path.name for path in tmp_path.rglob("*.json")}

    with halves(staging) as run:
        fake = run.fake
        fake.put([str(number) for number in range(30)])
        messages = run.take()
        assert "receipts-000000.json" in files()
        run.settle(messages, {"1": RETRY})
        left = [path for path in tmp_path.rglob("*.json") if path.parent.name != "attempts"]
        assert "settled.json" in {path.name for path in left}
        assert len(left) == 2  # and its removal date
    with halves(staging, fake=fake) as empty:
        empty.settle([])
        assert len(files()) == 3  # none of an empty run
    fake.clock.sleep(20 * 86_400.0)

    with halves(staging, fake=fake) as later:
        assert len(later.take()) == 1

    assert files() == {"receipts-000000.json"}


def test_without_staging_folder_receives_count_as_attempts():
    with halves() as first:
        first.settle(first.take_new(["a"]), rest=RELEASE)
    with halves(fake=first.fake) as second:
        assert [message.attempt for message in second.take()] == [2]


@options(staged=True)
def test_early_verdict_before_outage_is_recorded(run):
    # Given two early verdicts, of which the second is not answered
    messages = run.take_new(["a", "b", "c"])
    run.fake.answers("ChangeMessageVisibility", client_error("RequestThrottled", status=400))
    both = list(settlement(messages, {"a": ACK, "b": RETRY}).entries())
    with pytest.raises(ProducerUnavailable):
        run.custodian.settle_now(run.source.lease, both)

    # When the callback fails, and every message gets its final verdict
    run.fake.obey()
    rest = replace(settlement(messages, {"a": RETRY, "b": RETRY}), settled_now=SettleReport())
    report = run.custodian.settle(run.source.lease, rest)

    # Then the early verdict counts
    assert report == SettleReport(acked=2, requeued=1)


def test_lost_delete_answer_counts_as_acked(run):
    # Given an early verdict that SQS executes, with a lost answer
    messages = run.take_new(["a", "b"])

    def lose(request: dict[str, Any]) -> Any:
        run.fake.obey()
        run.fake.delete_message_batch(**request)
        return client_error("ServiceUnavailable", status=503)

    run.fake.answers("DeleteMessage", lose)
    with pytest.raises(ProducerUnavailable):
        run.settle_now(messages[:1], ACK)

    # When the callback fails, and its message is to be retried
    report = run.settle(messages, {"a": RETRY})

    # Then the report counts the deletion
    assert report == SettleReport(acked=2)
    assert run.fake.left() == 0


# ----------------------------------------------------------------------------------------- FIFO


def next_bodies(run: SqsHalves) -> list[str]:
    """Receives by another generation; returns the bodies in order."""
    with halves(fake=run.fake, queue_url=FIFO) as heir:
        return [message.data.decode() for message in heir.take()]


def take_groups(run: SqsHalves) -> list[Message]:
    """Sends and receives ``x1 y1 x2 y2 x3``, in the groups x and y."""
    for body in ("x1", "y1", "x2", "y2", "x3"):
        run.fake.put([body], url=FIFO, group=body[0])
    return run.take()


@options(queue_url=FIFO, on_failure="retry", dead_letter="dead.fifo")
def test_retry_blocks_later_messages_of_group(run):
    messages = take_groups(run)
    assert len(messages) == 5

    report = run.settle(messages, {"x1": RETRY})

    assert (report.acked, report.requeued, report.released) == (2, 1, 2)
    assert next_bodies(run) == []  # the group waits for x1
    run.clock.advance(30.0)
    assert next_bodies(run) == ["x1", "x2", "x3"]


@options(queue_url=FIFO)
def test_early_retry_blocks_later_portions(run):
    messages = take_groups(run)
    run.settle_now([m for m in messages if m.data == b"x1"], RETRY)

    report = run.settle([m for m in messages if m.data != b"x1"])

    assert (report.acked, report.released) == (2, 2)


@options(staged=True, queue_url=FIFO)
def test_early_verdicts_of_several_processes_keep_order(run):
    """Messages behind a released one are released; those before it are finished."""
    messages = {message.data.decode(): message for message in take_groups(run)}
    run.source.close()
    reports = []
    for body, verdict in (("x2", RETRY), ("x1", ACK), ("x3", ACK)):
        with closing(run.other()) as batcher:
            entries = [entry_of(messages[body], verdict)]
            reports.append(batcher.settle_now(run.source.lease, entries))

    assert [(report.acked, report.released) for report in reports] == [(0, 0), (1, 0), (0, 1)]
    assert run.settle([messages["y1"], messages["y2"]], by=run.other()).acked == 2
    run.clock.advance(30.0)
    assert next_bodies(run) == ["x2", "x3"]


# ------------------------------------------------------------------------------- late outcomes


@options(staged=True)
def test_killed_release_is_completed_despite_later_outcome(run):
    messages = run.take_new(["a", "b", "c"])

    # FakeSqs raises it, as a kill would
    run.fake.answers("ChangeMessageVisibility", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run.settle(messages, {"b": RELEASE})
    run.fake.obey()

    # Its outcome is published later, and another process settles by it
    report = run.settle(messages, by=run.other())

    assert report == SettleReport(acked=2, released=1)
    assert report.again is not None
    assert [m.data for m in messages if report.again.has(m.message_id)] == [b"b"]
    assert run.fake.left() == 1
    assert run.settle(messages, by=run.other()).again == report.again
