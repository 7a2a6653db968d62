"""Reads messages that were published again: who released them, and whether they are here."""

from __future__ import annotations

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.journal import Turns
from airflow_broadway.producers.rabbitmq.marks import Mark, restored
from airflow_broadway.producers.rabbitmq.receive.ids import Ids


class MarkedMessages:
    """Messages with a mark, as one generation receives them.

    :param turns: In which turns the settling of generations published messages.
    """

    def __init__(self, generation: str, ids: Ids, turns: Turns) -> None:
        self._generation = generation
        self._ids = ids
        self._turns = turns

    def is_own(self, mark: Mark) -> bool:
        """Whether this generation has released the message: then it does not take it again."""
        return mark.released_by == self._generation

    def is_known(self, mark: Mark) -> bool:
        """Whether the journal of who released it was read."""
        return self._turns.of(mark.released_by) is not None

    def read_journal(self, generation: str) -> None:
        """Read the journal of a generation.  Not for the connection's thread: it may take long."""
        self._turns.read(generation)

    def held(self, mark: Mark, delivered: Delivered) -> Held | None:
        """The message as it was before; ``None`` if this generation has it already.

        A repetition is only what settling can have made: each turn of it publishes a message once,
        and the journal of who released it names the turns.  All else is a message of its own.
        """
        body = delivered.body
        turns = self._turns.of(mark.released_by) or ()
        try:
            route, properties = restored(
                delivered.route, delivered.properties, trusted=mark.turn in turns
            )
        except ProducerError:  # no mark of ours: a message like any other
            fresh = self._ids.fresh()
            return Held(fresh, 1, True, delivered.route, delivered.properties, body)
        content = hash((mark.released_by, mark.attempt, route, properties, body))
        message_id = self._ids.marked(mark.message_id, content, mark.turn, turns)
        if message_id is None:
            return None
        return Held(message_id, mark.attempt, True, route, properties, body)
