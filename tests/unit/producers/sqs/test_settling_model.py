"""Settlement under lost answers, partial failures and a second settler, checked at the broker."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.core.model.message import Message
from tests.fake_sqs import URL, FakeSqs, client_error
from tests.unit.producers.sqs.kit import SqsHalves, halves, options, settlement
from tests.unit.producers.verdicts import VERDICTS

FAULTS = ["", "", "lost", "never", "partial", "permanent", "silent", "malformed"]
BATCHES = ("DeleteMessage", "ChangeMessageVisibility", "SendMessage")


class Chaos:
    """Answers one fault per request in turn; then by the rules."""

    def __init__(self, fake: FakeSqs, faults: list[str]) -> None:
        self.fake = fake
        self.faults = iter(faults)
        self.inside = False
        self.interrupt: Any = None
        self.after = 0
        fake.answer = self.answer

    def answer(self, action: str, arguments: dict[str, Any]) -> Any:
        if self.inside or action not in BATCHES:
            return None
        if self.interrupt is not None:
            self.after -= 1
            if self.after < 0:  # the first settler stalls, and another settles meanwhile
                interrupt, self.interrupt = self.interrupt, None
                self.inside = True
                interrupt()
                self.inside = False
        fault = next(self.faults, "")
        if not fault:
            return None
        if fault == "never":
            return client_error("ServiceUnavailable", status=503)
        if fault == "malformed" and len(arguments["Entries"]) > 1:
            return client_error("InvalidParameterValue", "a bad entry", status=400)
        entries = arguments["Entries"]
        bad = entries[-1]
        if fault in ("partial", "permanent"):
            code = "InternalError" if fault == "partial" else "KmsAccessDenied"
            answer = self.do(action, {**arguments, "Entries": entries[:-1]})
            failed = {"Id": bad["Id"], "Code": code, "SenderFault": fault == "permanent"}
            return {**answer, "Failed": [*answer["Failed"], failed]}
        answer = self.do(action, arguments)
        if fault == "lost":
            return client_error("ServiceUnavailable", status=503)
        # Silent: executed, and the answer omits one of them.
        return {**answer, "Successful": [e for e in answer["Successful"] if e["Id"] != bad["Id"]]}

    def do(self, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if not arguments["Entries"]:
            return {"Successful": [], "Failed": []}
        self.inside = True
        call = {
            "DeleteMessage": self.fake.delete_message_batch,
            "ChangeMessageVisibility": self.fake.change_message_visibility_batch,
            "SendMessage": self.fake.send_message_batch,
        }[action]
        try:
            return call(**arguments)
        finally:
            self.inside = False


@contextmanager
def received(
    verdicts: list[Verdict],
) -> Iterator[tuple[SqsHalves, list[Message], dict[str, Verdict], dict[str, Verdict]]]:
    """Receives one message per verdict; yields verdicts by body and by id."""
    with (
        tempfile.TemporaryDirectory() as folder,
        halves(f"file://{folder}", dead_letter="dead") as run,
    ):
        messages = run.take_new([str(place) for place in range(len(verdicts))])
        run.source.close()
        by_body = {str(place): verdict for place, verdict in enumerate(verdicts)}
        by_id = {message.message_id: by_body[message.data.decode()] for message in messages}
        yield run, messages, by_body, by_id


def settled(run: SqsHalves, request: Settlement) -> SettleReport:
    """Settles as tasks do: every try by its own process, until one ends."""
    for _ in range(50):
        custodian = run.other()
        try:
            return custodian.settle(run.source.lease, request)
        except ProducerUnavailable:
            continue
        finally:
            custodian.close()
    raise AssertionError("settling never ended")


def letters(fake: FakeSqs) -> set[str]:
    dead = fake.queue(URL.rpartition("/")[0] + "/dead").sent
    return {letter["MessageAttributes"]["broadway_message_id"]["StringValue"] for letter in dead}


def check_none_lost(run: SqsHalves, ids: list[str], verdicts: dict[str, Verdict]) -> list[str]:
    """Returns the deleted messages; all were acknowledged or dead-lettered."""
    gone = [key for key in ids if key not in run.fake.queue().known]
    for key in gone:
        action = verdicts[key].action
        assert action is Action.ACK or (action is Action.DEAD_LETTER and key in letters(run.fake))
    return gone


@settings(max_examples=80, deadline=None)
@given(
    verdicts=st.lists(st.sampled_from(VERDICTS), min_size=1, max_size=35),
    faults=st.lists(st.sampled_from(FAULTS), max_size=12),
)
def test_report_matches_broker(verdicts, faults):
    with received(verdicts) as (run, messages, by_body, by_id):
        Chaos(run.fake, faults)

        report = settled(run, settlement(messages, by_body))

        gone = check_none_lost(run, list(by_id), by_id)
        wanted = Counter(verdict.action for verdict in verdicts)
        assert report.total == len(messages)
        assert report.lapsed == 0
        # Beyond it only deletions with a lost answer, refused later.
        assert 0 <= len(gone) - report.acked - report.dead_lettered <= report.failed
        assert report.failed <= faults.count("permanent")
        assert report.left == wanted[Action.LEAVE]
        for name, action in (
            ("acked", Action.ACK),
            ("requeued", Action.RETRY),
            ("dead_lettered", Action.DEAD_LETTER),
            ("released", Action.RELEASE),
        ):
            assert wanted[action] - report.failed <= getattr(report, name) <= wanted[action]
        # No message stays invisible beyond its lease.
        run.clock.advance(601.0)
        assert len(run.fake.waiting()) == len(messages) - len(gone)
        assert run.settle(messages, by_body, by=run.other()) == report


@settings(max_examples=60, deadline=None)
@given(
    verdicts=st.lists(st.sampled_from(VERDICTS), min_size=1, max_size=35),
    faults=st.lists(st.sampled_from(FAULTS), max_size=8),
    after=st.integers(0, 6),
    late=st.sampled_from([0.0, 700.0]),
    sweeps=st.booleans(),
)
def test_second_settler_during_stall_loses_nothing(verdicts, faults, after, late, sweeps):
    with received(verdicts) as (run, messages, by_body, by_id):
        given = settlement(messages, by_body)
        chaos = Chaos(run.fake, faults)
        chaos.after = after
        seconds: list[SettleReport] = []
        heirs: list[set[str]] = []

        def meanwhile() -> None:
            seconds.append(settled(run, Settlement(rest=RELEASE) if sweeps else given))
            run.clock.advance(late)
            if late:  # its lease has lapsed: another run receives the redeliveries
                with halves(fake=run.fake) as heir:
                    heirs.append({message.message_id for message in heir.take()})

        chaos.interrupt = meanwhile

        report = settled(run, given)

        check_none_lost(run, list(by_id), by_id)
        assert report.total == len(messages)
        if seconds:  # the first to end decides
            assert report == seconds[0]
        for heir_ids in heirs:
            # No message of the new lease is deleted.
            assert heir_ids <= set(run.fake.queue().known)


@options(staged=True)
def test_missing_or_damaged_receipts_lapse_alone(tmp_path, run):
    for start in (0, 10, 20):
        run.fake.put([str(place) for place in range(start, start + 10)])
        run.take(10)
    lease = run.stop()
    first, second, _ = sorted(tmp_path.rglob("receipts-*.json"))
    first.unlink()
    second.write_text(second.read_text()[:50])

    report = run.other().settle(lease, Settlement(rest=RELEASE))

    assert (report.released, report.lapsed, report.total) == (10, 20, 30)
    assert "receipts of 20 messages are missing" in report.errors[0]
    run.clock.advance(601.0)
    assert len(run.fake.waiting()) == 30


@options(staged=True)
def test_missing_messages_are_not_acknowledged_by_count(tmp_path, run):
    messages = []
    for start in (0, 2):
        run.fake.put([str(place) for place in range(start, start + 2)])
        messages += run.take(2)
    run.stop()
    min(tmp_path.rglob("receipts-*.json")).unlink()
    # The manifest names two messages, too: those whose receipts are missing.
    report = run.settle(messages[:2], by=run.other())

    assert (report.acked, report.released) == (0, 2)
    assert run.fake.left() == 4
