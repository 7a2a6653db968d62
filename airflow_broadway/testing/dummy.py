"""Stand-ins for a broker: a producer that never emits, an acknowledger that only remembers."""

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
    """Keeps the calls it gets, in order; takes any configuration."""

    def __init__(self) -> None:
        self.calls: list[AckCall] = []
        #: (ref, options) of each ``configure_ack``.
        self.configured: list[tuple[Any, dict[str, Any]]] = []

    def ack(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
        """Remember the call."""
        self.calls.append(AckCall(ack_ref, list(successful), list(failed)))

    def configure(self, ack_ref: Any, ack_data: Any, options: Mapping[str, Any]) -> Any:
        """Remember the options; the message's data stays."""
        self.configured.append((ack_ref, dict(options)))
        return ack_data

    def of(self, ref: Any) -> list[AckCall]:
        """The calls for one ref."""
        return [call for call in self.calls if call.ref == ref]


@options
class DummyProducer(Producer):
    """Never emits anything: what flows is what a test pushes."""

    kind: ClassVar[str] = "dummy"

    def source(self, env: ProducerEnv) -> Source:
        """An empty source."""
        return _Source(env, self.lease)

    def custodian(self, env: ProducerEnv) -> Custodian:
        """A custodian of nothing."""
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
