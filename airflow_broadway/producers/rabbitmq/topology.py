"""Declares, binds and looks at queues."""

from __future__ import annotations

import inspect
import json
import time
import uuid
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.checks import act_on, check_queues, refuse_version
from airflow_broadway.producers.rabbitmq.getter import Getter
from airflow_broadway.producers.rabbitmq.journal import Journal, digest
from airflow_broadway.producers.rabbitmq.link import Channel, Link, Refused
from airflow_broadway.producers.rabbitmq.properties import encode
from airflow_broadway.producers.rabbitmq.publisher import Publisher
from airflow_broadway.producers.rabbitmq.queues import EXCHANGE, Queues, lease_arguments

if TYPE_CHECKING:
    from airflow_broadway.producers.rabbitmq.producer import RabbitMQProducer

__all__ = ["Topology", "explained"]


#: Seconds from declaring a quorum queue until it is relied on.  RabbitMQ 3.10, killed within the
#: first second, forgets that it has the queue, and with it messages that it has confirmed (probed).
_SETTLED = 2.0
#: Lease queues that are declared until one answers.
_TRIES = 3
#: Seconds that a queue which may be dead may take to answer.
_PATIENCE = 5.0
#: Seconds for which a look at the broker's policies counts.
_CHECKED = 600.0


class Topology:
    """The queues of one producer; calls answer when the broker has."""

    def __init__(self, producer: RabbitMQProducer) -> None:
        self._producer = producer
        self._quorum = producer.queue_type == "quorum"
        self._made: set[str] = set()
        self._spares_answer = True
        self.queues = Queues(producer.queue)

    @property
    def dead(self) -> tuple[str, str]:
        """Exchange and routing key of dead letters."""
        place = self._producer.dead_letter
        if place is None:
            return "", self.queues.dead
        if isinstance(place, str):
            return "", place
        return str(place.get("exchange", "")), str(place.get("routing_key", ""))

    # -- the source ----------------------------------------------------------------------------

    def prepare(self, link: Link, channel: Channel, options: RabbitMQProducer) -> int:
        """Do what the options ask for, and see that the source queue is there; its depth.

        :raises ProducerError: If it is not, or the broker refuses.
        """
        if options.after_connect is not None:
            told = options.after_connect(channel)
            if inspect.isawaitable(told) or told not in (None, True):
                raise ProducerError(
                    f"after_connect must return None, or raise to refuse; it returned {told!r}"
                )
        queue = self.queues.source
        try:
            if options.declare is not None:
                channel.call("queue_declare", queue=queue, **dict(options.declare))
            for exchange, arguments in options.bindings:
                channel.call("queue_bind", queue=queue, exchange=exchange, **dict(arguments))
            declared = channel.call("queue_declare", queue=queue, passive=True)
        except Refused as error:
            raise explained(error, f"the source queue {queue!r}") from None
        return int(declared.method.message_count)

    def refuse_stream(self, link: Link, properties: bytes) -> None:
        """Refuse to read a stream: what is acknowledged there is not removed.

        :param properties: Of a delivery; only those of a stream name their offset.
        """
        if b"x-stream-offset" not in properties:
            return
        channel = link.channel()
        try:
            channel.call(
                "queue_declare",
                queue=self.queues.source,
                durable=True,
                arguments={"x-queue-type": "stream"},
            )
        except Refused as error:
            if error.code == 406 and "x-queue-type" in error.text:
                return  # another type, whose message has come from a stream
        channel.close()
        raise ProducerError(
            f"{self.queues.source!r} is a stream: reading removes nothing from it, so there is"
            " nothing to settle; use a classic or quorum queue, fed by the same exchange"
        )

    # -- our own -------------------------------------------------------------------------------

    def check(self, link: Link, journal: Journal, generation: str, now: float) -> None:
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
        act_on(check_queues(producer, address, version=link.version, lease=lease))
        journal.note_checked(now, what)

    def open_lease(self, link: Link, generation: str) -> str:
        """A lease queue of the generation's own, reachable and empty; its name.

        :raises ProducerUnavailable: If the broker dies meanwhile.
        :raises ProducerError: If the broker refuses.
        """
        self.ensure_returns(link)
        self.ensure_dead(link, self._producer.dead_letter is None)
        spare = self._claim_spare(link)
        if spare is not None:
            self._bind_lease(link, spare)
            return spare
        for number in range(_TRIES):
            name = self.queues.lease(f"{generation}.{number}" if number else generation)
            self._declare_lease(link, name)
            self._bind_lease(link, name)
            time.sleep(_SETTLED)
            # A broker that died meanwhile may have left one without a leader, which never answers
            # again: that holds nothing yet, and nothing is to depend on it.
            if self._answers(link, name):
                return name
        raise ProducerUnavailable(
            f"RabbitMQ declares lease queues that do not answer, the last of them {name!r}: look at"
            " its log"
        )

    def _bind_lease(self, link: Link, name: str) -> None:
        channel = link.channel()
        try:
            channel.call(
                "exchange_declare", exchange=EXCHANGE, exchange_type="direct", durable=True
            )
            channel.call("queue_bind", queue=name, exchange=EXCHANGE, routing_key=name)
        except Refused as error:
            raise explained(error, f"the lease queue {name!r}") from None
        channel.close()

    def leave_spare(self, link: Link) -> None:
        """Declare a lease queue for the next run, unless one waits already."""
        spares = self.queues.spares
        if not self._spares_answer or self.depth(link, spares):
            return
        self._ensure(link, spares, self.queues.returns_arguments(quorum=self._quorum))
        name = self.queues.lease(uuid.uuid4().hex)
        self._declare_lease(link, name)
        publisher = Publisher(link)
        token = json.dumps({"queue": name, "arguments": self._lease_arguments()})
        properties = encode({"delivery_mode": 2, "message_id": name})
        publisher.publish("", spares, properties, token.encode(), key=name)
        publisher.flush()

    def _claim_spare(self, link: Link) -> str | None:
        """A lease queue that an earlier run left, ours alone from now on; ``None`` without one."""
        if not self.depth(link, self.queues.spares):
            return None
        name = None
        try:
            getter = Getter(link, self.queues.spares)
            got = getter.get(_PATIENCE)
        except ProducerUnavailable:
            self._spares_answer = False
            return None
        if got is not None:
            getter.keep(got[0])
            getter.ack()
            try:
                token = json.loads(got[1])
                if token["arguments"] == self._lease_arguments():
                    name = str(token["queue"])
            except (ValueError, TypeError, KeyError):
                name = None
        getter.close()
        return name if name is not None and self._answers(link, name) else None

    def _answers(self, link: Link, name: str) -> bool:
        """Whether a lease queue is there, empty and alive; a dead one still has a count."""
        if self.depth(link, name) != 0:
            return False
        try:
            getter = Getter(link, name)
            empty = getter.get(_PATIENCE) is None
        except ProducerUnavailable:
            return False
        getter.close()
        return empty

    def _lease_arguments(self) -> dict[str, Any]:
        return lease_arguments(self.queues, self._producer.lease, quorum=self._quorum)

    def _declare_lease(self, link: Link, name: str) -> None:
        channel = link.channel()
        try:
            channel.call(
                "queue_declare", queue=name, durable=True, arguments=self._lease_arguments()
            )
        except Refused as error:
            raise explained(error, f"the lease queue {name!r}") from None
        channel.close()

    def ensure_returns(self, link: Link) -> None:
        """Declare the returns queue."""
        arguments = self.queues.returns_arguments(quorum=self._quorum)
        self._ensure(link, self.queues.returns, arguments)

    def ensure_dead(self, link: Link, wanted: bool = True) -> None:
        """Declare the dead-letter queue, if it is ours."""
        if wanted and self._producer.dead_letter is None:
            arguments = self.queues.returns_arguments(quorum=self._quorum)
            self._ensure(link, self.queues.dead, arguments)

    def ensure_delay(self, link: Link, step: int) -> str:
        """Declare a step of the delay ladder; its name."""
        name = self.queues.delay(step)
        self._ensure(link, name, self.queues.delay_arguments(step, quorum=self._quorum))
        return name

    def depth(self, link: Link, name: str) -> int | None:
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

    def fence(self, link: Link, name: str) -> None:
        """Let nobody publish to a lease queue any more."""
        channel = link.channel()
        try:
            channel.call("queue_unbind", queue=name, exchange=EXCHANGE, routing_key=name)
        except Refused as error:
            if error.code != 404:
                raise explained(error, f"the lease queue {name!r}") from None
            return
        channel.close()

    def delete(self, link: Link, name: str) -> int:
        """Delete a queue; how many messages it held."""
        channel = link.channel()
        try:
            deleted = channel.call("queue_delete", queue=name)
        except Refused as error:
            if error.code == 404:
                return 0
            raise explained(error, f"the queue {name!r}") from None
        channel.close()
        return int(deleted.method.message_count)

    def _ensure(self, link: Link, name: str, arguments: dict[str, Any]) -> None:
        key = f"{id(link)} {name}"
        if key in self._made:
            return
        channel = link.channel()
        try:
            channel.call("queue_declare", queue=name, durable=True, arguments=arguments)
        except Refused as error:
            raise explained(error, f"the queue {name!r}") from None
        channel.close()
        self._made.add(key)


def explained(error: Refused, what: str) -> ProducerError:
    """The refusal, with what to do about it."""
    advice = {
        403: "grant the user the permissions in docs/rabbitmq.md",
        404: "create it, or let the option `declare` do so",
        405: "another connection holds it exclusively",
        406: "it exists with other arguments; declare it as it is, or delete it once it is empty",
    }.get(error.code)
    if error.code == 403 and "exclusive use" in error.text:
        advice = "another consumer has it for itself: an option `exclusive`, of a run or elsewhere"
    return ProducerError(f"{what}: {error.text}" + (f"; {advice}" if advice else ""))
