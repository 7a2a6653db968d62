"""The embedded queue of a case: filled step by step while a process task receives."""

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

#: What cases configure, and what the queue is then to do.
ACTIONS: Mapping[str, Action] = {name: Action(action) for name, action in CONFIGURABLE.items()}


@options
class CaseProducer(SqliteProducer):
    """The embedded queue, which is filled by the steps of a case."""

    actions: ClassVar[Mapping[str, Action]] = ACTIONS

    def source(self, env: ProducerEnv) -> Source:
        return _Source(SqliteProducer.source(self, env), FEEDS[self.queue])


class _Source:
    """Sends what the case sends next, then receives."""

    def __init__(self, source: Source, feed: Feed) -> None:
        self._source = source
        self._feed = feed

    @property
    def lease(self) -> Lease:
        return self._source.lease

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        self._feed.go_on()
        return self._source.receive(demand, timeout=0.0)

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return self._source.secure(messages)

    def stop(self) -> Sequence[Message]:
        return self._source.stop()

    def close(self) -> None:
        self._source.close()


#: Queue → the steps of its case.
FEEDS: dict[str, Feed] = {}


class Feed:
    """The steps of a case, taken as the process task asks for messages."""

    def __init__(self, case: Case, queue: SqliteQueue, clock: ManualClock, seen: Observed) -> None:
        self._producer: dict[str, Any] = case["given"].get("producer") or {}
        self._queue = queue
        self._clock = clock
        self._seen = seen
        self._steps = deque(
            (kind, value) for step in case["given"]["steps"] for kind, value in step.items()
        )
        #: Message id → the case's message.
        self.sent: dict[str, dict[str, Any]] = {}
        self._passed = 0.0
        # What passes before the first message passes before the run.
        while self._steps and self._steps[0][0] not in (*MESSAGES, "drain"):
            self._take(*self._steps.popleft())

    def go_on(self) -> None:
        """Takes steps until there is a message to receive, or none will come."""
        self._clock.advance(self._passed)
        self._passed = 0.0
        while self._steps and self._steps[0][0] == "checkpoint":
            self._take(*self._steps.popleft())
        if self._steps and self._steps[0][0] == "reset_rate_limit":
            self._steps.popleft()  # the task has waited for the interval's end
        while self._steps and not self._ready():
            self._take(*self._steps.popleft())

    def after(self) -> None:
        """Sends what comes too late for the run."""
        self._send(self._producer.get("after_drain", []))

    def _ready(self) -> bool:
        return self._queue.depth().ready > 0

    def _take(self, kind: str, value: Any) -> None:
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
                raise ValueError(f"the runner knows no step {other!r}")

    def _send(self, specs: list[dict[str, Any]]) -> None:
        ids = self._queue.send([json.dumps(spec).encode() for spec in specs])
        self.sent.update(zip(ids, specs, strict=True))


def received(message: Message) -> Message:
    """A message of a case, of what was received: the transformer of its producer."""
    spec = json.loads(message.data)
    made = Message(
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
    return wrap(made) if spec.get("raw") else made
