"""What moto cannot show: refused receipts, partial failures, throttling, duplicates."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.kit.generation_log import GenerationLog
from tests.fake_sqs import URL, FakeSqs, client_error
from tests.unit.producers.sqs.kit import FIFO, SqsHalves, halves, options, settlement, take

RETRY = Verdict(Action.RETRY, 30.0, "later", "process")
DEAD = Verdict(Action.DEAD_LETTER, 0.0, "bad", "process")


def failing(code: str, times: int, *, fault: bool = False) -> Any:
    """An answer that fails the second entry of a delete request so many times."""
    left = [times]

    def answer(asked: str, arguments: dict[str, Any]) -> Any:
        if asked != "DeleteMessage" or not left[0]:
            return None
        left[0] -= 1
        entries = arguments["Entries"]
        bad = entries[1 if len(entries) > 1 else 0]["Id"]
        return {
            "Successful": [{"Id": each["Id"]} for each in entries if each["Id"] != bad],
            "Failed": [{"Id": bad, "Code": code, "Message": "no", "SenderFault": fault}],
        }

    return answer


# --------------------------------------------------------------------------- entries that fail


@pytest.mark.parametrize(
    ("code", "fault"), [("InternalError", False), ("RequestThrottled", True), ("Odd", False)]
)
def test_transient_entry_failure_is_retried_alone(code, fault, run):
    messages = run.take_new([str(number) for number in range(3)])
    run.fake.answer = failing(code, 2, fault=fault)
    began = run.clock.monotonic()

    report = run.settle(messages)

    assert report == SettleReport(acked=3)
    assert run.fake.log is not None
    sizes = [len(each["Entries"]) for action, each in run.fake.log if action == "DeleteMessage"]
    assert sizes == [3, 1, 1]
    assert run.clock.monotonic() > began  # it was waited for


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        ("InternalError", {"released": 1}),
        (None, {"released": 1}),
        ("RequestThrottled", {"lapsed": 1}),  # nothing was done then
    ],
)
def test_unconfirmed_release_is_no_lapse(code, counts, run):
    messages = run.take_new(["a"])
    said = [code, "AWS.SimpleQueueService.MessageNotInflight"]

    def answer(asked: str, arguments: dict[str, Any]) -> Any:
        if asked != "ChangeMessageVisibility":
            return None
        word = said.pop(0)
        entries = [] if word is None else arguments["Entries"]
        failed = [{"Id": each["Id"], "Code": word, "SenderFault": False} for each in entries]
        return {"Successful": [], "Failed": failed}

    run.fake.answer = answer

    report = run.settle(messages, {"a": RELEASE})

    assert replace(report, errors=()) == SettleReport(**counts)
    assert said == []


def test_persistent_entry_failure_is_reported_and_redelivered(run):
    messages = run.take_new(["a"])
    run.fake.answer = failing("InternalError", 1000)

    report = run.settle(messages)

    assert (report.acked, report.failed) == (0, 1)
    assert report.errors == ("InternalError: no",)
    assert run.fake.requests["DeleteMessage"] == 6
    assert run.fake.left() == 1


@pytest.mark.parametrize(
    ("code", "counts", "told"),
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
def test_sender_fault_is_refused_without_retry(code, counts, told, run):
    messages = run.take_new(["a", "b"])
    run.fake.answer = failing(code, 1000, fault=True)

    report = run.settle(messages)

    assert report == SettleReport(acked=1, **counts, errors=(told,))  # type: ignore[arg-type]
    assert run.fake.requests["DeleteMessage"] == 1


def test_message_leased_elsewhere_is_lapsed(run):
    messages = run.take_new(["a", "b", "c"])
    for message in messages[1:]:
        run.fake.queue().known[message.message_id].receipt = "another's"
    verdicts = {"b": RETRY, "c": RELEASE}

    report = run.settle(messages, verdicts)

    assert (report.acked, report.lapsed) == (1, 2)
    assert (report.requeued, report.released) == (0, 0)


# ------------------------------------------------------------------------- requests that fail


def test_denied_action_does_not_block_others(run):
    messages = run.take_new([str(number) for number in range(40)])
    run.fake.answers(
        "ChangeMessageVisibility",
        client_error("AccessDenied", "User: arn:… is not authorized", status=403),
    )
    verdicts = {str(number): RELEASE for number in range(25)}

    report = run.settle(messages, verdicts)

    assert (report.acked, report.failed, report.total) == (15, 25, 40)
    [error] = report.errors
    assert "allow sqs:ChangeMessageVisibility" in error
    assert "arn:" not in error
    assert run.fake.requests["ChangeMessageVisibility"] == 1


@options(staged=True, dead_letter="orders-dead")
def test_outage_leaves_settlement_repeatable(run):
    messages = run.take_new([str(number) for number in range(5)])
    run.fake.answers("DeleteMessage", client_error("ServiceUnavailable", status=503))
    verdicts = {"0": DEAD, "1": RETRY}
    with pytest.raises(ProducerUnavailable, match="just now"):
        run.settle(messages, verdicts)
    assert run.fake.left() == 5

    run.fake.answer = lambda *_: None
    run.source.close()
    report = run.settle(messages, verdicts, by=run.other())

    assert report == SettleReport(acked=3, requeued=1, dead_lettered=1)
    # Sent before its original was deleted, the dead letter is there twice, with one id.
    sent = run.fake.queue(URL + "-dead").sent
    ids = [each["MessageAttributes"]["broadway_message_id"]["StringValue"] for each in sent]
    assert ids == [messages[0].message_id] * 2
    assert run.settle(messages, verdicts, by=run.other()) == report


@options(staged=True)
def test_repeated_settlement_removes_leftover_files(tmp_path, monkeypatch, run):
    messages = run.take_new(["a", "b"])
    lease, asked = run.source.lease, settlement(messages, {})
    run.source.close()
    with monkeypatch.context() as patched:

        def killed(*_: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr(GenerationLog, "keep_report", killed)
        with pytest.raises(KeyboardInterrupt):
            run.other().settle(lease, asked)

    assert run.other().settle(lease, asked) == SettleReport(acked=2)

    left = {path.name for path in tmp_path.rglob("*.json")}
    [ended] = {path.name for path in tmp_path.glob("**/ended/*/*.json")}
    assert left == {"settled.json", ended}


# --------------------------------------------------------------------------------- receipts


def test_duplicate_in_one_receive_is_settled_by_newer_receipt(run):
    run.fake.put(["a"])
    held = run.fake.queue().ready[0]

    def twice(action: str, _: dict[str, Any]) -> Any:
        if action != "ReceiveMessage":
            return None
        run.fake.answer = lambda *_: None
        [first] = run.fake.receive_message(
            QueueUrl=URL, MaxNumberOfMessages=1, VisibilityTimeout=0
        )["Messages"]
        [second] = run.fake.receive_message(
            QueueUrl=URL, MaxNumberOfMessages=1, VisibilityTimeout=600
        )["Messages"]
        return {"Messages": [first, second]}

    run.fake.answer = twice
    messages = run.take()

    assert [message.data for message in messages] == [b"a"]
    report = run.settle(messages)
    assert report == SettleReport(acked=1)
    assert held.key not in run.fake.queue().known


@options(staged=True)
def test_redelivery_within_run_is_handled_once(run):
    messages = run.take_new(["a", "b"])
    # SQS makes one visible too early, as it may; the run receives it again.
    held = run.fake.queue().known[messages[0].message_id]
    held.visible = -1.0
    run.fake.queue().ready.append(held)
    run.clock.advance(10.0)

    assert run.take() == []

    run.source.close()
    report = run.settle(messages, by=run.other())
    assert report == SettleReport(acked=2)
    assert run.fake.left() == 0


def test_lapse_is_decided_by_own_clock(run):
    messages = run.take_new(["a"])
    lease = run.source.lease
    run.clock.advance(600.0)

    assert not run.custodian.holds(lease)
    assert run.custodian.renew(lease) is None
    report = run.settle(messages)

    assert report == SettleReport(lapsed=1)
    assert run.fake.requests["DeleteMessage"] == 0


@options(staged=True)
def test_refused_renewal_lapses_one_message(run):
    messages = run.take_new(["a", "b", "c"])
    lease = run.source.lease
    run.clock.advance(300.0)
    run.fake.queue().known[messages[1].message_id].receipt = "another's"

    renewed = run.custodian.renew(lease)

    assert renewed is not None
    run.source.close()
    run.clock.advance(300.0)
    assert run.other().renew(renewed) is not None
    assert run.fake.entries["ChangeMessageVisibility"] == 5  # the lost one is not asked for
    report = run.other().settle(renewed, settlement(messages))
    assert (report.acked, report.lapsed) == (2, 1)


def test_unstaged_message_is_released(run):
    messages = run.take_new(["a", "b", "c"])

    report = run.settle(messages[:2])

    assert report == SettleReport(acked=2, released=1)
    assert run.fake.waiting() == ["c"]


# ----------------------------------------------------------------------------------- the rest


@options(lease=43_200.0)
def test_delay_is_cut_to_remaining_twelve_hours(run):
    messages = run.take_new(["a"])
    run.clock.advance(42_000.0)
    verdicts = {"a": Verdict(Action.RETRY, 3600.0, "later", "process")}

    report = run.settle(messages, verdicts)

    assert (report.requeued, report.failed) == (1, 0)
    assert "cut to the 1,199 s that remained" in report.errors[0]
    run.clock.advance(1200.0)
    assert run.fake.waiting() == ["a"]


@options(dead_letter="orders-dead")
def test_refused_dead_letter_keeps_message(run):
    messages = run.take_new(["a", "b"])
    run.fake.answers(
        "SendMessage",
        {
            "Successful": [{"Id": "1"}],
            "Failed": [
                {
                    "Id": "0",
                    "Code": "InvalidParameterValue",
                    "Message": "too long",
                    "SenderFault": True,
                }
            ],
        },
    )

    report = run.settle(messages, {"a": DEAD, "b": DEAD})

    assert (report.dead_lettered, report.failed, report.lapsed) == (1, 1, 0)
    assert report.errors == ("SendMessage: InvalidParameterValue: too long",)
    assert [held.body for held in run.fake.queue().known.values()] == ["a"]


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
        assert len(left) == 2  # and that it may be removed later
    with halves(staging, fake=fake) as empty:
        empty.settle([])
        assert len(files()) == 3  # an empty run leaves nothing
    fake.clock.sleep(20 * 86_400.0)

    with halves(staging, fake=fake) as later:
        assert len(later.take()) == 1

    assert files() == {"receipts-000000.json"}


def test_without_staging_folder_receives_count_as_attempts():
    with halves() as first:
        fake = first.fake
        fake.put(["a"])
        messages = first.take()
        first.settle(messages, rest=RELEASE)

    with halves(fake=fake) as second:
        [again] = second.take()

    assert again.attempt == 2


def test_early_release_waits_for_end_of_run(run):
    messages = run.take_new(["a"])
    run.custodian.settle_now(run.source.lease, list(settlement(messages, {"a": RELEASE}).entries()))

    assert run.take() == []

    assert run.fake.requests["ReceiveMessage"] < 10  # received once, and kept
    run.source.close()
    assert run.fake.waiting() == ["a"]


@options(staged=True)
def test_early_verdict_before_outage_is_recorded(run):
    # Given two verdicts at once, of which the second is not answered
    messages = run.take_new(["a", "b", "c"])
    run.fake.answers("ChangeMessageVisibility", client_error("RequestThrottled", status=400))
    both = list(settlement(messages, {"a": ACK, "b": RETRY}).entries())
    with pytest.raises(ProducerUnavailable):
        run.custodian.settle_now(run.source.lease, both)

    # When the callback that heard of it has failed, and each gets its verdict in the end
    run.fake.answer = lambda action, _: None
    rest = replace(settlement(messages, {"a": RETRY, "b": RETRY}), settled_now=SettleReport())
    report = run.custodian.settle(run.source.lease, rest)

    # Then what was done counts for what it was
    assert report == SettleReport(acked=2, requeued=1)


def test_lost_delete_answer_counts_as_acked(run):
    # Given a verdict at once that SQS carries out, and whose answer is lost
    messages = run.take_new(["a", "b"])

    def lose(action: str, arguments: dict[str, Any]) -> Any:
        if action != "DeleteMessage":
            return None
        run.fake.answer = lambda *_: None
        run.fake.delete_message_batch(**arguments)
        return client_error("ServiceUnavailable", status=503)

    run.fake.answer = lose
    now = list(settlement(messages, {"a": ACK}).entries())
    with pytest.raises(ProducerUnavailable):
        run.custodian.settle_now(run.source.lease, now)

    # When the callback that heard of it fails, and its message is to be retried
    report = run.settle(messages, {"a": RETRY})

    # Then the report says what became of it
    assert report == SettleReport(acked=2)
    assert run.fake.left() == 0


# ----------------------------------------------------------------------------------------- FIFO


def fifo(run: SqsHalves) -> list[str]:
    """The bodies that come next, in order."""
    with halves(fake=run.fake, queue_url=FIFO) as heir:
        return [message.data.decode() for message in take(heir.source)]


def in_groups(fake: FakeSqs) -> None:
    for body in ("x1", "y1", "x2", "y2", "x3"):
        fake.put([body], url=FIFO, group=body[0])


@options(queue_url=FIFO, on_failure="retry", dead_letter="dead.fifo")
def test_retry_blocks_later_messages_of_group(run):
    in_groups(run.fake)
    messages = run.take()
    assert len(messages) == 5

    report = run.settle(messages, {"x1": RETRY})

    assert (report.acked, report.requeued, report.released) == (2, 1, 2)
    assert fifo(run) == []  # the group waits for its first
    run.clock.advance(30.0)
    assert fifo(run) == ["x1", "x2", "x3"]


@options(queue_url=FIFO)
def test_early_retry_blocks_later_portions(run):
    in_groups(run.fake)
    messages = run.take()
    by_body = {message.data.decode(): message for message in messages}
    first = list(settlement([by_body["x1"]], {"x1": RETRY}).entries())
    run.custodian.settle_now(run.source.lease, first)

    report = run.settle([m for m in messages if m.data != b"x1"])

    assert (report.acked, report.released) == (2, 2)


@options(staged=True, queue_url=FIFO)
def test_early_verdicts_of_several_processes_keep_order(run):
    """What follows one that was given back is given back; what is before it is done with."""
    in_groups(run.fake)
    messages = {message.data.decode(): message for message in run.take()}
    lease = run.source.lease
    run.source.close()
    reports = []
    for body, verdict in (("x2", RETRY), ("x1", ACK), ("x3", ACK)):
        entries = settlement([messages[body]], {body: verdict}).entries()
        with closing(run.other()) as batcher:
            reports.append(batcher.settle_now(lease, list(entries)))

    assert [(each.acked, each.released) for each in reports] == [(0, 0), (1, 0), (0, 1)]
    others = settlement([messages["y1"], messages["y2"]])
    assert run.other().settle(lease, others).acked == 2
    run.clock.advance(30.0)
    assert fifo(run) == ["x2", "x3"]


# ------------------------------------------------------------------------ outcomes that come late


@options(staged=True)
def test_killed_release_is_completed_despite_later_outcome(run):
    messages = run.take_new(["a", "b", "c"])

    def killed(action: str, _: dict[str, Any]) -> Any:
        if action == "ChangeMessageVisibility":
            raise KeyboardInterrupt
        return None

    run.fake.answer = killed
    with pytest.raises(KeyboardInterrupt):
        run.settle(messages, {"b": RELEASE})
    run.fake.answer = lambda action, arguments: None

    # Its outcome comes, and another settles by it
    report = run.settle(messages, by=run.other())

    assert report == SettleReport(acked=2, released=1)
    assert report.again is not None
    assert [each.data for each in messages if report.again.has(each.message_id)] == [b"b"]
    assert run.fake.left() == 1
    assert run.settle(messages, by=run.other()).again == report.again
