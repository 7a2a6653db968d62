"""The lease of a generation that receives: its queue at the broker, and until when it holds."""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.bundle import Header, pack
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

#: A generation takes nothing more when this part of its lease is left.
_LEASE_MARGIN = 0.02


class OpenLease:
    """The lease of one generation, from its first message on; for the run's thread."""

    def __init__(self, env: ProducerEnv, options: RabbitMQOptions, queues: StandingQueues) -> None:
        self._generation = env.generation
        self._owner = dict(env.owner)
        self._clock = env.clock
        self._options = options
        self._seconds = options.lease
        self._queues = queues
        self._lapsed: LeaseLapsed | None = None
        #: The holding queue; empty until it is opened.
        self.queue = ""
        self._earlier = ""
        self.deadline = self._fresh_deadline()

    @property
    def is_open(self) -> bool:
        """Whether there is a holding queue: an empty run opens none."""
        return self.queue != ""

    def open(self, connection: ConnectionThread) -> None:
        """Open a holding queue.

        :raises LeaseLapsed: If the generation was released before it began.
        :raises ProducerError: If it is not to be relied on, or the broker refuses.
        """
        self._queues.prepare_dead(connection)
        self.deadline = self._fresh_deadline()
        self.queue = self._queues.holding.open(
            connection,
            self._queues.ensure_held,
            self._generation,
            pack(self.header(f"{self._generation}.0", 0), []),
            earlier=self._earlier,
            note=self._note,
        )

    def header(self, bundle: str, count: int) -> Header:
        """The header of one of the generation's bundles."""
        return Header(
            bundle=bundle,
            generation=self._generation,
            queue=self._options.queue,
            count=count,
            until=self.deadline.timestamp(),
            owner=self._owner,
        )

    def _note(self, name: str) -> None:
        """Note the holding queue, before it is bound; then see that nobody has released us."""
        self._earlier = name
        self._queues.journal.note_opened(self._generation, name, self.deadline)
        if self._queues.journal.is_over(self._generation):
            self._lapsed = LeaseLapsed(
                "this run's task was released before its first message, by a sweep or by hand:"
                " clear the task to receive again"
            )
            raise self._lapsed

    def check_deadline(self) -> None:
        """See that there is time left to receive.

        :raises LeaseLapsed: If there is not; from then on, :meth:`refuse_if_lapsed` raises it too.
        """
        left = (self.deadline - self._clock.now()).total_seconds()
        if not self.is_open:  # what holds nothing cannot lapse
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
