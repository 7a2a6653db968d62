"""The half that receives: secured in bundles before it is handed out.

:meth:`RabbitSource.receive` returns what is secured already, and lets the intake run ahead by as
much as was demanded; so ``secure`` has nothing left to do, and ``stop`` brings in what is still on
its way.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import (
    BroadwayError,
    LeaseLapsed,
    ProducerError,
    ProducerUnavailable,
)
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.backoff import Attempts, Backoff, keep_trying
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.errors import (
    Blocked,
    Refused,
    acknowledged_too_late,
    explained,
    too_large,
)
from airflow_broadway.producers.rabbitmq.broker.sweep import counting, due_at, sweep
from airflow_broadway.producers.rabbitmq.broker.topology import Topology
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.journal import Journal, Turns
from airflow_broadway.producers.rabbitmq.open_here import note_closed, note_open
from airflow_broadway.producers.rabbitmq.receive.bundler import Bundler, Ready
from airflow_broadway.producers.rabbitmq.receive.consumer import Consumer
from airflow_broadway.producers.rabbitmq.receive.ending import (
    await_confirms,
    end_lanes,
    in_thread,
    patience,
)
from airflow_broadway.producers.rabbitmq.receive.ids import Ids
from airflow_broadway.producers.rabbitmq.receive.messages import MessageMaker
from airflow_broadway.producers.rabbitmq.receive.returned import ReturnsReader
from airflow_broadway.producers.rabbitmq.staged_bundle import store_staged

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

__all__ = ["RabbitSource"]

log = logging.getLogger(__name__)

#: Seconds that the first message of a queue that is not empty may take, and those that follow; then
#: the queue itself is asked, for so long.
_FIRST, _AGAIN, _LATE = 3.0, 0.2, 20.0

#: A generation takes nothing more when this part of its lease is left.
_MARGIN = 0.02


class RabbitSource:
    """Receives for one generation."""

    def __init__(self, producer: RabbitMQOptions, env: ProducerEnv) -> None:
        self._producer = producer
        self._env = env
        self._clock = env.clock
        self._address = address_for(producer, env)
        self._journal = Journal(env.staging, producer.queue)
        self._topology = Topology(producer, self._journal)
        self._queues = self._topology.queues
        self._ready = Ready()
        self._sealer = Bundler(
            env.generation,
            self._topology.queues,
            dict(env.owner),
            Ids(secrets.token_hex(8)),
            Turns(self._journal),
            store_staged(self._journal, env.generation) if producer.custody == "staged" else None,
        )
        self._make = MessageMaker(
            env.generation, producer.metadata, env.clock, producer.actions_of_messages
        )
        self._attempts = Attempts(
            Backoff.of(producer), producer.reconnect_timeout, env.clock, env.stopping
        )
        self._handed = 0
        self._extra = 0
        self._declared = False
        self._fenced: LeaseLapsed | None = None
        self._link: ConnectionThread | None = None
        self._intake: Consumer | None = None
        self._returns = ReturnsReader(
            producer, self._topology, self._journal, self._ready, self._sealer
        )
        self._has_messages = False
        self._slow = False
        self._stopped = False
        self._deadline = self._fresh_deadline()
        limit = self._journal.limit()
        if limit is not None:
            self._sealer.fit(limit, refused=False)
        link = self._connect_in_time()
        now = self._clock.now().timestamp()
        sweep(link, self._topology, self._journal, now, counting(self._address))
        note_open(self, env.generation)

    # -- the lease -----------------------------------------------------------------------------

    @property
    def lease(self) -> Lease:
        """The lease as of now; its state counts what was handed out."""
        with self._ready.changed:
            waiting = self._ready.outstanding
            state = {
                "queue": self._producer.queue,
                "index": self._env.index,
                "lease_queue": self._sealer.target,
                "virtual_host": self._address.virtual_host,
                "declared": self._declared,
                "bundles": self._ready.secured,
                "messages": self._handed,
                # Bundles that may be there beside those counted, and messages never handed out.
                "extra": self._extra + waiting,
            }
            if self._ready.set_aside:
                state["set_aside"] = dict(self._ready.set_aside)
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
        if demand < 1 or self._stopped:
            return []
        ready = self._ready
        # What lies in the queue takes a moment to come: a shorter timeout would call it quiet.
        least = _AGAIN if self._handed else _FIRST if self._has_messages else 0.0
        end = self._clock.monotonic() + max(timeout, least)
        last = end + _LATE
        self._check_deadline()
        while True:
            try:
                self._reconnect()
            except ProducerUnavailable:
                if self._env.stopping():  # what was received is still to be published
                    return []
                raise
            intake = self._intake
            assert intake is not None
            assert self._link is not None
            if intake.unknown:
                self._sealer.turns.read(intake.unknown)
                intake.unknown = ""
                self._link.post(intake.pump)
            if not ready.bundles and self._returns.left > 0:
                self._drain(intake, demand)
            if not self._returns.alone:
                with ready.changed:
                    ready.credit = demand
                self._link.post(lambda intake=intake: intake.want(demand))  # type: ignore[misc]
            with ready.changed:
                quiet = False
                while not (quiet or self._stirred(intake)):
                    left = end - self._clock.monotonic()
                    if left <= 0 and ready.outstanding:  # arrived in time: its confirm is awaited
                        left = patience(self._link, self._lanes(), end, self._clock)
                    quiet = left <= 0
                    if not quiet:
                        ready.changed.wait(left)
                held = ready.take(demand)
            if held:
                self._attempts.worked()
                return self._messages(held)
            if quiet:
                if self._clock.monotonic() > last or not self._more(intake):
                    self._see_why_nothing_came()
                    if ready.error is None:
                        self._attempts.worked()
                    return []
                end = self._clock.monotonic() + _AGAIN
            if ready.error is None and intake.backlog and not self._declared:
                with self._unless_lost():
                    self._open_lease(intake)

    def _drain(self, intake: Consumer, demand: int) -> None:
        """Have returned messages secured: at most half of what is wanted, if there are others."""
        assert self._link is not None
        most = max(1, demand // 2) if self._has_messages else demand
        with self._unless_lost():
            self._returns.drain(
                self._link,
                most,
                fresh=not self._handed,
                open_lease=lambda: self._open_lease(intake),
            )

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Let errors pass of a connection that is lost: connecting again mends them."""
        try:
            yield
        except ProducerError:
            if self._ready.error is None and (self._link is None or self._link.lost is None):
                raise

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def stop(self) -> Sequence[Message]:
        intake, link = self._intake, self._link
        if self._stopped or intake is None or link is None:
            self._stopped = True
            return []
        self._stopped = True
        ready = self._ready
        with ready.changed:
            ready.credit = 0
        in_thread(link, intake.stop)
        await_confirms(link, self._lanes(), ready, self._clock)
        self._end_lanes(link)
        with ready.changed:
            held = ready.take(sum(map(len, ready.bundles)))
            # What is left was never secured, so it is still its queue's; nobody was given it.
            ready.outstanding = 0
        return self._messages(held) if held else []

    def _lanes(self) -> list[ConfirmChannel]:
        intake = None if self._intake is None else self._intake.lane
        return [lane for lane in (intake, self._returns.lane) if lane is not None]

    def _end_lanes(self, link: ConnectionThread) -> None:
        if end_lanes(link, self._lanes(), self._clock):
            self._extra += 1

    def close(self) -> None:
        note_closed(self)
        try:
            self.stop()
        except BroadwayError as error:  # what it does not confirm is not acknowledged either
            log.warning("The source could not be stopped: %s", error)
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

    def _more(self, intake: Consumer) -> bool:
        """Whether messages are in the queue, or on their way, that only take their time to come."""
        if intake.stopped or self._returns.alone:
            return False
        # Twice: deliveries that were under way during the first are here after the second.
        for _ in range(2):
            try:
                declared = intake.channel.call(
                    "queue_declare", queue=self._producer.queue, passive=True
                )
            except ProducerError:  # told at the next receive
                return False
            if declared.method.message_count:
                return True
        return bool(intake.backlog or self._ready.outstanding or self._ready.bundles)

    def _see_why_nothing_came(self) -> None:
        """Refuse a stream, which looks like an empty queue: asked once a day.

        :raises ProducerError: If the queue is one.
        """
        now = self._clock.now().timestamp()
        if self._handed or self._link is None or self._journal.seen_type(now):
            return
        with self._unless_lost():
            self._topology.refuse_stream(self._link)
            self._journal.note_type(now)

    def _stirred(self, intake: Consumer) -> bool:
        ready = self._ready
        return bool(
            ready.bundles
            or ready.error is not None
            or intake.unknown
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
        made = self._make(held)
        self._handed += len(made)
        return made

    # -- connecting ----------------------------------------------------------------------------

    def _connect(self) -> ConnectionThread:
        ready = self._ready
        with ready.changed:
            ready.error = None
        link = ConnectionThread.to(self._address, on_lost=ready.fail)
        try:
            options = self._producer
            channel = link.channel()
            depth = self._topology.prepare(link, channel, options)
            self._has_messages = depth > 0
            self._intake = Consumer(
                channel,
                ready,
                self._sealer,
                prefetch=options.qos.prefetch_count,
                max_bytes=options.max_message_bytes,
                dead=self._topology.dead,
                consume=dict(options.consume_options or {}),
                slow=self._slow,
            )
            self._link = link
            self._intake.open = self._declared
            self._returns.open(link)
        except BaseException:
            link.close()
            raise
        return link

    def _connect_in_time(self) -> ConnectionThread:
        """Connect, by the back-off's delays, for as long as the option allows."""
        try:
            return keep_trying(self._connect, self._attempts)
        except BroadwayError as error:
            self._ready.fail(error)
            raise

    def _reconnect(self) -> None:
        """Go on after a lost connection; nothing happens if there is none lost."""
        error = self._ready.error
        if error is None:
            return
        self._see_whether_it_can_go_on(error)
        log.warning("%s: what is not secured yet is received again.", error)
        if self._link is not None:
            self._end_lanes(self._link)
            self._link.close()
        with self._ready.changed:
            # What was taken and not secured is its queue's again.
            self._ready.outstanding = sum(map(len, self._ready.bundles))
        self._sealer.ids.reconnect()
        self._attempts.again(error)
        self._check_deadline()
        self._connect_in_time()
        log.info("Connected to RabbitMQ again.")

    def _see_whether_it_can_go_on(self, error: BroadwayError) -> None:
        """Raise the error unless connecting again may mend it, and do what makes it so."""
        if isinstance(error, LeaseLapsed):
            self._fenced = error
        if isinstance(error, Refused):
            limit = too_large(error)
            if limit is not None:
                self._fit(limit)
                return
            if acknowledged_too_late(error):
                self._slow = True
                return
            raise explained(error, f"the queue {self._producer.queue!r}") from None
        if isinstance(error, Blocked) or not isinstance(error, ProducerUnavailable):
            raise error

    def _fit(self, limit: int) -> None:
        """Make bundles that a broker takes that has just refused one.

        :raises ProducerError: If there are none.
        """
        known = f"RabbitMQ takes no message of more than {limit} bytes (its max_message_size)"
        if not self._sealer.fit(limit, refused=True):
            raise ProducerError(f"{known}, which is too few even for one alone: raise it")
        log.warning(
            "%s: bundles are made no larger, and a larger message is a dead letter.  To have it"
            " handled, raise the limit, or use custody='staged'.",
            known,
        )
        self._journal.note_limit(limit)

    def _open_lease(self, intake: Consumer) -> None:
        """Declare the lease queue: at the first message, so that an empty run declares nothing."""
        if self._declared:
            return
        assert self._link is not None
        if intake.backlog and b"x-stream-offset" in intake.backlog[0].properties:
            self._topology.refuse_stream(self._link)
        generation, now = self._env.generation, self._clock.now().timestamp()
        self._topology.check(self._link, self._journal, generation, now)
        name = self._topology.open_lease(self._link, self._journal, generation)
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
