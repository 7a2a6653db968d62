"""Custody: who holds a message between its receipt and its settlement.

A producer splits in two.  A :class:`Source` lives in one execution of a process task: it receives
messages and *secures* them, after which custody no longer hangs on that process.  A
:class:`Custodian` may be opened in any process at any time: it renews, settles and releases what
was secured, knowing only the :class:`Lease`, which is JSON.  The order inside a process task is
always::

    open (a generation, recorded) → receive → secure → callbacks → stage → stop
    → publish the manifest

so that neither user code nor its crash ever holds an unsecured message, and nothing is taken in a
lease's name once it has been counted.

All calls are in bulk and idempotent: settling what was settled already changes nothing and reports
the same.  ``tests/contract`` holds the suite that every implementation passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.version import known_fields

#: In a lease's state: whether the generation holds messages that processes died of, and no others.
SUSPECTS: Final = "suspects"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What a producer attaches to a message it delivered: the ``ack_data`` of its acknowledger.

    :param receipt: What the broker needs to settle exactly this delivery; ``""`` where the message
        id is enough.
    :param payload: The body as received, where settling must publish it again; else ``None``.
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
    :param generation: The execution of a process task that took it; unique for ever.
    :param owner: For people and sweeps: ``dag_id``, ``run_id``, ``task_id``, ``map_index``,
        ``try_number``.
    :param seconds: How long it lasts from its start or renewal; greater than 0.
    :param deadline: When it lapses unless renewed; aware UTC.
    :param state: The producer's own: JSON, no secret.
    """

    kind: str
    generation: str
    seconds: float
    deadline: datetime
    owner: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that :meth:`from_json` reads back."""
        return {**asdict(self), "deadline": self.deadline.isoformat()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Lease:
        """Read what :meth:`to_json` wrote."""
        deadline = datetime.fromisoformat(value["deadline"])
        return cls(**known_fields(cls, {**value, "deadline": deadline}))


class Entry(NamedTuple):
    """One message of a lease, and the verdict on it.

    :param attempt: The attempt it was on, counted from 1.
    :param payload: The body and ``properties`` as received, for producers that settle by
        publishing again (``Producer.keeps_payload``); else ``None``.
    """

    message_id: str
    receipt: str
    verdict: Verdict
    attempt: int = 1
    payload: bytes | None = None
    properties: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What becomes of every message that a lease holds.

    :param rest: The verdict on each message of the lease that ``entries`` does not name: ``ACK``
        when all outcomes are known, ``RELEASE`` when some task never recorded one.
    :param entries: The exceptions, streamed; may be iterated more than once.
    :param everything: All message ids and receipts of the lease, streamed, for brokers that settle
        message by message; ``None`` for a generation that never published its manifest.
    :param expected: Messages in the lease by its manifest; ``None`` without one.
    :param settled_now: What ``settle_now`` is known to have done under the lease.  What it did
        beyond that (its caller died before it could say so) a custodian that keeps count of it adds
        to its report; ``None``: the caller keeps no such account.
    :param died: Ids of messages without an outcome, in batches that a process died of: a custodian
        that tells what kills from its neighbours counts one death for each.
    :param damaged: Whether a manifest was published, of which nobody can say any more what it came
        to: all is released then, and nobody died.
    """

    rest: Verdict
    entries: Callable[[], Iterator[Entry]] = lambda: iter(())
    everything: Callable[[], Iterator[Entry]] | None = None
    expected: int | None = None
    settled_now: SettleReport | None = None
    died: frozenset[str] = frozenset()
    damaged: bool = False


class QueueDepth(NamedTuple):
    """How full a queue is.

    :param ready: Messages that could be received now.
    :param delayed: Messages waiting for a retry's delay.
    :param leased: Messages held by runs.
    :param dead: Messages in the dead-letter queue.
    :param oldest_age: Seconds since the oldest ready message arrived; ``None`` if there is none, or
        if that is not known.
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
        """The lease as of now; valid, and worth recording, before the first :meth:`receive`."""
        ...

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        """Return at most ``demand`` messages, waiting up to ``timeout`` seconds for the first.

        An empty result means a quiet source, not a closed one.  What this run itself has given
        back is not received again.

        :raises ProducerUnavailable: The broker could not be reached; trying again may succeed.
        :raises ProducerError: The broker refused.
        """
        ...

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Take custody of ``messages`` away from this process, and return those secured.

        Called with what each :meth:`receive` returned, nothing too, and before any callback.  A
        call with nothing means nothing: only :meth:`stop` says that a run ends.  A source
        whose messages are secured by their very receipt returns them unchanged.
        """
        ...

    def stop(self) -> Sequence[Message]:
        """Take nothing more, and return what is secured and was never handed out.

        Called however the run ends, before its account is closed.  Waits until each message under
        way is either secured or certain to go back.  From its return on :attr:`lease` tells of all
        that the generation holds, the broker hears no acknowledgement from this source any more,
        and :meth:`receive` returns nothing.  What it returns is at most what the last receive asked
        for and did not get; the run has received it.  Safe to repeat: then there is nothing more.

        :raises ProducerUnavailable: If the broker does not say what became of messages under way.
        """
        ...

    def close(self) -> None:
        """Stop, and release connections.  Secured messages stay leased; others go back.

        Safe to repeat.
        """
        ...


class Custodian(Protocol):
    """Settles what a source secured, from any process; used from one thread."""

    def renew(self, lease: Lease) -> Lease | None:
        """Hold the lease for ``lease.seconds`` more; ``None`` if it has lapsed.

        A producer whose leases cannot be renewed returns ``lease`` unchanged until it lapses.
        """
        ...

    def holds(self, lease: Lease) -> bool:
        """Whether the lease is still held: neither lapsed nor released nor settled."""
        ...

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        """Carry out the verdicts and end the lease; idempotent.

        :returns: A report that says in ``again`` which messages come again: what was given back
            behind one of its group, what had lapsed, what an earlier call did by other verdicts.
        """
        ...

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        """Carry out ``entries`` and keep the lease for the other messages (``ack_immediately``).

        :param entries: Of distinct messages.
        :returns: A report of them alone, which names in ``undone`` those that were not carried out;
            a second call with the same reports the same.
        """
        ...

    def close(self) -> None:
        """Release connections.  Safe to repeat."""
        ...
