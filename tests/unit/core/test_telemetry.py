"""Events match ``docs/telemetry.md``: names, times and metadata."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors
from airflow_broadway.core import telemetry
from airflow_broadway.testing import DummyProducer

GUIDE = Path(__file__).parents[3] / "docs" / "telemetry.md"


class Eventful(Broadway):
    """Behaves as the data of a message requests."""

    producer = DummyProducer()
    processors = Processors(concurrency=1)

    @staticmethod
    def split(message: Message, count: int) -> tuple[str, int]:
        if message.data == "split":
            raise KeyboardInterrupt
        return "cont", count

    batchers = {"default": Batcher(engine="python", batch_size=(0, split), max_demand=10)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if message.data == "raise":
            raise ValueError(message.data)
        if message.data == "end":
            raise KeyboardInterrupt
        if message.data == "nothing":
            return None  # type: ignore[return-value]
        if message.data == "nowhere":
            return message.put_batcher("nowhere")
        return message.failed("no") if message.data == "fail" else message

    def handle_batch(
        self, batcher: str, messages: list[Message], info: BatchInfo, context: Any
    ) -> list[Message]:
        if messages[0].data == "end batch":
            raise KeyboardInterrupt
        if messages[0].data == "raise in batch":
            raise ValueError(messages[0].data)
        return messages

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        if messages[0].data == "raise":
            raise ValueError("in handle_failed")
        return messages


Seen = list[tuple[str, dict[str, float], dict[str, Any]]]


def events_of(*runs: list[Any]) -> Seen:
    """The events of runs with these data."""
    seen: Seen = []
    name = telemetry.attach(lambda *event: seen.append((event[0], dict(event[1]), dict(event[2]))))
    try:
        for data in runs:
            ends = {"end", "end batch", "split"}.intersection(data)
            if ends:
                with pytest.raises(KeyboardInterrupt):
                    Eventful().run_local(data)
            else:
                Eventful().run_local(data)
    finally:
        telemetry.detach(name)
    return seen


def rows() -> dict[str, tuple[str, str]]:
    """The time and the metadata of each event in the guide's table."""
    table: dict[str, tuple[str, str]] = {}
    _, _, text = GUIDE.read_text("utf-8").partition("| event | when | metadata |\n")
    for line in text.partition("\n\n")[0].splitlines():
        if line.startswith("| `"):
            events, when, metadata = (part.strip() for part in line.strip("|").split("|"))
            first, *ends = re.findall(r"`([a-z_.]+)`", events)
            for name in (first, *ends):
                span = first.rpartition(".")[0]
                table[f"{span}{name}" if name.startswith(".") else name] = when, metadata
    return table


def listed(event: str, table: dict[str, tuple[str, str]]) -> set[str]:
    """The metadata that the table gives an event, of whose span the table has the start."""
    metadata = re.sub(r"\([^)]*\)", "", table[event][1])
    plain, *ends = metadata.split(";")
    words = set(re.findall(r"\b[a-z_]+\b", plain)) - {"as", "start", "and", "the", "same"}
    for end in ends:
        names, _, when = end.partition(" on ")
        if event.rpartition(".")[2] in when:
            words |= set(re.findall(r"\b[a-z_]+\b", names)) - {"and"}
    if re.match("as start|the same", metadata):
        words |= listed(f"{event.rpartition('.')[0]}.start", table)
    return words


def test_guide_lists_every_event_and_no_other():
    assert set(rows()) == set(telemetry.EVENTS)


def test_every_event_carries_the_documented_metadata():
    seen = events_of([1, 2], ["raise"], ["fail"], ["end"], ["end batch"], ["split"])
    table = rows()
    for event, measurements, metadata in seen:
        assert set(metadata) - {"telemetry_span_context"} == listed(event, table), event
        start = {"system_time", "monotonic_time"}
        if event == "topology.init":
            assert set(measurements) == {"system_time"}
        else:
            end = {"duration", "monotonic_time"}
            assert set(measurements) == (start if event.endswith(".start") else end), event
    # Those of SQS and of Pub/Sub have a test next to their producers.
    others = {event for event in telemetry.EVENTS if not event.startswith(("sqs.", "pubsub."))}
    assert {event for event, *_ in seen} == others


def test_spans_have_contexts_of_their_own():
    spans: dict[Any, list[str]] = {}
    for event, _, metadata in events_of([1, 2, 3]):
        if "telemetry_span_context" in metadata:
            spans.setdefault(metadata["telemetry_span_context"], []).append(event)
    for events in spans.values():
        name = events[0].rpartition(".")[0]
        assert events == [f"{name}.start", f"{name}.stop"]
    # Of three messages, their chunk, the batcher's list and the batch.
    assert len(spans) == 6


def test_failed_message_is_no_exception_event():
    seen = [event for event, *_ in events_of(["fail"])]
    assert seen.index("handle_failed.stop") < seen.index("processor.stop")
    assert "processor.message.stop" in seen
    assert "processor.message.exception" not in seen


@pytest.mark.parametrize("data", ["raise", "nothing", "nowhere"])
def test_misbehaving_callback_is_an_exception_event(data):
    ends = [
        (event, metadata["message"].data)
        for event, _, metadata in events_of(["fine", data])
        if event in ("processor.message.stop", "processor.message.exception")
    ]
    assert ends == [("processor.message.stop", "fine"), ("processor.message.exception", data)]


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_handler_runs_where_the_work_is_done(executor):
    places: list[tuple[int, int]] = []
    name = telemetry.attach(
        lambda *_: places.append((os.getpid(), threading.get_ident())),
        events=["processor.message.stop"],
    )
    try:
        report = Placed(processors={"executor": executor}).run_local(range(20))
    finally:
        telemetry.detach(name)
    assert report.settled.acked == 20
    assert {process for process, _ in places} == {os.getpid()}
    assert len(places) == 20
    if executor == "threads":
        assert places == Placed.places


class Placed(Broadway):
    """Notes where its messages are handled."""

    producer = DummyProducer()
    processors = Processors(concurrency=2)
    places: ClassVar[list[tuple[int, int]]] = []

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        self.places.append((os.getpid(), threading.get_ident()))
        return message
