"""Subjects over Kafka: one server, with separate topics and a group per case.

Each process task of a run reads one partition, so that all runs are the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

from airflow_broadway import Broadway
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.kafka.records import REQUEUED
from airflow_broadway.testing.crashes.interceptor import Boundary
from airflow_broadway.testing.crashes.sink import call_in_fork
from airflow_broadway.testing.crashes.subject import DeadLetter, Subject
from tests.crashes.kafka_calls import Kafka
from tests.crashes.receipt_subject import common_options
from tests.crashes.subjects import MakeSubject
from tests.kafka_server import KafkaServer, nearest_kafka

#: Number of message keys.
_KEYS = 3


@contextmanager
def open_subjects(*, order: str) -> Iterator[MakeSubject]:
    """Yields a function that creates subjects with one value of the option ``order``."""
    with (
        tempfile.TemporaryDirectory(prefix="crashes-kafka-") as folder,
        nearest_kafka().start(Path(folder)) as server,
    ):
        yield partial(_OnKafka, server, order)


class _OnKafka(Subject):
    """A pipeline over a topic and its dead-letter topic."""

    # A group's newest claims are permanent.
    permanent: ClassVar[str] = (
        r"^[^/]+/kafka/[0-9a-f]+/(?:owner|starts|(?:claims|letters)/.+)(?:\.json)?$"
    )

    def __init__(
        self, server: KafkaServer, order: str, pipeline: type[Broadway], folder: Path
    ) -> None:
        super().__init__(pipeline, folder)
        self._server = server
        self._order = order
        self._topic = f"crashes-{hashlib.md5(str(folder).encode()).hexdigest()[:12]}"
        self._partitions = pipeline.producer.concurrency
        # The mock cluster accepts one command at a time, from all processes.
        with (server.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            server.topic(self._topic, self._partitions)
            server.topic(f"{self._topic}-dlt")
            self._topics = [self._topic]
            if order == "none":
                self._topics.append(server.topic(f"{self._topic}.retry", self._partitions))

    def boundaries(self) -> list[Boundary]:
        return [Kafka(), *super().boundaries()]

    def overrides(self) -> Mapping[str, Any]:
        return {
            "producer": KafkaProducer(
                hosts=self._server.bootstrap,
                conn_id=None,
                group_id=self._topic,
                topics=[self._topic],
                order=self._order,
                offset_reset_policy="earliest",
                lease=self.lease,
                settings={"fetch.wait.max.ms": 20},
                **common_options(self.pipeline.producer, KafkaProducer.actions),
            )
        }

    # Clients have threads, so each is used in a separate process: this process forks.

    def _call_in_fork(self, do: Callable[[], Any]) -> Any:
        return call_in_fork(do, self.folder, self.folder / "log.txt", "the broker")

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        ids: list[str] = self._call_in_fork(lambda: self._produce(bodies))
        return ids

    def _produce(self, bodies: Sequence[bytes]) -> list[str]:
        producer = self._server.producer({"linger.ms": 0, "partitioner": "consistent"})
        ids: dict[int, str] = {}

        def report(place: int, error: Any, sent: Any) -> None:
            assert error is None, error
            ids[place] = f"{sent.topic()}-{sent.partition()}-{sent.offset()}"

        for place, body in enumerate(bodies):
            number = int(body)
            producer.produce(
                self._topic,
                body,
                b"%d" % (number % _KEYS),
                number % self._partitions,
                on_delivery=partial(report, place),
            )
        assert not producer.flush(30)
        return [ids[place] for place in range(len(bodies))]

    def waiting(self) -> int:
        result: int = self._call_in_fork(self._total_lag)
        return result

    def _total_lag(self) -> int:
        """Returns the group's lag, which includes finished messages behind an unfinished one."""
        return sum(self._server.lag(self._topic, topic) for topic in self._topics)

    def letters(self) -> list[DeadLetter]:
        return [
            DeadLetter(key, marked, reason, body.encode())
            for key, marked, reason, body in self._call_in_fork(self._read_letters)
        ]

    def _read_letters(self) -> list[tuple[str, bool, str, str]]:
        """Reads the dead letters that were not requeued; the log contains all."""
        requeued = {
            value.decode()
            for message in self._server.read(self._topic)
            for name, value in cast("Any", message.headers()) or ()
            if name == REQUEUED
        }
        letters = []
        for message in self._server.read(f"{self._topic}-dlt"):
            headers: Any = message.headers()
            attributes = {name: value.decode() for name, value in headers}
            where = (
                attributes[f"__connect.errors.{part}"] for part in ("topic", "partition", "offset")
            )
            key, report = "-".join(where), attributes["__connect.errors.exception.message"]
            if key not in requeued:
                body = cast("bytes", message.value()).decode()
                letters.append((key, attributes["broadway.again"] == "1", report, body))
        return letters

    def group_of(self, place: int) -> str | None:
        if self._order == "none":
            return None
        return f"{place % self._partitions}, {place % _KEYS}"
