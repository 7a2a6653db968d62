"""The lease of a generation that receives: its queue at the broker, and until when it holds."""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker.sweep import due_at
from airflow_broadway.producers.rabbitmq.broker.topology import Topology
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

__all__ = ["OpenLease"]

#: A generation takes nothing more when this part of its lease is left.
_LEASE_MARGIN = 0.02


class OpenLease:
    """The lease of one generation, from its first message on; for the run's thread."""

    def __init__(
        self, env: ProducerEnv, options: RabbitMQOptions, topology: Topology, journal: QueueJournal
    ) -> None:
        self._generation = env.generation
        self._clock = env.clock
        self._options = options
        self._seconds = options.lease
        self._topology = topology
        self._journal = journal
        self._lapsed: LeaseLapsed | None = None
        #: The lease queue; empty until it is declared.
        self.queue = ""
        self.deadline = self._fresh_deadline()

    @property
    def declared(self) -> bool:
        """Whether there is such a queue: an empty run declares none."""
        return self.queue != ""

    def open(self, connection: ConnectionThread) -> None:
        """Declare the lease queue.

        :raises ProducerError: If it is not to be relied on, or the broker refuses.
        """
        name = self._topology.open_lease(connection, self._generation)
        self.deadline = self._fresh_deadline()
        # Only now may a bundle be in it: a broker that dies while it declares a queue may leave one
        # that never answers again, and nobody must wait for that one.
        due, sure = due_at(self.deadline.timestamp(), self._seconds)
        self._journal.note_opened(self._generation, name, due, sure)
        self.queue = name

    def check_deadline(self) -> None:
        """See that there is time left to receive.

        :raises LeaseLapsed: If there is not; from then on, :meth:`refuse_if_lapsed` raises it too.
        """
        left = (self.deadline - self._clock.now()).total_seconds()
        if not self.declared:  # what holds nothing cannot lapse
            self.deadline = self._fresh_deadline()
        elif left < self._seconds * _LEASE_MARGIN:
            self._lapsed = LeaseLapsed(
                "this run's lease is about to end while it still receives messages: let it receive"
                " for a shorter time (max_seconds), or give the producer a longer lease"
            )
            raise self._lapsed

    def note_lapsed(self, error: LeaseLapsed) -> None:
        """Note that the broker takes no more bundles of this generation."""
        self._lapsed = error

    def refuse_if_lapsed(self) -> None:
        """Raise why the lease is over, if it is.

        :raises LeaseLapsed: If it is.
        """
        if self._lapsed is not None:
            raise self._lapsed

    def _fresh_deadline(self) -> datetime:
        return self._clock.now() + timedelta(seconds=self._seconds)
