"""Hostile answers of SQS or of a server like it: one bad message fails alone."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Verdict
from airflow_broadway.core.formats.entries import dump_entry, load_line
from tests.fake_sqs import URL, FakeSqs, client_error
from tests.unit.producers.halves import DEAD
from tests.unit.producers.sqs.kit import SqsHalves, halves, options, settlement

TEXT = st.text(max_size=12)
VALUE: Any = st.one_of(st.none(), st.integers(), TEXT, st.binary(max_size=8), st.just({}))
ATTRIBUTE = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "DataType": st.sampled_from(["String", "Binary.gif", "Number", "", "Odd.type"]),
            "StringValue": TEXT,
            "BinaryValue": st.binary(max_size=16),
        },
    ),
    VALUE,
)
SYSTEM_NAMES = (
    "ApproximateReceiveCount SentTimestamp SenderId MessageGroupId AWSTraceHeader Unknown"
)
SYSTEM = st.dictionaries(st.sampled_from(SYSTEM_NAMES.split()), VALUE, max_size=4)
#: Replacements of a message's fields; ``...`` removes the field.
CHANGES = st.dictionaries(
    st.sampled_from(["Body", "MD5OfBody", "MessageId", "ReceiptHandle"]),
    st.one_of(st.just(...), VALUE),
    max_size=2,
)
BAD = st.tuples(
    CHANGES,
    st.one_of(VALUE, st.dictionaries(TEXT, ATTRIBUTE, max_size=12)),
    st.one_of(VALUE, SYSTEM),
)


def spoil(fake: FakeSqs, place: int, changes: Any, own: Any, system: Any) -> None:
    """Changes one message in every receive's answer."""

    def answer(request: dict[str, Any]) -> Any:
        fake.obey()
        messages = fake.receive_message(**request).get("Messages", [])
        for raw in messages:
            if raw["Body"] == str(place):
                raw["MessageAttributes"], raw["Attributes"] = own, system
                for name, value in changes.items():
                    if value is ...:
                        del raw[name]
                    else:
                        raw[name] = value
        fake.answers("ReceiveMessage", answer)
        return {"Messages": messages} if messages else {}

    fake.answers("ReceiveMessage", answer)


def handled(run: SqsHalves, *, dead: bool) -> tuple[SettleReport, set[str]]:
    """Runs over the queue to its end; returns the report and the received ids."""
    messages = run.take()
    for message in messages:
        json.dumps(message.metadata)  # as staged
        assert load_line(dump_entry(entry_of(message, DEAD))).entry.message_id == message.message_id
    lease = run.stop()
    verdicts: dict[str, Verdict] = {}
    if dead:
        verdicts = {message.data.decode("utf-8", "replace"): DEAD for message in messages}
    assert lease.state["messages"] == len(messages)
    report = run.settle(messages, verdicts, by=run.other())
    return report, {message.message_id for message in messages}


@settings(max_examples=150, deadline=None)
@given(bad=BAD, fifo=st.booleans(), everything=st.booleans(), dead=st.booleans())
def test_hostile_message_leaves_others_intact(bad, fifo, everything, dead):
    url = f"{URL}.fifo" if fifo else URL
    options: dict[str, Any] = {"dead_letter": "dead.fifo" if fifo else "dead"}
    if everything:
        options |= {"attribute_names": "all", "message_attribute_names": "all"}
    with (
        tempfile.TemporaryDirectory() as folder,
        halves(f"file://{folder}", queue_url=url, **options) as run,
    ):
        run.fake.put([*map(str, range(12))], url=url)
        spoil(run.fake, 4, *bad)

        report, received = handled(run, dead=dead)

        good = {f"m{number + 1}" for number in range(12) if number != 4}
        assert good <= received
        assert report.total == len(received)
        assert report.acked + report.dead_lettered >= 11
        # The bad one was handled too, or is still at the broker.
        if report.acked + report.dead_lettered == 11:
            assert "m5" in run.fake.queue(url).known


@pytest.mark.parametrize("missing", ["MessageId", "ReceiptHandle", "Body"])
def test_incomplete_message_is_logged_and_redelivered(missing, caplog, run):
    run.fake.put([*map(str, range(5))])
    spoil(run.fake, 4, {missing: ...}, None, {})

    report, received = handled(run, dead=False)

    assert (report.acked, len(received)) == (4, 4)
    assert missing in caplog.text
    run.clock.advance(601.0)
    assert run.fake.waiting() == ["4"]


@options(staged=True, dead_letter="dead")
def test_non_unicode_dead_letter_is_refused_alone(run):
    """AWS refuses a request with half a surrogate pair, with its nine other entries."""
    messages = run.take_new([*map(str, range(12)), "half \ud83d"])
    assert messages[-1].data == "half \ud83d".encode("utf-8", "surrogatepass")
    refused: list[int] = []

    def answer(request: dict[str, Any]) -> Any:
        if any("\ud83d" in entry["MessageBody"] for entry in request["Entries"]):
            refused.append(len(request["Entries"]))
            return client_error("InvalidMessageContents", "invalid characters")
        return None

    run.fake.answers("SendMessage", answer)
    all_dead = dataclasses.replace(
        settlement(messages), entries=lambda: (entry_of(message, DEAD) for message in messages)
    )

    report = run.custodian.settle(run.source.lease, all_dead)

    assert (report.dead_lettered, report.failed) == (12, 1)
    assert "InvalidMessageContents" in report.errors[0]
    assert set(run.fake.queue().known) == {messages[-1].message_id}
    assert refused[-1] == 1


@options(dead_letter="dead")
def test_hopeless_request_is_not_bisected_forever(run):
    messages = run.take_new([*map(str, range(500))])
    run.fake.answers("DeleteMessage", client_error("UnsupportedOperation", "no"))

    report = run.settle(messages)

    assert report.failed == 500
    assert run.fake.requests["DeleteMessage"] < 40


def test_answer_with_foreign_entries_is_ignored(run):
    messages = run.take_new(["a", "b"])
    run.fake.answers("DeleteMessage", {"Successful": [{"Id": "7"}], "Failed": [{"Id": "x"}, {}]})

    report = run.settle(messages)

    assert (report.acked, report.failed) == (0, 2)
    assert "SQS did not say what became of it" in report.errors[0]
