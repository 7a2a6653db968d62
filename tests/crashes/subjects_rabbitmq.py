"""Subjects over RabbitMQ: one server, with a separate queue per case."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pika

from airflow_broadway import Broadway, Message
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.broker import standing_queues
from airflow_broadway.producers.rabbitmq.receive import consumer
from airflow_broadway.producers.rabbitmq.settle import settlement
from airflow_broadway.testing.crashes.interceptor import Boundary, Interceptor
from airflow_broadway.testing.crashes.subject import DeadLetter, Subject
from tests.crashes.amqp_calls import Amqp
from tests.crashes.campaigns import memory_folder
from tests.crashes.receipt_subject import common_options
from tests.rabbitmq_server import RabbitServer

#: Roles of permanent queues.
_STANDING = ("held", "dead", "delay")
#: Maximum seconds for the broker to dead-letter rejected messages.
_MOVE_TIMEOUT = 20.0
#: Seconds to wait where the end cannot be observed.
_MOVE_TIME = 0.5


class _ShortWaits:
    """Shortens waits that only matter with a dying broker, and lengthens the linger of bundles."""

    def install(self, interceptor: Interceptor) -> None:
        standing_queues._RELIABLE_AGE = 0.0
        settlement.COUNT_TIMEOUT = 1.0
        # So that a bundle has the same messages in every run.
        consumer.LINGER_SECONDS = 0.5


class RabbitMQSubject(Subject):
    """A pipeline over a RabbitMQ queue.

    The broker's clock cannot be moved.  So when a delay has expired by the tasks' clock, the
    subject rejects the messages of the delay queue: they are dead-lettered like expired ones.
    """

    permanent: ClassVar[str] = r"^[^/]+/rabbitmq/[0-9a-f]+/(?:relied/|type\.json$)"

    def __init__(self, server: RabbitServer, pipeline: type[Broadway], folder: Path) -> None:
        super().__init__(pipeline, folder)
        self._server = server
        self._queue = f"crashes-{uuid.uuid4().hex}"
        with self._server.channel() as channel:
            channel.queue_declare(self._queue, durable=True)

    def boundaries(self) -> list[Boundary]:
        return [*super().boundaries(), Amqp(self._plain), _ShortWaits()]

    def _plain(self, queue: str) -> str:
        return queue.replace(self._queue, "queue")

    def id_of(self, message: Message) -> str:
        return str(message.metadata["message_id"])

    def archived_id(self, row: Mapping[str, Any]) -> str:
        return str(json.loads(row["metadata"])["message_id"])

    def overrides(self) -> Mapping[str, Any]:
        host, port = self._server.address
        return {
            "producer": RabbitMQProducer(
                queue=self._queue,
                uri=f"amqp://{host}:{port}/?management_url=false",
                lease=self.lease,
                metadata=["message_id"],
                **common_options(self.pipeline.producer, RabbitMQProducer.actions),
            )
        }

    # -- the broker ------------------------------------------------------------------------------

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        ids = [f"m-{body.decode()}" for body in bodies]
        with self._server.channel() as channel:
            channel.confirm_delivery()
            for key, body in zip(ids, bodies, strict=True):
                properties = pika.BasicProperties(delivery_mode=2, message_id=key)
                channel.basic_publish("", self._queue, body, properties)
        return ids

    def waiting(self) -> int:
        return sum(
            self._server.depth(name) or 0
            for name in self._queues()
            if name == self._queue or _role(name) in ("held", "delay")
        )

    def letters(self) -> list[DeadLetter]:
        result: list[DeadLetter] = []
        name = f"broadway.dead.{self._queue}"
        if name not in self._queues():
            return result
        with self._server.channel() as channel:
            while (delivery := channel.basic_get(name))[0] is not None:
                headers = delivery[1].headers or {}
                marked = bool(headers.get("x-broadway-redelivered"))
                reason = str(headers.get("x-broadway-reason", ""))
                result.append(DeadLetter(delivery[1].message_id, marked, reason, delivery[2]))
        return result

    def restart(self) -> None:
        self._server.stop()
        self._server.run()

    def pass_time(self, seconds: float) -> None:
        for name in self._queues():
            if _role(name) == "delay" and seconds >= int(name.split(".")[2]):
                self._expire(name, self._queue)

    def _expire(self, queue: str, target: str) -> None:
        count = 0
        before = self._server.depth(target) or 0
        with self._server.channel() as channel:
            while (delivery := channel.basic_get(queue))[0] is not None:
                channel.basic_nack(delivery[0].delivery_tag, requeue=False)
                count += 1
        if not count:
            return
        with self._server.channel() as channel:
            if channel.queue_declare(target, passive=True).method.consumer_count:
                time.sleep(_MOVE_TIME)  # a suspended consumer may receive them
                return
        end = time.monotonic() + _MOVE_TIMEOUT
        while (self._server.depth(target) or 0) < before + count:
            assert time.monotonic() < end, f"{queue} does not dead-letter its expired messages"
            time.sleep(0.01)

    def leftovers(self) -> list[str]:
        """Describes remaining bundles, and queues that are not permanent."""
        result = []
        for name in self._queues():
            role = _role(name)
            if role == "held" and (name.endswith(".claim") or self._server.depth(name)):
                result.append(f"the holding queue {self._plain(name)}")
            elif name != self._queue and role not in _STANDING:
                result.append(f"the queue {self._plain(name)}")
        return result

    def close(self) -> None:
        with self._server.channel() as channel:
            for name in self._queues():
                channel.queue_delete(name)

    def _queues(self) -> list[str]:
        """Lists the queues of this case."""
        return [name for name in self._server.queue_names() if self._queue in name]


def _role(queue: str) -> str:
    return queue.split(".")[1] if queue.startswith("broadway.") else ""


@contextmanager
def open_subjects() -> Iterator[Any]:
    """Starts a RabbitMQ server; yields a function that creates subjects."""
    with (
        tempfile.TemporaryDirectory(dir=memory_folder()) as folder,
        RabbitServer.start(Path(folder)) as server,
    ):
        yield partial(RabbitMQSubject, server)
