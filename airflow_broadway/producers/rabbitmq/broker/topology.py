"""Declares, binds and looks at queues."""

from __future__ import annotations

import inspect
import json
import logging
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import Channel, ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.errors import Refused, explained
from airflow_broadway.producers.rabbitmq.amqp.get import Getter
from airflow_broadway.producers.rabbitmq.amqp.properties import encode
from airflow_broadway.producers.rabbitmq.amqp.publisher import Publisher
from airflow_broadway.producers.rabbitmq.amqp.wire import split_route
from airflow_broadway.producers.rabbitmq.broker.checks import act_on, check_queues, refuse_version
from airflow_broadway.producers.rabbitmq.broker.names import EXCHANGE, QueueNames, lease_arguments
from airflow_broadway.producers.rabbitmq.journal import Journal, digest

if TYPE_CHECKING:
    from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

__all__ = ["Topology"]

log = logging.getLogger(__name__)

#: Seconds from declaring a quorum queue until it is relied on.  RabbitMQ 3.10, killed within the
#: first second, forgets that it has the queue, and with it messages that it has confirmed (probed).
_SETTLED = 2.0
#: Lease queues that are declared until one answers.
_TRIES = 3
#: Names of lease queues that are read until one can be used: strangers may have written some.
_TOKENS = 10
#: Seconds that a queue which may be dead may take to answer.
_GET_TIMEOUT = 5.0
#: Seconds for which a look at the broker's policies counts.
_CHECKED = 600.0


class Topology:
    """The queues of one producer; calls answer when the broker has.

    :param journal: Where it is noted which of our queues are old enough to be relied on; who only
        looks needs none.
    """

    def __init__(self, producer: RabbitMQOptions, journal: Journal | None = None) -> None:
        self._producer = producer
        self._journal = journal or Journal(None, producer.queue)
        self._quorum = producer.queue_type == "quorum"
        self._made: set[str] = set()
        #: Queues that may be new: their arguments, and since when they are there at the latest.
        self._young: dict[str, tuple[dict[str, Any], float]] = {}
        self._exchanges: dict[str, str] = {}
        self._spares_answer = True
        #: Lease queues that were declared and do not answer.
        self._dead_leases: set[str] = set()
        self.queues = QueueNames(producer.queue)

    @property
    def dead(self) -> tuple[str, str]:
        """Exchange and routing key of dead letters."""
        place = self._producer.dead_letter
        if place is None:
            return "", self.queues.dead
        if isinstance(place, str):
            return "", place
        return str(place.get("exchange", "")), str(place.get("routing_key", ""))

    def dead_for(self, route: bytes) -> tuple[str, str]:
        """Exchange and routing key of the dead letter of a message that came by ``route``."""
        place = self._producer.dead_letter
        exchange, key = self.dead
        if isinstance(place, Mapping) and "routing_key" not in place:
            key = split_route(route)[1]
        return exchange, key

    def missing_exchange(self, link: ConnectionThread, name: str) -> str:
        """What to tell if there is no such exchange; else nothing."""
        if name not in self._exchanges:
            channel = link.channel()
            told = ""
            try:
                channel.call("exchange_declare", exchange=name, passive=True)
                channel.close()
            except Refused as error:
                told = str(explained(error, f"the exchange {name!r} of dead letters"))
            self._exchanges[name] = told
        return self._exchanges[name]

    # -- the source ----------------------------------------------------------------------------

    def prepare(self, link: ConnectionThread, channel: Channel, options: RabbitMQOptions) -> int:
        """Do what the options ask for, and see that the source queue is there; its depth.

        :raises ProducerUnavailable: If ``after_connect`` raises: it is called again later.
        :raises ProducerError: If it is not, or the broker refuses.
        """
        if options.after_connect is not None:
            try:
                told = options.after_connect(channel)
            except Exception as error:
                raise ProducerUnavailable(
                    f"after_connect raised {type(error).__name__}: {error}"
                ) from error
            if inspect.isawaitable(told) or told not in (None, True):
                raise ProducerError(
                    f"after_connect must return None, or raise to refuse; it returned {told!r}"
                )
        queue = self.queues.source
        try:
            if options.declare is not None:
                channel.call("queue_declare", queue=queue, **dict(options.declare))
            for exchange, arguments in options.bindings:
                # Without a key pika would take the queue's name.
                bound = {"routing_key": "", **dict(arguments)}
                channel.call("queue_bind", queue=queue, exchange=exchange, **bound)
            declared = channel.call("queue_declare", queue=queue, passive=True)
        except Refused as error:
            raise explained(error, f"the source queue {queue!r}") from None
        return int(declared.method.message_count)

    def refuse_stream(self, link: ConnectionThread) -> None:
        """Refuse to read a stream: what is acknowledged there is not removed.

        A stream alone takes an offset from its consumers; the answer needs no more permission than
        consuming does, and nothing is delivered for it.

        :raises ProducerError: If the source is one.
        """
        queue, channel = self.queues.source, link.channel()
        try:
            channel.call("basic_qos", prefetch_count=1)
            channel.call(
                "basic_consume",
                queue=queue,
                on_message_callback=lambda *_: None,
                arguments={"x-stream-offset": "next"},
            )
        except Refused:
            return  # what else is refused is told where it matters
        channel.close()
        raise ProducerError(
            f"{queue!r} is a stream: reading removes nothing from it, so there is nothing to"
            " settle; use a classic or quorum queue, fed by the same exchange"
        )

    # -- our own -------------------------------------------------------------------------------

    def check(self, link: ConnectionThread, journal: Journal, generation: str, now: float) -> None:
        """See that no policy makes our queues lose messages, as far as the broker tells.

        Once in ten minutes for a queue, whatever came of it, unless that was an error: what an
        ordinary run pays for it is the reading of one small file.

        :param now: Seconds since the epoch.
        :raises ProducerError: If messages would be lost.
        """
        producer, address = self._producer, link.address
        refuse_version(link.version, producer, address.shown)
        where = f"{address.shown} {address.virtual_host} {address.login} {address.management_url}"
        what = digest(f"{where} {producer.lease} {producer.queue_type} {self.dead}")
        last = journal.checked()
        if last.get("what") == what and 0 <= now - float(last.get("at", 0)) < _CHECKED:
            return
        lease = self.queues.lease(generation)
        if address.management_url == "":
            log.info("Policies are not checked: the connection's extra 'management_url' is false.")
        else:
            act_on(check_queues(producer, address, version=link.version, lease=lease))
        journal.note_checked(now, what)

    def open_lease(self, link: ConnectionThread, journal: Journal, generation: str) -> str:
        """A lease queue of the generation's own, reachable and empty; its name.

        :raises ProducerUnavailable: If the broker dies meanwhile.
        :raises ProducerError: If the broker refuses.
        """
        self.ensure_returns(link, rely=False)
        self.ensure_dead(link, rely=False)
        missing = self.dead[0] and self.missing_exchange(link, self.dead[0])
        if missing:
            raise ProducerError(missing)
        spare = self._claim_spare(link, journal, generation)
        if spare is not None:
            self._bind_lease(link, spare)
            self._rely(link)
            return spare
        known = len(self._dead_leases)  # by an earlier connection: one may end it
        for number in range(known, known + _TRIES):
            name = self.queues.lease(f"{generation}.{number}" if number else generation)
            if not journal.claim(name, generation):
                continue
            self._declare_lease(link, name)
            self._bind_lease(link, name)
            time.sleep(_SETTLED)
            # A broker that died meanwhile may have left one without a leader, which never answers
            # again: that holds nothing yet, and nothing is to depend on it.
            if self.is_empty(link, name):
                self._rely(link)
                return name
            self._dead_leases.add(name)
        raise ProducerUnavailable(
            f"RabbitMQ declares lease queues that do not answer, the last of them {name!r}: look at"
            " its log"
        )

    def _bind_lease(self, link: ConnectionThread, name: str) -> None:
        channel = link.channel()
        try:
            channel.call(
                "exchange_declare", exchange=EXCHANGE, exchange_type="direct", durable=True
            )
            channel.call("queue_bind", queue=name, exchange=EXCHANGE, routing_key=name)
        except Refused as error:
            raise explained(error, f"the lease queue {name!r}") from None
        channel.close()

    def leave_spare(self, link: ConnectionThread) -> None:
        """Declare a lease queue for the next run, unless enough of them wait already."""
        spares = self._spares
        if not self._spares_answer or (self.depth(link, spares) or 0) >= self._producer.concurrency:
            return
        # What is lost with it is a name: the next run waits for a queue of its own.
        self._ensure(link, spares, self.queues.returns_arguments(quorum=self._quorum), rely=False)
        name = self.queues.lease(uuid.uuid4().hex)
        self._declare_lease(link, name)
        publisher = Publisher(link)
        token = json.dumps({"queue": name, "at": time.time()}).encode()
        properties = encode({"delivery_mode": 2, "message_id": name})
        publisher.publish("", spares, properties, token, key=name)
        publisher.flush()

    def _claim_spare(self, link: ConnectionThread, journal: Journal, generation: str) -> str | None:
        """A lease queue that an earlier run left, ours alone from now on; ``None`` without one."""
        for _ in range(_TOKENS):
            if not self.depth(link, self._spares):
                return None
            try:
                getter = Getter(link, self._spares)
                got = getter.get(_GET_TIMEOUT)
            except ProducerUnavailable:
                self._spares_answer = False
                return None
            if got is not None:
                getter.keep(got[0])
                getter.ack()
            getter.close()
            if got is None:  # another run has it
                return None
            named, at = _token(got[1])
            try:
                name = self.queues.own_lease(named)
            except ProducerError as error:
                log.warning("A lease queue named in %r is not used: %s.", self._spares, error)
                continue
            time.sleep(min(_SETTLED, max(0.0, at + _SETTLED - time.time())))
            if self._is_spare(link, name) and journal.claim(name, generation):
                return name
        return None

    def _is_spare(self, link: ConnectionThread, name: str) -> bool:
        """Whether a queue is there, empty, alive, and declared as this run would declare it."""
        if not self.is_empty(link, name):
            return False
        try:
            self._declare_lease(link, name)
        except ProducerUnavailable:
            raise
        except ProducerError as error:
            log.warning("A lease queue named in %r is not used: %s.", self._spares, error)
            return False
        return True

    @property
    def _spares(self) -> str:
        return self.queues.spares(self._producer.lease)

    def is_empty(self, link: ConnectionThread, name: str) -> bool:
        """Whether a lease queue is there, alive and empty by its own word.

        One that is dead, or slow to answer, has a count too: 0.
        """
        return self.depth(link, name) == 0 and self._is_empty(link, name) is True

    @staticmethod
    def _is_empty(link: ConnectionThread, name: str) -> bool | None:
        """Whether there is nothing to get from a queue; ``None`` if it does not answer."""
        try:
            getter = Getter(link, name)
            empty = getter.get(_GET_TIMEOUT) is None
        except ProducerUnavailable:
            return None
        getter.close()
        return empty

    def _lease_arguments(self) -> dict[str, Any]:
        return lease_arguments(self.queues, self._producer.lease, quorum=self._quorum)

    def _declare_lease(self, link: ConnectionThread, name: str) -> None:
        channel = link.channel()
        try:
            channel.call(
                "queue_declare", queue=name, durable=True, arguments=self._lease_arguments()
            )
        except Refused as error:
            raise explained(error, f"the lease queue {name!r}") from None
        channel.close()

    def ensure_returns(self, link: ConnectionThread, *, rely: bool = True) -> None:
        """Declare the returns queue.

        :param rely: Whether something is published to it next, so that it must be old enough.
        """
        arguments = self.queues.returns_arguments(quorum=self._quorum)
        self._ensure(link, self.queues.returns, arguments, rely=rely)

    def ensure_quarantine(self, link: ConnectionThread) -> None:
        """Declare the quarantine queue."""
        arguments = self.queues.returns_arguments(quorum=self._quorum)
        self._ensure(link, self.queues.quarantine, arguments)

    def ensure_dead(
        self, link: ConnectionThread, wanted: bool = True, *, rely: bool = True
    ) -> None:
        """Declare the dead-letter queue, if it is ours."""
        if wanted and self._producer.dead_letter is None:
            arguments = self.queues.returns_arguments(quorum=self._quorum)
            self._ensure(link, self.queues.dead, arguments, rely=rely)

    def ensure_delay(self, link: ConnectionThread, step: int) -> str:
        """Declare a step of the delay ladder; its name."""
        name = self.queues.delay(step)
        self._ensure(link, name, self.queues.delay_arguments(step, quorum=self._quorum))
        return name

    def depth(self, link: ConnectionThread, name: str) -> int | None:
        """Messages that are ready in a queue; ``None`` if there is no such queue."""
        channel = link.channel()
        try:
            declared = channel.call("queue_declare", queue=name, passive=True)
        except Refused as error:
            if error.code == 404:
                return None
            raise explained(error, f"the queue {name!r}") from None
        channel.close()
        return int(declared.method.message_count)

    def fence(self, link: ConnectionThread, name: str) -> None:
        """Let nobody publish to a lease queue any more.

        :raises ProducerError: If it is none of this source's.
        """
        name = self.queues.own_lease(name)
        channel = link.channel()
        try:
            channel.call("queue_unbind", queue=name, exchange=EXCHANGE, routing_key=name)
        except Refused as error:
            if error.code != 404:
                raise explained(error, f"the lease queue {name!r}") from None
            return
        channel.close()

    def delete(self, link: ConnectionThread, name: str) -> int:
        """Delete a lease queue; how many bundles it held.

        It is emptied first, because only a queue that has a leader answers that.  One that is
        deleted before it has one, as just after the broker's start, is gone when its dead-letter
        worker starts: the worker fails, RabbitMQ 3.10 then ends those of all queues, and takes no
        new lease queue (INTERNAL_ERROR) until it is started again (probed: 7 times of 8).

        :raises ProducerError: If it is none of this source's.
        """
        name = self.queues.own_lease(name)
        return self._purge(link, name) + self._delete(link, name)

    @staticmethod
    def _purge(link: ConnectionThread, name: str) -> int:
        channel = link.channel()
        try:
            purged = channel.call("queue_purge", queue=name)
        except Refused as error:
            if error.code == 404:
                return 0
            raise explained(error, f"the queue {name!r}") from None
        channel.close()
        return int(purged.method.message_count)

    @staticmethod
    def _delete(link: ConnectionThread, name: str) -> int:
        channel = link.channel()
        try:
            deleted = channel.call("queue_delete", queue=name)
        except Refused as error:
            if error.code == 404:
                return 0
            raise explained(error, f"the queue {name!r}") from None
        channel.close()
        return int(deleted.method.message_count)

    def _ensure(
        self, link: ConnectionThread, name: str, arguments: dict[str, Any], *, rely: bool = True
    ) -> None:
        key = f"{id(link)} {name}"
        if key not in self._made:
            if self.depth(link, name) is None:
                # Before it is there again: who finds it there must not take it for the old one.
                self._journal.note_declared(name)
            self._declare(link, name, arguments)
            self._made.add(key)
            if self._quorum and not self._journal.relied(name):
                self._young[name] = arguments, time.monotonic()
        if rely:
            self._rely(link)

    @staticmethod
    def _declare(link: ConnectionThread, name: str, arguments: dict[str, Any]) -> None:
        channel = link.channel()
        try:
            channel.call("queue_declare", queue=name, durable=True, arguments=arguments)
        except Refused as error:
            raise explained(error, f"the queue {name!r}") from None
        channel.close()

    def _rely(self, link: ConnectionThread) -> None:
        """Wait until queues that may be new are old enough, and see that they answer.

        :raises ProducerUnavailable: If one does not.
        """
        for name, (arguments, since) in list(self._young.items()):
            time.sleep(max(0.0, since + _SETTLED - time.monotonic()))
            if not self._is_alive(link, name):
                self._declare_anew(link, name, arguments)
            self._journal.note_relied(name)
            del self._young[name]

    def _is_alive(self, link: ConnectionThread, name: str) -> bool:
        """Whether a queue answers; one that has messages and may not give them up is not asked."""
        depth = self.depth(link, name)
        return bool(depth) or (depth == 0 and self._is_empty(link, name) is not None)

    def _declare_anew(self, link: ConnectionThread, name: str, arguments: dict[str, Any]) -> None:
        """Replace a queue that never answered since it was declared, and so holds nothing."""
        for _ in range(_TRIES):
            # Whoever relies on a queue has noted that before: this one was declared by a run of
            # ours, and then RabbitMQ died.
            if self._journal.relied(name) is not False:
                break
            log.warning("The queue %r was declared, and never answered: it is made anew.", name)
            self._delete(link, name)
            self._declare(link, name, arguments)
            time.sleep(_SETTLED)
            if self._is_alive(link, name):
                return
        raise ProducerUnavailable(
            f"the queue {name!r} does not answer: RabbitMQ may have died right after it was"
            " declared; look at its log, and if the queue stays so and holds nothing, delete it"
            " (rabbitmqctl delete_queue): the next run declares it anew"
        )


def _token(data: bytes) -> tuple[object, float]:
    """The queue that a token names, whoever wrote it, and when it was declared.

    In seconds since the epoch; 0 where that is not said.
    """
    try:
        value = json.loads(data)
    except ValueError:  # not UTF-8, too
        return data, 0.0
    if not isinstance(value, dict):
        return value, 0.0
    at = value.get("at")
    return value.get("queue"), float(at) if isinstance(at, int | float) else 0.0
