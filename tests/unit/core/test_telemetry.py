"""Events are what ``docs/telemetry.md`` says: which there are, when they come, what they carry."""

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
    """Does what a message's data asks for."""

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


def told(*runs: list[Any]) -> Seen:
    """The events of some runs of these data."""
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
    """Of each event of the guide's table: when it comes, and its metadata."""
    made: dict[str, tuple[str, str]] = {}
    for line in GUIDE.read_text("utf-8").splitlines():
        if line.startswith("| `"):
            events, when, metadata = (part.strip() for part in line.strip("|").split("|"))
            first, *ends = re.findall(r"`([a-z_.]+)`", events)
            for each in (first, *ends):
                span = first.rpartition(".")[0]
                made[f"{span}{each}" if each.startswith(".") else each] = when, metadata
    return made


def listed(event: str, table: dict[str, tuple[str, str]]) -> set[str]:
    """The metadata that the table gives an event, of whose span the table has the start."""
    metadata = re.sub(r"\([^)]*\)", "", table[event][1])
    plain, *ends = metadata.split(";")
    found = set(re.findall(r"\b[a-z_]+\b", plain)) - {"as", "start", "and", "the", "same"}
    for end in ends:
        names, _, when = end.partition(" on ")
        if event.rpartition(".")[2] in when:
            found |= set(re.findall(r"\b[a-z_]+\b", names)) - {"and"}
    if re.match("as start|the same", metadata):
        found |= listed(f"{event.rpartition('.')[0]}.start", table)
    return found


def test_the_guide_lists_every_event_and_no_other() -> None:
    assert set(rows()) == set(telemetry.EVENTS)


def test_every_event_carries_what_the_guide_lists() -> None:
    seen = told([1, 2], ["raise"], ["fail"], ["end"], ["end batch"], ["split"])
    table = rows()
    for event, measurements, metadata in seen:
        assert set(metadata) - {"telemetry_span_context"} == listed(event, table), event
        start = {"system_time", "monotonic_time"}
        if event == "topology.init":
            assert set(measurements) == {"system_time"}
        else:
            end = {"duration", "monotonic_time"}
            assert set(measurements) == (start if event.endswith(".start") else end), event
    # Those of SQS and of Pub/Sub have a test beside their producers.
    others = {event for event in telemetry.EVENTS if not event.startswith(("sqs.", "pubsub."))}
    assert {event for event, *_ in seen} == others


def test_all_events_of_a_span_have_its_context_and_spans_have_different_ones() -> None:
    spans: dict[Any, list[str]] = {}
    for event, _, metadata in told([1, 2, 3]):
        if "telemetry_span_context" in metadata:
            spans.setdefault(metadata["telemetry_span_context"], []).append(event)
    for events in spans.values():
        name = events[0].rpartition(".")[0]
        assert events == [f"{name}.start", f"{name}.stop"]
    # Of three messages, their chunk, the batcher's list and the batch.
    assert len(spans) == 6


def test_a_chunk_stops_after_handle_failed_and_a_message_that_failed_is_no_exception() -> None:
    seen = [event for event, *_ in told(["fail"])]
    assert seen.index("handle_failed.stop") < seen.index("processor.stop")
    assert "processor.message.stop" in seen
    assert "processor.message.exception" not in seen


@pytest.mark.parametrize("data", ["raise", "nothing", "nowhere"])
def test_a_callback_that_misbehaves_is_an_exception_event_of_its_message(data: str) -> None:
    ends = [
        (event, metadata["message"].data)
        for event, _, metadata in told(["fine", data])
        if event in ("processor.message.stop", "processor.message.exception")
    ]
    assert ends == [("processor.message.stop", "fine"), ("processor.message.exception", data)]


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_a_handler_is_called_where_the_work_is_done_and_of_other_processes_here(
    executor: str,
) -> None:
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
