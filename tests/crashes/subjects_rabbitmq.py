"""RabbitMQ: a real server, with a queue of its own for each case."""

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
from airflow_broadway.testing.crashes.subject import Letter, Subject
from tests.crashes.amqp_calls import Amqp
from tests.crashes.campaigns import in_memory
from tests.crashes.over_receipts import declared
from tests.rabbitmq_server import RabbitServer

#: The queues of ours that stay.
_STANDING = ("held", "dead", "delay")
#: Seconds for the broker to move what a test has let lapse.
_MOVE_TIMEOUT = 20.0
#: Seconds that it needs where its end cannot be observed.
_MOVE_TIME = 0.5


class _Hurry:
    """Cuts waits that are for a broker that dies, and lengthens the one that fills a bundle."""

    def install(self, interceptor: Interceptor) -> None:
        standing_queues._RELIABLE_AGE = 0.0
        settlement.COUNT_TIMEOUT = 1.0
        # A bundle has the same messages in every run, however slowly they come.
        consumer.LINGER_SECONDS = 0.5


class Rabbit(Subject):
    """A pipeline over a queue of RabbitMQ.

    The clock of the broker cannot be moved.  So where a delay is over by the tasks' clock, what it
    holds is rejected: it goes where it would go by itself, by the same dead-letter worker.
    """

    permanent: ClassVar[str] = r"^[^/]+/rabbitmq/[0-9a-f]+/(?:relied/|type\.json$)"

    def __init__(self, server: RabbitServer, pipeline: type[Broadway], folder: Path) -> None:
        super().__init__(pipeline, folder)
        self._server = server
        self._queue = f"crashes-{uuid.uuid4().hex}"
        with self._server.channel() as channel:
            channel.queue_declare(self._queue, durable=True)

    def boundaries(self) -> list[Boundary]:
        return [*super().boundaries(), Amqp(self._plain), _Hurry()]

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
                **declared(self.pipeline.producer, RabbitMQProducer.actions),
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

    def letters(self) -> list[Letter]:
        result: list[Letter] = []
        name = f"broadway.dead.{self._queue}"
        if name not in self._queues():
            return result
        with self._server.channel() as channel:
            while (got := channel.basic_get(name))[0] is not None:
                headers = got[1].headers or {}
                marked = bool(headers.get("x-broadway-redelivered"))
                reason = str(headers.get("x-broadway-reason", ""))
                result.append(Letter(got[1].message_id, marked, reason, got[2]))
        return result

    def restart(self) -> None:
        self._server.stop()
        self._server.run()

    def pass_time(self, seconds: float) -> None:
        for name in self._queues():
            if _role(name) == "delay" and seconds >= int(name.split(".")[2]):
                self._lapse(name, self._queue)

    def _lapse(self, queue: str, target: str) -> None:
        count = 0
        before = self._server.depth(target) or 0
        with self._server.channel() as channel:
            while (got := channel.basic_get(queue))[0] is not None:
                channel.basic_nack(got[0].delivery_tag, requeue=False)
                count += 1
        if not count:
            return
        with self._server.channel() as channel:
            if channel.queue_declare(target, passive=True).method.consumer_count:
                time.sleep(_MOVE_TIME)  # one that sleeps consumes: it may get them
                return
        end = time.monotonic() + _MOVE_TIMEOUT
        while (self._server.depth(target) or 0) < before + count:
            assert time.monotonic() < end, f"{queue} does not pass on what has lapsed"
            time.sleep(0.01)

    def left(self) -> list[str]:
        """Bundles that stay, and queues that are none of those which stay."""
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
        """The queues of this case."""
        return [name for name in self._server.queue_names() if self._queue in name]


def _role(queue: str) -> str:
    return queue.split(".")[1] if queue.startswith("broadway.") else ""


@contextmanager
def rabbit() -> Iterator[Any]:
    """A server of RabbitMQ; what makes a subject at it."""
    with (
        tempfile.TemporaryDirectory(dir=in_memory()) as folder,
        RabbitServer.start(Path(folder)) as server,
    ):
        yield partial(Rabbit, server)
