"""Test doubles for a broker: a producer that never emits, and a recording acknowledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian, Entry, Lease, Settlement, Source
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import options


class AckCall(NamedTuple):
    """One call of an acknowledger."""

    ref: Any
    successful: list[Message]
    failed: list[Message]


class RecordingAcknowledger:
    """Records its calls in order; accepts any configuration."""

    def __init__(self) -> None:
        self.calls: list[AckCall] = []
        #: (ref, options) of each ``configure_ack``.
        self.configured: list[tuple[Any, dict[str, Any]]] = []

    def ack(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
        """Records the call."""
        self.calls.append(AckCall(ack_ref, list(successful), list(failed)))

    def configure(self, ack_ref: Any, ack_data: Any, options: Mapping[str, Any]) -> Any:
        """Records the options; returns the ack data unchanged."""
        self.configured.append((ack_ref, dict(options)))
        return ack_data

    def of(self, ref: Any) -> list[AckCall]:
        """Returns the calls for one ref."""
        return [call for call in self.calls if call.ref == ref]


@options
class DummyProducer(Producer):
    """A producer that never emits; tests push messages instead."""

    kind: ClassVar[str] = "dummy"

    def source(self, env: ProducerEnv) -> Source:
        """Returns an empty source."""
        return _Source(env, self.lease)

    def custodian(self, env: ProducerEnv) -> Custodian:
        """Returns a custodian without messages."""
        return _Custodian()


class _Source:
    def __init__(self, env: ProducerEnv, seconds: float) -> None:
        self._clock = env.clock
        self.lease = Lease(
            kind=DummyProducer.kind,
            generation=env.generation,
            seconds=seconds,
            deadline=env.clock.now() + timedelta(seconds=seconds),
            owner=dict(env.owner),
        )

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        self._clock.sleep(timeout)
        return []

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def stop(self) -> Sequence[Message]:
        return []

    def close(self) -> None:
        return None


class _Custodian:
    def renew(self, lease: Lease) -> Lease | None:
        return lease

    def holds(self, lease: Lease) -> bool:
        return True

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        return SettleReport()

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        return SettleReport()

    def close(self) -> None:
        return None
