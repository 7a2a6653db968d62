"""A source and a custodian of one generation, of any broker over the custody engine."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian, Entry, Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, Action, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.engine.custodian import EngineCustodian
from airflow_broadway.producers.engine.source import EngineSource

RETRY = Verdict(Action.RETRY, 0.0, "bad", "process")
DEAD = Verdict(Action.DEAD_LETTER, 0.0, "bad", "process")


class Halves:
    """A source and a custodian of one generation."""

    def __init__(self, producer: Producer, env: ProducerEnv) -> None:
        self.producer: Any = producer
        self.env = env
        self.source: EngineSource = producer.source(env)  # type: ignore[assignment]
        self.custodian: EngineCustodian = producer.custodian(env)  # type: ignore[assignment]

    def take(self, demand: int = 100_000) -> list[Message]:
        return take(self.source, demand)

    def settle(
        self,
        messages: Sequence[Message],
        verdicts: dict[str, Verdict] | None = None,
        rest: Verdict = ACK,
        *,
        by: Custodian | None = None,
    ) -> SettleReport:
        """Settles by a manifest that names ``messages``; ``verdicts`` by body."""
        request = settlement(messages, verdicts, rest)
        return (by or self.custodian).settle(self.source.lease, request)

    def settle_now(self, messages: Sequence[Message], verdict: Verdict) -> SettleReport:
        """Settles messages before the run ends."""
        entries = [entry_of(message, verdict) for message in messages]
        return self.custodian.settle_now(self.source.lease, entries)

    def renew(self) -> Lease | None:
        return self.custodian.renew(self.source.lease)

    def stop(self) -> Lease:
        """Ends receiving; returns the lease."""
        self.source.stop()
        self.source.close()
        return self.source.lease

    def receipt(self, message: Message) -> str:
        return self.source._receipts.handles[message.message_id]

    def other(self) -> Custodian:
        """Opens a custodian as another process does: it knows what is recorded."""
        custodian: Custodian = self.producer.custodian(self.env)
        return custodian

    def close(self) -> None:
        self.source.close()
        self.custodian.close()


def generation_env(
    clock: Clock, staging: str | None, stopping: Callable[[], bool] = lambda: False
) -> ProducerEnv:
    """Returns the environment of a fresh generation."""
    return ProducerEnv(
        generation=uuid.uuid4().hex,
        owner={"dag_id": "d", "run_id": "r", "task_id": "process", "map_index": -1},
        clock=clock,
        shared=staging,
        stopping=stopping,
    )


def renewed(custodian: Custodian, lease: Lease) -> Lease:
    """Renews a lease, which must not have lapsed."""
    renewed = custodian.renew(lease)
    assert renewed is not None
    return renewed


def take(source: Any, demand: int = 100_000) -> list[Message]:
    """Receives and secures until the queue is quiet."""
    taken: list[Message] = []
    while len(taken) < demand:
        portion = source.secure(source.receive(min(1000, demand - len(taken)), timeout=0))
        if not portion:
            break
        taken += portion
    return taken


def settlement(
    messages: Sequence[Message], verdicts: dict[str, Verdict] | None = None, rest: Verdict = ACK
) -> Settlement:
    """Returns the settlement of a manifest that names ``messages``; ``verdicts`` by body."""

    def entries() -> Iterator[Entry]:
        for message in messages:
            verdict = (verdicts or {}).get(message.data.decode())
            if verdict is not None:
                yield entry_of(message, verdict)

    return Settlement(
        rest=rest,
        entries=entries,
        everything=lambda: (entry_of(message, rest) for message in messages),
        expected=len(messages),
    )


@contextmanager
def recorded_spans(name: str) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Records the telemetry of a span: its ends, and their metadata."""
    spans: list[tuple[str, dict[str, Any]]] = []
    handler = telemetry.attach(
        lambda event, _, metadata: spans.append((event.rpartition(".")[2], dict(metadata))),
        events=[f"{name}.{end}" for end in ("start", "stop", "exception")],
    )
    try:
        yield spans
    finally:
        telemetry.detach(handler)
