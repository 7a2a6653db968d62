"""The embedded queue of a case: filled by its steps while a process task receives."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from airflow_broadway import Message
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease, Source
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.model.options import options
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.testing import ManualClock
from tests.conformance.limits import CONFIGURABLE, MARGIN, MESSAGES, STEP
from tests.conformance.observed import Case, Observed, freeze
from tests.conformance.pipelines import wrap

#: Acknowledger options of cases, and the equivalent options of the queue.
ACTIONS: Mapping[str, Action] = {name: Action(action) for name, action in CONFIGURABLE.items()}


@options
class CaseProducer(SqliteProducer):
    """A producer of the embedded queue that executes a case's steps."""

    actions: ClassVar[Mapping[str, Action]] = ACTIONS

    def source(self, env: ProducerEnv) -> Source:
        return _FeedingSource(SqliteProducer.source(self, env), FEEDS[self.queue])


class _FeedingSource:
    """Executes the case's next steps before each receive."""

    def __init__(self, source: Source, feed: Feed) -> None:
        self._source = source
        self._feed = feed

    @property
    def lease(self) -> Lease:
        return self._source.lease

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        self._feed.advance()
        return self._source.receive(demand, timeout=0.0)

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return self._source.secure(messages)

    def stop(self) -> Sequence[Message]:
        return self._source.stop()

    def close(self) -> None:
        self._source.close()


#: The feeds by queue.
FEEDS: dict[str, Feed] = {}


class Feed:
    """Executes the steps of a case as the process task receives."""

    def __init__(
        self, case: Case, queue: SqliteQueue, clock: ManualClock, observed: Observed
    ) -> None:
        self._producer: dict[str, Any] = case["given"].get("producer") or {}
        self._queue = queue
        self._clock = clock
        self._seen = observed
        self._steps = deque(
            (kind, value) for step in case["given"]["steps"] for kind, value in step.items()
        )
        #: Message id → the case's message.
        self.sent: dict[str, dict[str, Any]] = {}
        self._passed = 0.0
        # Time before the first message passes before the run.
        while self._steps and self._steps[0][0] not in (*MESSAGES, "drain"):
            self._apply_step(*self._steps.popleft())

    def advance(self) -> None:
        """Executes steps until a message is ready, or no step is left."""
        self._clock.advance(self._passed)
        self._passed = 0.0
        while self._steps and self._steps[0][0] == "checkpoint":
            self._apply_step(*self._steps.popleft())
        if self._steps and self._steps[0][0] == "reset_rate_limit":
            self._steps.popleft()  # the task has waited for the interval's end
        while self._steps and not self._ready():
            self._apply_step(*self._steps.popleft())

    def after(self) -> None:
        """Sends the messages that arrive after the run."""
        self._send(self._producer.get("after_drain", []))

    def _ready(self) -> bool:
        return self._queue.depth().ready > 0

    def _apply_step(self, kind: str, value: Any) -> None:
        match kind:
            case "push" | "produce":
                self._send(value)
                self._passed = STEP
            case "produce_raw":
                self._send([{"data": event, "raw": True} for event in value])
                self._passed = STEP
            case "elapse_ms":
                self._clock.advance(value / 1000 + MARGIN + STEP)
            case "drain":
                self._send(self._producer.get("during_drain", []))
            case "checkpoint":
                handled = list(self._seen.handle_message or [])
                if self._seen.checkpoints is not None:
                    self._seen.checkpoints.append({"checkpoint": value, "handled": handled})
            case "reset_rate_limit":
                self._clock.advance(self._producer["rate_limiting"]["interval"] / 1000)
            case other:
                raise ValueError(f"unknown step {other!r}")

    def _send(self, specs: list[dict[str, Any]]) -> None:
        ids = self._queue.send([json.dumps(spec).encode() for spec in specs])
        self.sent.update(zip(ids, specs, strict=True))


def to_case_message(message: Message) -> Message:
    """Converts a received message to the case's message: the producer's transformer."""
    spec = json.loads(message.data)
    case_message = Message(
        spec["data"],
        metadata=spec.get("metadata", {}),
        acknowledger=message.acknowledger,
        message_id=message.message_id,
        batcher=spec.get("batcher", "default"),
        batch_key=freeze(spec.get("batch_key", "default")),
        batch_mode=spec.get("batch_mode", "bulk"),
        attempt=message.attempt,
        redelivered=message.redelivered,
        received_at=message.received_at,
        position=message.position,
        size=message.size,
    )
    return wrap(case_message) if spec.get("raw") else case_message
