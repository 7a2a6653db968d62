"""Dead letters need bodies, which SQS delivers once: staged where one may be needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message
from airflow_broadway.core.local.run import run_local
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.tables import ParquetFile
from airflow_broadway.testing import ManualClock
from tests.fake_sqs import URL, FakeSqs, installed
from tests.unit.producers.sqs.kit import process_of

DEAD = URL.rpartition("/")[0] + "/orders-dead"
BODIES = [f"order {number}" for number in range(6)]


class Orders(Broadway):
    """As in the guide: the redrive policy names the queue; a message sets its own action."""

    producer = SqsProducer(queue_url=URL, conn_id=None)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if int(message.data[-1:]) % 3:
            return message
        message = message.configure_ack(on_failure="dead_letter").put_data("read")
        return message if self.batchers else message.failed("no such article")


class Batched(Orders):
    batchers = {"default": Batcher()}


class Watched(Batched):
    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        return [message.configure_ack(on_failure="dead_letter") for message in messages]


class InPython(Orders):
    batchers = {"default": Batcher(engine="python")}

    def handle_batch(self, batcher: str, messages: Any, info: Any, context: Any) -> Any:
        return messages


@pytest.fixture
def fake():
    made = FakeSqs(ManualClock())
    arn = "arn:aws:sqs:eu-west-1:123456789012:orders-dead"
    made.queue().attributes["RedrivePolicy"] = json.dumps(
        {"deadLetterTargetArn": arn, "maxReceiveCount": "10"}
    )
    for body in BODIES:
        made.put([body])
    return made


def process(fake: FakeSqs, pipeline: Broadway, folder: Path) -> StagedRun:
    made, staged = process_of(fake, pipeline, folder, Budget(max_messages=6))
    with installed(fake):
        made.run()
    return staged


def kept(staged: StagedRun) -> list[bytes]:
    """Returns the bodies that are staged next to the data."""
    manifest = staged.manifest("g")
    assert manifest is not None
    found: list[bytes] = []
    for path in manifest.files["default"]:
        with ParquetFile(staged.files, path) as file:
            for group in range(file.groups):
                column = file.read(group, ["_payload"])["_payload"].to_pylist()
                found += [item for item in column if item is not None]
    return found


def test_configured_dead_letter_keeps_body(fake, tmp_path):
    process(fake, Orders(), tmp_path)

    assert [letter["MessageBody"] for letter in fake.queue(DEAD).sent] == ["order 0", "order 3"]
    assert fake.left() == 0


def test_configured_dead_letter_keeps_body_in_one_process(fake):
    with installed(fake):
        report = run_local(Orders(), max_messages=6, clock=fake.clock)

    assert (report.settled.acked, report.settled.dead_lettered) == (4, 2)
    assert [letter["MessageBody"] for letter in fake.queue(DEAD).sent] == ["order 0", "order 3"]


@pytest.mark.parametrize(
    ("pipeline", "bodies"),
    [(Batched, ["order 0", "order 3"]), (Watched, BODIES), (InPython, BODIES)],
)
def test_possible_dead_letters_stage_body(fake, tmp_path, pipeline, bodies):
    staged = process(fake, pipeline(), tmp_path)

    assert kept(staged) == [body.encode() for body in bodies]


def test_other_verdicts_stage_no_body(fake, tmp_path):
    class Failing(Orders):
        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
            return message.failed("later")

    process(fake, Failing(), tmp_path)

    [lines] = (tmp_path / "staging").rglob("failed-*.jsonl")
    assert len(lines.read_text().splitlines()) == 6
    assert "payload" not in lines.read_text()
    assert fake.left() == 6


def test_dead_letter_keeps_trace_header(fake, tmp_path):
    header = "Root=1-5759e988-bd862e3fe1be46a994272793"

    def answer(request: dict[str, Any]) -> Any:
        fake.obey()
        assert "AWSTraceHeader" in request["MessageSystemAttributeNames"]
        received = fake.receive_message(**request)
        for raw in received["Messages"]:
            raw["Attributes"]["AWSTraceHeader"] = header
        return received

    fake.answers("ReceiveMessage", answer)
    process(fake, Orders(), tmp_path)

    for letter in fake.queue(DEAD).sent:
        attribute = letter["MessageSystemAttributes"]["AWSTraceHeader"]
        assert attribute == {"DataType": "String", "StringValue": header}
