"""The names of our queues for a source queue, and its holding queues.

A holding queue is declared once and reused, because the name of each new quorum queue takes one of
the node's Erlang atoms permanently.  A holding queue is free when it is empty.  Its first bundle
has no messages and names the generation, so its state can be read from the broker alone.

A holding queue is claimed before it is opened, settled or swept.  The claim is a queue that is
exclusive to the connection: RabbitMQ deletes it when the connection ends.  (Quorum queues ignore
exclusive consumers.)

================================  =================================================================
``broadway.held.<q>.<n>``         the bundles of one live generation, until their outcomes are known
``broadway.held.<q>.<n>.claim``   exclusive to the connection that opens, settles or sweeps number n
``broadway.delay.<s>.<q>``        delayed retries; one queue per step of the delay ladder
``broadway.dead.<q>``             dead letters, unless ``dead_letter`` names another target
``broadway.held``                 the direct exchange from a generation's id to its holding queue
================================  =================================================================

The binding of a holding queue to a generation's id is the fence.  After the unbind, RabbitMQ
returns the bundles of a process that is still publishing, and the process acknowledges nothing.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.channels import Getter, Publisher
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import (
    LOCKED,
    MISSING,
    ConnectionThread,
)
from airflow_broadway.producers.rabbitmq.amqp.properties import encode
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered
from airflow_broadway.producers.rabbitmq.bundle import Header, read_header

#: The exchange that routes bundles: direct, by the generation's id.
EXCHANGE = "broadway.held"
#: The steps of the delay ladder, in seconds.
LADDER = (1, 5, 15, 60, 300, 900, 3600, 21600)
#: AMQP's limit for a queue's name and for a routing key, in bytes.
_MAX_NAME_BYTES = 255
#: The fraction of a delay by which a retry may be early: the retry policy's own jitter.
_EARLY_FRACTION = 0.1

#: Arguments of a quorum queue that drops no message by itself.  RabbitMQ 4 has a default delivery
#: limit of 20, and its -1 for "no limit" makes RabbitMQ 3 drop a message at the first return.  With
#: ``reject-publish`` a maximum length set by a policy makes runs fail instead of dropping messages.
KEEPING: dict[str, Any] = {
    "x-queue-type": "quorum",
    "x-delivery-limit": 1_000_000_000,
    "x-overflow": "reject-publish",
}


def rung(delay: float) -> int | None:
    """Returns the step of the delay ladder for a delay in seconds; ``None`` for no delay.

    It is the shortest step of at least nine tenths of the delay, else the longest step.
    """
    if delay <= 0:
        return None
    return next((step for step in LADDER if step >= delay * (1 - _EARLY_FRACTION)), LADDER[-1])


@dataclass(frozen=True, slots=True)
class QueueNames:
    """The names of our queues for one source queue."""

    source: str

    def held(self, number: int) -> str:
        """Returns the name of a holding queue."""
        return self._name("broadway.held", f".{number}")

    def own_held(self, name: object) -> str:
        """Returns ``name`` if it is the name of a holding queue of this source queue.

        To be called on every such name from staging: other programs may write there, and holding
        queues are purged.

        :raises ProducerError: If it is not.
        """
        number = re.fullmatch(r"(.*)\.(\d{1,6})", str(name), re.DOTALL)
        if number is not None and name == self.held(int(number[2])):
            return str(name)
        raise ProducerError(
            f"{str(name)[:_MAX_NAME_BYTES]!r} is no holding queue of {self.source!r}, and is left"
            " as it is: another program wrote its name"
        )

    def key(self, generation: str) -> str:
        """Returns the routing key of a generation's bundles; unique to this source queue."""
        key = f"{self.source}.{generation}"
        fits = len(key.encode()) <= _MAX_NAME_BYTES
        return key if fits else hashlib.sha256(key.encode()).hexdigest()

    @property
    def dead(self) -> str:
        """The default dead-letter queue."""
        return self._name("broadway.dead", "")

    def delay(self, step: int) -> str:
        """Returns the name of the delay queue of a step of the ladder."""
        return self._name(f"broadway.delay.{step}", "")

    def delay_arguments(self, step: int) -> dict[str, Any]:
        """Returns the arguments of the delay queue of a step of the ladder.

        At-least-once dead-lettering waits for the source queue's confirm; it needs
        ``reject-publish``.
        """
        return {
            **KEEPING,
            "x-dead-letter-strategy": "at-least-once",
            "x-message-ttl": step * 1000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.source,
        }

    def _name(self, prefix: str, suffix: str) -> str:
        # A claim has the longest name.
        name = f"{prefix}.{self.source}{suffix}"
        fits = len(name.encode()) <= _MAX_NAME_BYTES - len(".claim")
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:32]
        return name if fits else f"{prefix}.{digest}{suffix}"


#: The maximum number of holding queues of one source queue.
_MAX_QUEUES = 1_000
#: Consecutive missing numbers that end the search for holding queues: operators delete some.
_MAX_GAP = 3
#: Seconds to wait for the claim of an empty holding queue: others claim it for milliseconds.
_OPEN_TIMEOUT = 1.0
#: Seconds between two attempts to claim a queue, and between two depth checks.
_CLAIM_INTERVAL, _COUNT_INTERVAL = 0.05, 0.02

_T = TypeVar("_T")


def _poll(read: Callable[[], _T], done: Callable[[_T], bool], seconds: float) -> _T:
    """Polls ``read`` until ``done`` accepts the result, for ``seconds`` at most; returns it."""
    deadline = time.monotonic() + seconds
    while not done(result := read()) and time.monotonic() < deadline:
        time.sleep(_COUNT_INTERVAL)
    return result


class HoldingQueue:
    """A holding queue that is claimed by this connection."""

    def __init__(self, connection: ConnectionThread, names: QueueNames, name: str) -> None:
        self.name = name
        self._names = names
        self._connection = connection
        self._getter: Getter | None = None
        self._first: Delivered | None = None

    @property
    def getter(self) -> Getter:
        """The channel that gets bundles."""
        if self._getter is None:
            self._getter = Getter(self._connection, self.name)
        return self._getter

    def owner(self, seconds: float = 0.0) -> Header | None:
        """Returns the header of the first bundle, which stays unacknowledged; ``None`` if empty.

        :param seconds: How long to wait for one: the broker requeues a dead process's late.
        :raises BundleError: If this release cannot read it.
        """
        self._first = self._first or _poll(self._get, lambda first: first is not None, seconds)
        return None if self._first is None else read_header(self._first.body)[0]

    def _get(self) -> Delivered | None:
        return self.getter.get() if self._connection.depth(self.name) is not None else None

    def fence(self, generation: str) -> None:
        """Unbinds the generation: RabbitMQ returns its bundles from now on."""
        key = self._names.key(generation)
        # Without the exchange there is no binding.
        self._call(
            "queue_unbind", accepts=MISSING, queue=self.name, exchange=EXCHANGE, routing_key=key
        )

    def count(self, expected: int | None, seconds: float) -> int:
        """Counts the bundles after the first one; waits until they are as many as expected.

        The broker's depth lags behind the confirms, and it requeues the bundles of a dead process
        only after a moment.
        """
        return _poll(
            lambda: self._connection.depth(self.name) or 0,
            lambda ready: expected in (None, ready),
            seconds,
        )

    def bundles(self, expected: int | None, seconds: float) -> Iterator[Delivered]:
        """Yields every bundle, without the one that only opens the queue.

        :param expected: The number of bundles after the first one, if it is known.
        :param seconds: How long to wait for missing bundles.
        """
        owner = self.owner()
        if self._first is not None and owner is not None and owner.count:
            yield self._first
        received, deadline = 0, time.monotonic() + seconds
        while True:
            bundle = self.getter.get()
            if bundle is not None:
                received += 1
                yield bundle
            elif received >= (expected or 0) or time.monotonic() > deadline:
                return
            else:
                time.sleep(_COUNT_INTERVAL)

    def purge(self) -> int:
        """Purges all bundles but the first, which is unacknowledged; returns their number."""
        return int(self._call("queue_purge", queue=self.name).message_count)

    def free(self) -> None:
        """Acknowledges the marked bundles, then the opening one; requeues the others."""
        self.getter.ack()
        owner = self.owner()
        if self._first is not None and owner is not None and not owner.count:
            self.getter.mark_for_ack(self._first.tag)
            self.getter.ack()
        self.close()

    def close(self) -> None:
        """Requeues the unacknowledged bundles."""
        if self._getter is not None:
            self._getter.requeue_and_close()
            self._getter = self._first = None

    def open(self, generation: str, body: bytes, note: Callable[[str], None]) -> bool:
        """Binds the queue, unless another generation owns it; see :meth:`HoldingQueues.open`."""
        owner, key = self.owner(), self._names.key(generation)
        if owner is not None and owner.generation != generation:
            return False
        note(self.name)
        self._call("exchange_declare", exchange=EXCHANGE, exchange_type="direct", durable=True)
        self._call("queue_bind", queue=self.name, exchange=EXCHANGE, routing_key=key)
        if owner is None:
            publisher = Publisher(self._connection)
            properties = encode(delivery_mode=2, message_id=self.name)
            publisher.publish(EXCHANGE, key, properties, body, key=self.name)
            for reason in publisher.flush().values():
                raise ProducerError(f"the holding queue {self.name!r} refuses messages: {reason}")
            publisher.close()
        return True

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._connection.call(f"the holding queue {self.name!r}", method, **arguments)


class HoldingQueues:
    """The holding queues of one source queue."""

    def __init__(self, names: QueueNames) -> None:
        self._names = names

    def present(self, connection: ConnectionThread) -> Iterator[tuple[str, int]]:
        """Yields name and depth of each existing holding queue."""
        missing = 0
        for name in map(self._names.held, count()):
            depth = connection.depth(name)
            if depth is not None:
                missing = 0
                yield name, depth
                continue
            missing += 1
            if missing == _MAX_GAP:
                return

    @contextmanager
    def claim(
        self, connection: ConnectionThread, name: str, seconds: float = 0.0
    ) -> Iterator[HoldingQueue | None]:
        """Claims a holding queue; yields ``None`` if another connection has the claim.

        :param seconds: How long to wait for that connection.
        """
        claim = f"{self._names.own_held(name)}.claim"
        subject, deadline = f"the queue {claim!r}", time.monotonic() + seconds
        while not connection.call(
            subject, "queue_declare", accepts=LOCKED, queue=claim, exclusive=True
        ):
            if time.monotonic() > deadline:
                yield None
                return
            time.sleep(_CLAIM_INTERVAL)
        queue = HoldingQueue(connection, self._names, name)
        try:
            yield queue
        finally:
            if connection.lost is None:
                try:
                    queue.close()
                    connection.call(subject, "queue_delete", accepts=MISSING, queue=claim)
                except ProducerUnavailable:
                    if connection.lost is None:  # closing it deletes the claim
                        connection.close()

    def open(
        self,
        connection: ConnectionThread,
        declare: Callable[[ConnectionThread, str], None],
        generation: str,
        body: bytes,
        *,
        earlier: str,
        note: Callable[[str], None],
    ) -> str:
        """Opens a free holding queue for a generation; returns its name.

        :param declare: Declares a holding queue.
        :param body: The bundle that opens it.
        :param earlier: The queue that an earlier connection may have opened; empty without one.
        :param note: Called with the name before the queue is bound; raises to refuse.
        :raises ProducerUnavailable: If the connection is lost.
        :raises ProducerError: If the broker refuses.
        """
        if earlier:  # with both bindings, bundles would be routed to both queues
            HoldingQueue(connection, self._names, earlier).fence(generation)
        for name in map(self._names.held, range(_MAX_QUEUES)):
            if connection.depth(name):
                continue
            with self.claim(connection, name, _OPEN_TIMEOUT) as queue:
                if queue is not None:
                    declare(connection, name)
                    if queue.open(generation, body, note):
                        return name
        raise ProducerError(
            f"all {_MAX_QUEUES:,} holding queues of {self._names.source!r} hold messages: settle"
            " the runs that hold them, or let their leases lapse"
        )
