"""The custody protocol: responsibility for a message between its receipt and its settlement.

A producer has two halves.  A :class:`Source` lives in one execution of a process task: it receives
messages and *secures* them, after which custody no longer depends on that process.  A
:class:`Custodian` may be opened in any process at any time: it renews, settles and releases what
was secured, from the :class:`Lease` alone, which is JSON.  The order inside a process task is
always::

    open (a generation, recorded) → receive → secure → callbacks → stage → stop
    → publish the manifest

so neither user code nor its crash ever holds an unsecured message, and nothing is received under a
lease once its messages have been counted.

All calls are in bulk and idempotent: a repeated settlement changes nothing and returns the same
report.  ``tests/contract`` holds the suite that every implementation passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.version import known_fields


@dataclass(frozen=True, slots=True)
class Delivery:
    """A producer's data on one delivery: the ``ack_data`` of the message's acknowledger.

    :param receipt: The broker's handle for settling exactly this delivery; ``""`` where the message
        id suffices.
    :param payload: The body as received, if settling must republish it; else ``None``.
    :param properties: The broker's properties of the message, JSON text, kept with ``payload``.
    :param on_success: Overrides the producer's ``on_success`` for this message.
    :param on_failure: Overrides the producer's ``on_failure`` for this message.
    """

    receipt: str = ""
    payload: bytes | None = None
    properties: str | None = None
    on_success: str | None = None
    on_failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to hold the messages of one generation until a deadline.

    :param kind: The producer's kind, e.g. ``"sqlite"``.
    :param generation: The execution of a process task that acquired it; unique for ever.
    :param owner: For display and sweeps: ``dag_id``, ``run_id``, ``task_id``, ``map_index``,
        ``try_number``.
    :param seconds: Its duration from its start or last renewal; greater than 0.
    :param deadline: When it lapses unless renewed; aware UTC.
    :param state: The producer's own state: JSON, no secret.
    """

    kind: str
    generation: str
    seconds: float
    deadline: datetime
    owner: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value that :meth:`from_json` reads back."""
        return {**asdict(self), "deadline": self.deadline.isoformat()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Lease:
        """Reads what :meth:`to_json` wrote."""
        deadline = datetime.fromisoformat(value["deadline"])
        return cls(**known_fields(cls, {**value, "deadline": deadline}))


class Entry(NamedTuple):
    """One message of a lease, and the verdict on it.

    :param attempt: The attempt that has ended, counted from 1.
    :param payload: The body and ``properties`` as received, for producers that settle by
        republishing (``Producer.keeps_payload``); else ``None``.
    """

    message_id: str
    receipt: str
    verdict: Verdict
    attempt: int = 1
    payload: bytes | None = None
    properties: str | None = None


#: A message that is dead-lettered, and its batcher and batch id; empty before any batch.
DeadLettered = tuple[Entry, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The verdicts on all messages that a lease holds.

    :param rest: The verdict on each message of the lease that is not in ``entries``: ``ACK`` when
        all outcomes are known, ``RELEASE`` when a task did not record one.
    :param entries: The exceptions, streamed; may be iterated more than once.
    :param everything: All message ids and receipts of the lease, streamed, for brokers that settle
        message by message; ``None`` for a generation that never published its manifest.
    :param expected: The number of messages in the lease, by its manifest; ``None`` without one.
    :param settled_now: The recorded results of ``settle_now`` under the lease.  A custodian that
        counts them itself adds unrecorded ones (its caller died before recording) to its report;
        ``None``: the caller records none.
    :param damaged: Whether a published manifest cannot be read any more: all messages are released,
        and no death is counted.
    :param dead_letters: The messages that are dead-lettered, streamed, for the dead-letter table.
    :param batches: The ids of the batches whose outcomes count.
    """

    rest: Verdict
    entries: Callable[[], Iterator[Entry]] = lambda: iter(())
    everything: Callable[[], Iterator[Entry]] | None = None
    expected: int | None = None
    settled_now: SettleReport | None = None
    damaged: bool = False
    dead_letters: Callable[[], Iterator[DeadLettered]] = lambda: iter(())
    batches: tuple[str, ...] = ()


class QueueDepth(NamedTuple):
    """The depth of a queue.

    :param ready: Messages that could be received now.
    :param delayed: Messages waiting for their retry delay.
    :param leased: Messages held by runs.
    :param dead: Messages in the dead-letter queue.
    :param oldest_age: Seconds since the oldest ready message was enqueued; ``None`` if there is
        none, or if it is unknown.
    """

    ready: int
    delayed: int
    leased: int
    dead: int
    oldest_age: float | None


class Source(Protocol):
    """Receives messages for one generation; used from one thread.

    Implementations translate their client's errors: callers see only ``BroadwayError``.
    """

    @property
    def lease(self) -> Lease:
        """The current lease; valid, and worth recording, before the first :meth:`receive`."""

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        """Returns at most ``demand`` messages, waiting up to ``timeout`` seconds for the first.

        An empty result means an idle source, not a closed one.  Messages that this run released are
        not received again.

        :raises ProducerUnavailable: The broker could not be reached; retrying may succeed.
        :raises ProducerError: The broker refused.
        """

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Makes custody of ``messages`` independent of this process, and returns those secured.

        Called after each :meth:`receive`, also for an empty result, and before any callback.  An
        empty call has no effect: only :meth:`stop` ends a run.  A source whose messages are
        secured on receipt returns them unchanged.
        """

    def stop(self) -> Sequence[Message]:
        """Stops receiving, and returns messages that are secured but were never delivered.

        Called however the run ends, before its account is closed.  Waits until each message in
        flight is either secured or certain to be released.  Afterwards :attr:`lease` covers all
        messages of the generation, this source sends the broker no further acknowledgement, and
        :meth:`receive` returns nothing.  Returns at most the unmet demand of the last receive; the
        run counts these messages as received.  Safe to repeat: later calls return nothing.

        :raises ProducerUnavailable: If the broker does not confirm the messages in flight.
        """

    def close(self) -> None:
        """Stops, and releases connections.  Secured messages stay leased; others are released.

        Safe to repeat.
        """


class Custodian(Protocol):
    """Settles what a source secured, from any process; used from one thread."""

    def renew(self, lease: Lease) -> Lease | None:
        """Extends the lease by ``lease.seconds`` from now; returns ``None`` if it has lapsed.

        A producer whose leases cannot be renewed returns ``lease`` unchanged until it lapses.
        """

    def holds(self, lease: Lease) -> bool:
        """Returns whether the lease is active: neither lapsed nor released nor settled."""

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        """Carries out the verdicts and ends the lease; idempotent.

        :returns: A report whose ``again`` names the messages to be redelivered: those released
            behind a message of their group, those that had lapsed, and those that an earlier call
            settled by other verdicts.
        """

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        """Carries out ``entries`` and keeps the lease for other messages (``ack_immediately``).

        :param entries: Of distinct messages.
        :returns: A report on them alone, whose ``undone`` names those not carried out; a second
            identical call returns the same report.
        """

    def close(self) -> None:
        """Releases connections.  Safe to repeat."""
