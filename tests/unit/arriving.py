"""A source that receives further messages while a run ends, as a broker's connection does.

An access to its lease, like a receive, lets one more message arrive, until ``stop``.  An account
that is closed before the source is stopped therefore counts fewer messages than were received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import (
    Custodian,
    Delivery,
    Entry,
    Lease,
    Settlement,
    Source,
)
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import options

COUNTED = {
    Action.ACK: "acked",
    Action.RETRY: "requeued",
    Action.DEAD_LETTER: "dead_lettered",
    Action.LEAVE: "left",
    Action.RELEASE: "released",
}


class Broker:
    """The state that a test inspects.

    :param supply: Messages that can be received, without those that arrive between receives.
    """

    def __init__(self, supply: int = 0) -> None:
        self.supply = supply
        self.number = 0
        self.secured = 0
        self.demands: list[int] = []
        self.ahead: list[Message] = []
        self.events: list[str] = []
        self.opened = 0
        #: The counts of the lease and of the settlement when the generation was settled.
        self.settled: list[tuple[int, int | None]] = []
        self.verdicts: dict[str, Action] = {}

    def make(self) -> Message:
        """Secure one more message."""
        self.number += 1
        self.secured += 1
        return Message(
            b"%d" % self.number,
            message_id=f"m-{self.number}",
            acknowledger=AckRef(None, None, Delivery(receipt=f"r-{self.number}")),
            size=10,
            position=self.number,
        )


@options
class ArrivingProducer(Producer):
    """Options of the source below."""

    kind: ClassVar[str] = "arriving"
    renews: ClassVar[bool] = False
    broker: ClassVar[Broker] = Broker()

    def source(self, env: ProducerEnv) -> Source:
        return _Source(self.broker, env)

    def custodian(self, env: ProducerEnv) -> Custodian:
        return _Custodian(self.broker)


class _Source:
    def __init__(self, broker: Broker, env: ProducerEnv) -> None:
        self._broker = broker
        self._env = env
        self._stopped = False
        self._credit = 0
        broker.opened += 1

    def _arrive(self) -> None:
        """One more message, up to the demand of the last receive."""
        if not self._stopped and self._credit > 0:
            self._credit -= 1
            self._broker.ahead.append(self._broker.make())

    @property
    def lease(self) -> Lease:
        self._arrive()
        self._broker.events.append("lease after stop" if self._stopped else "lease")
        return Lease(
            kind="arriving",
            generation=self._env.generation,
            seconds=900.0,
            deadline=self._env.clock.now() + timedelta(seconds=900.0),
            owner=dict(self._env.owner),
            state={"secured": self._broker.secured},
        )

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        assert not self._stopped
        broker = self._broker
        broker.demands.append(demand)
        received = broker.ahead[:demand]
        del broker.ahead[:demand]
        fresh = min(demand - len(received), broker.supply)
        broker.supply -= fresh
        received += [broker.make() for _ in range(fresh)]
        self._credit = demand - len(received)
        if not received:
            self._env.clock.sleep(timeout)
        return received

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def stop(self) -> Sequence[Message]:
        if self._stopped:
            return []
        self._broker.events.append("stop")
        self._arrive()
        self._stopped = True
        rest, self._broker.ahead = self._broker.ahead, []
        return rest

    def close(self) -> None:
        self.stop()


class _Custodian:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def renew(self, lease: Lease) -> Lease | None:
        return lease

    def holds(self, lease: Lease) -> bool:
        return True

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        broker = self._broker
        broker.settled.append((int(lease.state["secured"]), settlement.expected))
        report = self._count(settlement.entries())
        rest = broker.secured - len(broker.verdicts)
        counts: dict[str, Any] = {COUNTED[settlement.rest.action]: rest}
        return report + SettleReport(**counts)

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        return self._count(entries)

    def _count(self, entries: Iterable[Entry]) -> SettleReport:
        counts: Any = Counter()
        for entry in entries:
            assert entry.message_id not in self._broker.verdicts
            self._broker.verdicts[entry.message_id] = entry.verdict.action
            counts[COUNTED[entry.verdict.action]] += 1
        return SettleReport(**counts)

    def close(self) -> None:
        return None
