"""The half that receives: secured in bundles before it is handed out.

:meth:`RabbitSource.receive` returns what is secured already, and lets the intake run ahead by as
much as was demanded; so ``secure`` has nothing left to do for a message, and, given none, brings in
what is still on its way.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.custody import Delivery, Lease
from airflow_broadway.core.errors import (
    BroadwayError,
    LeaseLapsed,
    ProducerError,
    ProducerUnavailable,
)
from airflow_broadway.core.message import AckRef, Message
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.connection import Blocked
from airflow_broadway.producers.rabbitmq.drain import Returns
from airflow_broadway.producers.rabbitmq.intake import Intake
from airflow_broadway.producers.rabbitmq.journal import Journal
from airflow_broadway.producers.rabbitmq.link import Link, Refused
from airflow_broadway.producers.rabbitmq.metadata import Describer
from airflow_broadway.producers.rabbitmq.properties import dump
from airflow_broadway.producers.rabbitmq.returns import store_staged
from airflow_broadway.producers.rabbitmq.sealing import Ready, Sealer
from airflow_broadway.producers.rabbitmq.sweep import counting, due_at, sweep
from airflow_broadway.producers.rabbitmq.topology import Topology, explained

if TYPE_CHECKING:
    from airflow_broadway.core.producer import ProducerEnv
    from airflow_broadway.producers.rabbitmq.producer import RabbitMQProducer

__all__ = ["RabbitSource", "is_open_here"]

log = logging.getLogger(__name__)

#: The sources of this process: a generation that ends while one of them is open did not crash.
_open: weakref.WeakSet[RabbitSource] = weakref.WeakSet()

#: Seconds that the first message of a queue that is not empty may take, and those that follow; then
#: the queue itself is asked, for so long.
_FIRST, _AGAIN, _LATE = 3.0, 0.2, 20.0

#: A generation takes nothing more when this part of its lease is left.
_MARGIN = 0.02


def is_open_here(generation: str) -> bool:
    """Whether this process holds the generation's source open."""
    return any(source.lease.generation == generation for source in list(_open))


class RabbitSource:
    """Receives for one generation."""

    def __init__(self, producer: RabbitMQProducer, env: ProducerEnv) -> None:
        self._producer = producer
        self._env = env
        self._clock = env.clock
        self._options = producer.merged(env.index)
        self._address = producer.address(env)
        self._journal = Journal(env.staging, producer.queue)
        self._topology = Topology(producer)
        self._queues = self._topology.queues
        self._ready = Ready()
        self._sealer = Sealer(
            env.generation, self._queues, dict(env.owner), prefix=secrets.token_hex(8)
        )
        if producer.custody == "staged":
            self._sealer.store = store_staged(self._journal, env.generation)
        self._describe = Describer(producer.metadata)
        self._backoff = producer.backoff()
        self._position = 0
        self._handed = 0
        self._extra = 0
        self._declared = False
        self._fenced: LeaseLapsed | None = None
        self._link: Link | None = None
        self._intake: Intake | None = None
        self._returns = Returns(producer, self._topology, self._journal, self._ready, self._sealer)
        self._has_messages = False
        self._properties: dict[tuple[bytes, bytes, bool], str] = {}
        self._deadline = self._fresh_deadline()
        now = self._clock.now().timestamp()
        sweep(self._connect(), self._topology, self._journal, now, counting(self._address))
        _open.add(self)

    # -- the lease -----------------------------------------------------------------------------

    @property
    def lease(self) -> Lease:
        """The lease as of now; its state counts what was handed out."""
        with self._ready.changed:
            waiting = self._ready.outstanding
            state = {
                "queue": self._producer.queue,
                "lease_queue": self._sealer.target,
                "virtual_host": self._address.virtual_host,
                "declared": self._declared,
                "bundles": self._ready.secured,
                "messages": self._handed,
                # Bundles that may be there beside those counted, and messages never handed out.
                "extra": self._extra + waiting,
            }
        return Lease(
            kind=self._producer.kind,
            generation=self._env.generation,
            seconds=self._producer.lease,
            deadline=self._deadline,
            owner=dict(self._env.owner),
            state=state,
        )

    def _fresh_deadline(self) -> Any:
        return self._clock.now() + timedelta(seconds=self._producer.lease)

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        if self._fenced is not None:
            raise self._fenced
        if demand < 1:
            return []
        ready = self._ready
        # What lies in the queue takes a moment to come: a shorter timeout would call it quiet.
        least = _AGAIN if self._handed else _FIRST if self._has_messages else 0.0
        end = self._clock.monotonic() + max(timeout, least)
        last = end + _LATE
        self._check_deadline()
        while True:
            self._reconnect()
            intake = self._intake
            assert intake is not None
            assert self._link is not None
            if not ready.bundles and self._returns.left > 0:
                self._returns.drain(
                    self._link,
                    min(demand, max(1, demand // 2)) if self._has_messages else demand,
                    wait=end - self._clock.monotonic(),
                    fresh=not self._position,
                    open_lease=lambda intake=intake: self._open_lease(intake),  # type: ignore[misc]
                )
            if not self._returns.alone:
                with ready.changed:
                    ready.credit = demand
                self._link.post(lambda intake=intake: intake.want(demand))  # type: ignore[misc]
            with ready.changed:
                quiet = False
                while not (quiet or self._stirred(intake)):
                    left = end - self._clock.monotonic()
                    if left <= 0 and ready.outstanding:  # arrived in time: its confirm is awaited
                        left = self._patience(self._link, end)
                    quiet = left <= 0
                    if not quiet:
                        ready.changed.wait(left)
                held = ready.take(demand)
            if held:
                return self._messages(held)
            if quiet:
                if self._clock.monotonic() > last or not self._more(intake):
                    return []
                end = self._clock.monotonic() + _AGAIN
            if ready.error is None and intake.backlog and not self._declared:
                try:
                    self._open_lease(intake)
                except ProducerUnavailable:
                    if self._link.lost is None:
                        raise
                    # The broker died meanwhile, which the next turn mends.

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        if messages:
            return messages
        # Called with none at the end of pulling, until it returns none: bring in what is on its
        # way.
        ready, intake, link = self._ready, self._intake, self._link
        if intake is None or link is None:
            return []
        with ready.changed:
            ready.credit = 0
        link.post(intake.flush)
        end = self._clock.monotonic()
        with ready.changed:
            while not ready.bundles and ready.outstanding and ready.error is None:
                ready.changed.wait(self._patience(link, end))
            held = ready.take(100_000)
            if not held and ready.outstanding and ready.error is not None:
                # Never secured, so still the source's; nobody was given it.
                ready.outstanding = 0
                self._extra += 1
        return self._messages(held) if held else []

    def close(self) -> None:
        _open.discard(self)
        self._sealer.close()
        link, self._link, self._intake = self._link, None, None
        if link is None:
            return
        try:
            if self._declared and link.lost is None:
                self._topology.leave_spare(link)
        except BroadwayError as error:  # the next run then waits for a queue of its own
            log.warning("No lease queue could be declared for the next run: %s", error)
        link.close()

    def _patience(self, link: Link, end: float) -> float:
        """Seconds to wait for confirms that were due at ``end``.

        :raises ProducerUnavailable: If they take too long, and nothing explains it.
        """
        left = end + self._address.timeout - self._clock.monotonic()
        if left > 0:
            return left
        if link.blocked:  # for how long it may be is the link's to say
            return 1.0
        raise ProducerUnavailable("RabbitMQ does not confirm what was published to it")

    def _more(self, intake: Intake) -> bool:
        """Whether messages are in the queue, or on their way, that only take their time to come."""
        if intake.stopped or self._returns.alone:
            return False
        queue = self._producer.queue
        # Twice: deliveries that were under way during the first are here after the second.
        for _ in range(2):
            try:
                declared = intake.channel.call("queue_declare", queue=queue, passive=True)
            except ProducerError:  # told at the next receive
                return False
            if declared.method.message_count:
                return True
        return bool(intake.backlog or self._ready.outstanding or self._ready.bundles)

    def _stirred(self, intake: Intake) -> bool:
        ready = self._ready
        return bool(
            ready.bundles
            or ready.error is not None
            or (intake.backlog and not self._declared)
            or (self._returns.left > 0 and not ready.outstanding)
        )

    def _check_deadline(self) -> None:
        now = self._clock.now()
        if not self._declared:  # what holds nothing cannot lapse
            self._deadline = self._fresh_deadline()
        elif (self._deadline - now).total_seconds() < self._producer.lease * _MARGIN:
            self._fenced = LeaseLapsed(
                "this run's lease is about to end while it still receives messages: let it receive"
                " for a shorter time (max_seconds), or give the producer a longer lease"
            )
            raise self._fenced

    def _messages(self, held: list[Held]) -> list[Message]:
        now, position = self._clock.now(), self._position
        generation, texts, describe = self._env.generation, self._properties, self._describe
        made = []
        for place, each in enumerate(held, position):
            key = (each.route, each.properties, each.redelivered)
            text = texts.get(key)
            if text is None:
                if len(texts) > 10_000:
                    texts.clear()
                text = texts[key] = dump(*key)
            body = each.body
            made.append(
                Message(
                    body,
                    metadata=describe(each),
                    acknowledger=AckRef(None, generation, Delivery(payload=body, properties=text)),
                    message_id=each.message_id,
                    attempt=each.attempt,
                    redelivered=each.redelivered,
                    received_at=now,
                    position=place,
                    size=len(body),
                )
            )
        self._position += len(made)
        self._handed += len(made)
        return made

    # -- connecting ----------------------------------------------------------------------------

    def _connect(self) -> Link:
        ready = self._ready
        link = Link(self._address, on_lost=ready.fail)
        try:
            options = self._options = self._producer.merged(self._env.index)
            channel = link.channel()
            depth = self._topology.prepare(link, channel, options)
            self._has_messages = depth > 0
            self._intake = Intake(
                channel,
                ready,
                self._sealer,
                prefetch=options.prefetch_count,
                max_bytes=options.max_message_bytes,
                dead=self._topology.dead,
                consume=dict(options.consume_options or {}),
            )
            self._link = link
            self._intake.open = self._declared
            self._returns.open(link)
        except BaseException:
            link.close()
            raise
        return link

    def _reconnect(self) -> None:
        """Go on after a lost connection; nothing happens if there is none lost."""
        ready = self._ready
        error = ready.error
        if error is None:
            return
        if isinstance(error, LeaseLapsed):
            self._fenced = error
        if isinstance(error, Refused):
            raise explained(error, f"the queue {self._producer.queue!r}") from None
        if isinstance(error, Blocked) or not isinstance(error, ProducerUnavailable):
            raise error
        log.warning("%s: what is not secured yet is received again.", error)
        with ready.changed:
            # What was taken and not confirmed may be in the lease queue, and is the source's again.
            waiting = sum(map(len, ready.bundles))
            if ready.outstanding != waiting or self._sealer.waiting:
                self._extra += 1
            ready.outstanding = waiting
        if self._link is not None:
            self._link.close()
        end = self._clock.monotonic() + self._producer.reconnect_timeout
        while True:
            with ready.changed:
                ready.error = None
            try:
                self._connect()
            except ProducerUnavailable as again:
                pause = self._backoff.next()
                if pause is None or self._clock.monotonic() + pause > end:
                    with ready.changed:
                        ready.error = again
                    raise
                log.warning("%s; trying again in %.1f s", again, pause)
                self._clock.sleep(pause)
            else:
                self._backoff.reset()
                log.info("Connected to RabbitMQ again.")
                return

    def _open_lease(self, intake: Intake) -> None:
        """Declare the lease queue: at the first message, so that an empty run declares nothing."""
        if self._declared:
            return
        assert self._link is not None
        if intake.backlog:
            self._topology.refuse_stream(self._link, intake.backlog[0].properties)
        generation, now = self._env.generation, self._clock.now().timestamp()
        self._topology.check(self._link, self._journal, generation, now)
        name = self._topology.open_lease(self._link, self._env.generation)
        self._deadline = self._fresh_deadline()
        # Only now may a bundle be in it: a broker that dies while it declares a queue may leave one
        # that never answers again, and nobody must wait for that one.
        due, sure = due_at(self._deadline.timestamp(), self._producer.lease)
        self._journal.note_opened(self._env.generation, name, due, sure)
        self._sealer.target = name
        self._declared = True

        def run() -> None:
            intake.open = True
            intake.pump()

        self._link.post(run)
