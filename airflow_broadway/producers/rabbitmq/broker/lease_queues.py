"""Lease queues: what one generation holds lies in one, which a run before has declared if it could.

A queue that was declared just now is not relied on yet.  So each run leaves one for the next, and
its name, a *spare*, in a queue of names.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from typing import TYPE_CHECKING

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.errors import Refused, explained
from airflow_broadway.producers.rabbitmq.amqp.get import Getter
from airflow_broadway.producers.rabbitmq.amqp.properties import encode
from airflow_broadway.producers.rabbitmq.amqp.publisher import Publisher
from airflow_broadway.producers.rabbitmq.broker import queue_calls
from airflow_broadway.producers.rabbitmq.broker.names import EXCHANGE, QueueNames, lease_arguments
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.journal import QueueJournal

if TYPE_CHECKING:
    from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

__all__ = ["LeaseQueues"]

log = logging.getLogger(__name__)

#: Lease queues that are declared until one answers.
_MAX_TRIES = 3
#: Names of lease queues that are read until one can be used: strangers may have written some.
_MAX_SPARES_READ = 10
#: Seconds that the queue of names may take to answer.
_GET_TIMEOUT = 5.0
#: Seconds, beside the lease, after which a lease queue is deleted that never came into use.
_UNUSED_GRACE = 3600.0


class LeaseQueues:
    """Those of one producer.

    :param journal: Where it is noted whose each is.
    """

    def __init__(
        self,
        options: RabbitMQOptions,
        journal: QueueJournal,
        names: QueueNames,
        standing: StandingQueues,
    ) -> None:
        self._journal = journal
        self._names = names
        self._standing = standing
        self._lease = options.lease
        self._concurrency = options.concurrency
        self._quorum = options.queue_type == "quorum"
        self._spares_answer = True
        #: Those that were declared and do not answer.
        self._silent: set[str] = set()

    def open(self, connection: ConnectionThread, generation: str) -> str:
        """A lease queue of the generation's own, reachable and empty; its name.

        :raises ProducerUnavailable: If the broker dies meanwhile.
        :raises ProducerError: If the broker refuses.
        """
        spare = self._claim_spare(connection, generation)
        if spare is not None:
            self._bind(connection, spare)
            return spare
        known = len(self._silent)  # by an earlier connection: one may end it
        for number in range(known, known + _MAX_TRIES):
            name = self._names.lease(f"{generation}.{number}" if number else generation)
            self._note_unused(name)
            if not self._journal.claim(name, generation):
                continue
            self._declare(connection, name)
            self._bind(connection, name)
            queue_calls.await_age()
            # A broker that died meanwhile may have left one without a leader, which never answers
            # again: that holds nothing yet, and nothing is to depend on it.  If it was the network
            # that did not answer, a later run deletes it.
            if self.is_empty(connection, name):
                return name
            self._silent.add(name)
        raise ProducerUnavailable(
            f"RabbitMQ declares lease queues that do not answer, the last of them {name!r}: look at"
            " its log"
        )

    def is_empty(self, connection: ConnectionThread, name: str) -> bool:
        """Whether a lease queue is there, alive, and empty by its own word."""
        return (
            queue_calls.depth(connection, name) == 0
            and queue_calls.is_empty(connection, name) is True
        )

    def fence(self, connection: ConnectionThread, name: str) -> None:
        """Let nobody publish to a lease queue any more.

        :raises ProducerError: If it is none of this source's.
        """
        name = self._names.own_lease(name)
        channel = connection.channel()
        try:
            channel.call("queue_unbind", queue=name, exchange=EXCHANGE, routing_key=name)
        except Refused as error:
            if error.code != 404:
                raise explained(error, f"the lease queue {name!r}") from None
            return
        channel.close()

    def delete(self, connection: ConnectionThread, name: str) -> int:
        """Delete a lease queue; how many bundles it held.

        It is emptied first, because only a queue that has a leader answers that.  One that is
        deleted before it has one, as just after the broker's start, is gone when its dead-letter
        worker starts: the worker fails, RabbitMQ 3.10 then ends those of all queues, and takes no
        new lease queue (INTERNAL_ERROR) until it is started again (probed: 7 times of 8).

        :raises ProducerError: If it is none of this source's.
        """
        return queue_calls.empty_and_delete(connection, self._names.own_lease(name))

    def _declare(self, connection: ConnectionThread, name: str) -> None:
        arguments = lease_arguments(self._names, self._lease, quorum=self._quorum)
        queue_calls.declare(connection, name, arguments)

    @staticmethod
    def _bind(connection: ConnectionThread, name: str) -> None:
        channel = connection.channel()
        try:
            channel.call(
                "exchange_declare", exchange=EXCHANGE, exchange_type="direct", durable=True
            )
            channel.call("queue_bind", queue=name, exchange=EXCHANGE, routing_key=name)
        except Refused as error:
            raise explained(error, f"the lease queue {name!r}") from None
        channel.close()

    # -- spares --------------------------------------------------------------------------------

    def leave_spare(self, connection: ConnectionThread) -> None:
        """Declare a lease queue for the next run, unless enough of them wait already."""
        if not self._spares_answer:
            return
        if (queue_calls.depth(connection, self._spares) or 0) >= self._concurrency:
            return
        self._standing.ensure_spares(connection, self._lease)
        name = self._names.lease(uuid.uuid4().hex)
        self._note_unused(name)
        self._declare(connection, name)
        publisher = Publisher(connection)
        token = json.dumps({"queue": name, "at": time.time()}).encode()
        properties = encode({"delivery_mode": 2, "message_id": name})
        publisher.publish("", self._spares, properties, token, key=name)
        publisher.flush()
        self._journal.note_used(name)

    def _claim_spare(self, connection: ConnectionThread, generation: str) -> str | None:
        """A lease queue that an earlier run left, ours alone from now on; ``None`` without one."""
        for _ in range(_MAX_SPARES_READ):
            if not queue_calls.depth(connection, self._spares):
                return None
            try:
                getter = Getter(connection, self._spares)
                got = getter.get(_GET_TIMEOUT)
            except ProducerUnavailable:
                self._spares_answer = False
                return None
            if got is None:  # another run has it
                getter.close()
                return None
            name, at = self._spare(got[1])
            if name:
                self._note_unused(name)
            getter.keep(got[0])
            getter.ack()
            getter.close()
            if not name:
                continue
            queue_calls.await_age(time.time() - at)
            if self._is_spare(connection, name) and self._journal.claim(name, generation):
                return name
        return None

    def _is_spare(self, connection: ConnectionThread, name: str) -> bool:
        """Whether a queue is there, empty, alive, and declared as this run would declare it."""
        if not self.is_empty(connection, name):
            return False
        try:
            self._declare(connection, name)
        except ProducerUnavailable:
            raise
        except ProducerError as error:
            log.warning("A lease queue named in %r is not used: %s.", self._spares, error)
            return False
        return True

    def _spare(self, data: bytes) -> tuple[str, float]:
        """A lease queue's name, empty if it is none of ours, and when it was declared."""
        named, at = _spare(data)
        try:
            return self._names.own_lease(named), at
        except ProducerError as error:
            log.warning("A lease queue named in %r is not used: %s.", self._spares, error)
            return "", at

    def _note_unused(self, name: str) -> None:
        self._journal.note_unused(name, time.time() + self._lease + _UNUSED_GRACE)

    @property
    def _spares(self) -> str:
        return self._names.spares(self._lease)


def _spare(data: bytes) -> tuple[object, float]:
    """The queue that is named, whoever wrote it, and when it was declared.

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
