"""Gets messages one at a time, and holds them until they are acknowledged."""

from __future__ import annotations

import time
from typing import Any

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import (
    ANSWER_TIMEOUT,
    ConnectionThread,
    Reply,
)
from airflow_broadway.producers.rabbitmq.amqp.errors import MISSING, Refused
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered

#: Acknowledgements at a time.  A quorum queue is sent the first 32 of a channel that it has not yet
#: carried out; the others the broker keeps back, and forgets if the channel is closed before they
#: are due (probed with RabbitMQ 3.10.8).
ACKS_AT_ONCE = 15

#: Seconds for which a queue may take to put back what it was told to; and between two looks.
_BACK_WITHIN = 2.0
_LOOK_INTERVAL = 0.01


class Getter:
    """A channel that gets messages from a queue."""

    def __init__(self, connection: ConnectionThread, queue: str) -> None:
        from pika import spec

        self._channel = connection.channel()
        self._connection = connection
        self._queue = queue
        self._reply: Reply | None = None
        self._kept: list[int] = []
        self._held = 0
        raw, number = self._channel.raw, self._channel.number

        def attach() -> None:
            connection.raw.frames.on_get(number, self._answer)
            raw.add_callback(
                lambda frame: self._answer(None), [spec.Basic.GetEmpty], one_shot=False
            )

        connection.post(attach)

    def get(self, seconds: float = ANSWER_TIMEOUT) -> Delivered | None:
        """Returns the next message; ``None`` if none is ready.

        :raises ProducerUnavailable: If the queue does not answer within ``seconds``.
        """
        raw = self._channel.raw

        def ask(reply: Any) -> None:
            self._channel.await_reply(reply)
            self._reply = reply
            raw.basic_get(self._queue, lambda *_: None)  # what comes is read before pika sees it

        got: Delivered | None = self._connection.ask(ask, seconds)
        self._held += got is not None
        return got

    def keep(self, tag: int) -> None:
        """Note a message that :meth:`ack` is to acknowledge."""
        self._kept.append(tag)

    def ack(self) -> None:
        """Acknowledge what was kept, and no other."""
        kept, self._kept = self._kept, []
        for start in range(0, len(kept), ACKS_AT_ONCE):
            if start and not self._caught_up():
                return
            self._ack(kept[start : start + ACKS_AT_ONCE])

    def _ack(self, tags: list[int]) -> None:
        raw = self._channel.raw
        self._connection.run(lambda: [raw.basic_ack(tag) for tag in tags])
        self._held -= len(tags)

    def _caught_up(self) -> bool:
        """Wait until the queue has done what it was told; ``False`` if it is no more."""
        try:
            self.get()  # in its turn; what comes goes back when the channel is closed
        except Refused as error:
            if error.code != MISSING:
                raise
            return False
        return True

    def close(self) -> None:
        """Close the channel, and wait for it: what was acknowledged is."""
        self._channel.flush_and_close()

    def give_back(self) -> None:
        """Put what was got and not acknowledged into its place, and close the channel.

        A queue may notice only later that a channel has closed, and a quorum queue puts back only
        when that is on its disks: whoever looks before finds less.  So this waits until the queue
        counts them again, though not for long: somebody else may have got them.
        """
        raw = self._channel.raw
        give_up_at = time.monotonic() + _BACK_WITHIN

        def run() -> None:
            if raw.is_open:
                raw.basic_nack(0, multiple=True, requeue=True)

        try:
            whole = self._ready() + self._held if self._held else 0
            self._connection.post(run)
            while whole and self._ready() < whole and time.monotonic() < give_up_at:
                time.sleep(_LOOK_INTERVAL)
        except ProducerError:  # it goes back with its channel
            return
        self.close()

    def _ready(self) -> int:
        declared = self._channel.call("queue_declare", queue=self._queue, passive=True)
        return int(declared.method.message_count)

    def _answer(self, delivered: Delivered | None) -> None:
        # pika keeps waiting for the message itself unless it is told.
        self._channel.raw._on_getok_callback = None
        if self._reply is not None:
            self._reply.give(delivered)
