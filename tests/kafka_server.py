"""Private Kafkas for tests, on loopback only; none of them is Apache Kafka itself.

:class:`MockKafka` is librdkafka's mock cluster, in a process of its own (``tests/kafka_mock.py``).
:class:`NoidaKafka` is ``noida-db``, one binary that keeps a folder.  ``KAFKA_BOOTSTRAP`` names a
real broker: :class:`RealKafka` uses it as it is.  What each can is in ``can``; a test that rests on
it asks for it, and ``tests/integration/test_kafka_peers.py`` shows that it is true.

All of them know what tests ask of a broker without our package: to fill a topic, to read it again,
to say what a group has committed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import confluent_kafka
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from tests.rabbitmq_server import free_port

__all__ = [
    "ADMIN",
    "GROUPS",
    "QUICK",
    "RESTART",
    "RETENTION",
    "TIMES",
    "TRANSACTIONS",
    "KafkaServer",
    "MockKafka",
    "NoidaKafka",
    "RealKafka",
    "find_noida",
    "given_bootstrap",
]

Settings = Mapping[str, Any]
_NONE: Settings = {}

#: Of a client that does not wait half of 100 ms between the connections of its start.
QUICK: Settings = {"reconnect.backoff.ms": 1}

ROOT = Path(__file__).resolve().parent.parent

#: What a peer may know.  Topics are deleted and get partitions; a group's offsets are deleted.
ADMIN = "admin"
#: Who is a member of a group is known to everybody.
GROUPS = "groups"
#: What was produced a second ago outlives a ``kill -9``.
RESTART = "restart"
#: A topic's oldest messages go, by its settings and when asked.
RETENTION = "retention"
#: The offset at an instant is found.
TIMES = "times"
#: What was aborted is hidden, and what is open ends what may be read.
TRANSACTIONS = "transactions"


def given_bootstrap() -> str | None:
    """The real broker that the environment names, if any."""
    return os.environ.get("KAFKA_BOOTSTRAP") or None


def find_noida() -> Path | None:
    """The program of ``noida-db``, if its package is installed."""
    spec = importlib.util.find_spec("noida_db")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).with_name("noida-db")


@dataclass
class KafkaServer(ABC):
    """One cluster, and what tests do to it.

    :param folder: Where it keeps what it keeps, its log at least.
    :param bootstrap: ``host:port``; that of a server of ours once it runs.
    :param settings: What every client of the tests is to have besides.
    """

    kind: ClassVar[str]
    can: ClassVar[frozenset[str]]

    folder: Path
    bootstrap: str = ""
    process: subprocess.Popen[bytes] | None = None
    settings: Settings = field(default_factory=dict)

    @classmethod
    def start(cls, folder: Path) -> Self:
        """A cluster that answers."""
        server = cls(folder)
        server.run()
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- its life ------------------------------------------------------------------------------

    @abstractmethod
    def run(self) -> None:
        """Start it, with whatever it has kept, and wait until it answers."""

    def kill(self) -> None:
        """``kill -9``."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """End it, in order if it will."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    # -- clients of it -------------------------------------------------------------------------

    def connection(self, **extra: Any) -> dict[str, Any]:
        """The Airflow connection of it, in Airflow's JSON form."""
        return {"conn_type": "kafka", "extra": {"bootstrap.servers": self.bootstrap, **extra}}

    def producer(self, settings: Settings = _NONE) -> Producer:
        """A producer; ``settings`` are librdkafka's."""
        return Producer({**self.client, **settings})

    @contextmanager
    def consumer(self, group: str = "the tests", settings: Settings = _NONE) -> Iterator[Consumer]:
        """A consumer that commits nothing by itself and creates no topic."""
        base = {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
            # An end is told when the broker's wait is over.
            "fetch.wait.max.ms": 20,
        }
        made = Consumer({**base, **self.client, **settings})
        try:
            yield made
        finally:
            made.close()

    def admin(self) -> AdminClient:
        """For what :class:`KafkaServer` has no method for; it must outlive its futures."""
        return AdminClient(self.client)

    @property
    def client(self) -> dict[str, Any]:
        """The settings of every client of it."""
        return {"bootstrap.servers": self.bootstrap, "log_level": 0, **QUICK, **self.settings}

    # -- its topics ----------------------------------------------------------------------------

    def topic(
        self, name: str | None = None, partitions: int = 1, settings: Mapping[str, str] = _NONE
    ) -> str:
        """Create a topic, with settings of topics, and return its name."""
        name = name or f"topic-{uuid.uuid4().hex}"
        new = NewTopic(name, partitions, 1, config=dict(settings))
        admin = self.admin()
        [made] = admin.create_topics([new]).values()
        made.result(timeout=30)
        return name

    def delete_topic(self, name: str) -> None:
        admin = self.admin()
        [gone] = admin.delete_topics([name]).values()
        gone.result(timeout=30)

    def add_partitions(self, name: str, total: int) -> None:
        """Let a topic have so many partitions."""
        admin = self.admin()
        [made] = admin.create_partitions([NewPartitions(name, total)]).values()
        made.result(timeout=30)

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Let a partition's messages before an offset go, as retention does."""
        admin = self.admin()
        [gone] = admin.delete_records([TopicPartition(topic, partition, offset)]).values()
        gone.result(timeout=30)

    def delete_group(self, group: str) -> None:
        """Let a group's offsets go, as a week without members does."""
        admin = self.admin()
        [gone] = admin.delete_consumer_groups([group]).values()
        gone.result(timeout=30)

    def partitions(self, topic: str) -> list[int]:
        """The numbers of a topic's partitions; none if there is no such topic."""
        with self.consumer() as consumer:
            found = consumer.list_topics(topic, timeout=30).topics[topic]
        return sorted(found.partitions)

    def fill(
        self,
        topic: str,
        bodies: Iterable[bytes],
        *,
        partition: int | None = None,
        key: bytes | None = None,
        settings: Settings = _NONE,
    ) -> None:
        """Produce messages, and wait until the broker has them.

        :param partition: All go there; else they go round.
        """
        producer = self.producer({"linger.ms": 5, **settings})
        numbers = self.partitions(topic) if partition is None else [partition]
        failed: list[KafkaError] = []

        def told(error: KafkaError | None, _: Any) -> None:
            if error is not None:
                failed.append(error)

        for place, body in enumerate(bodies):
            while True:
                try:
                    number = numbers[place % len(numbers)]
                    producer.produce(topic, body, key, number, on_delivery=told)
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        assert not producer.flush(60), "the broker did not take all messages"
        assert not failed, failed[0]

    def read(
        self,
        topic: str,
        *,
        start: int | None = None,
        timeout: float = 60.0,
        settings: Settings = _NONE,
    ) -> list[confluent_kafka.Message]:
        """All messages that are in a topic, by partition and offset."""
        found: list[confluent_kafka.Message] = []
        with self.consumer(settings=settings) as consumer:
            asked = [
                TopicPartition(
                    topic, number, confluent_kafka.OFFSET_BEGINNING if start is None else start
                )
                for number in self.partitions(topic)
            ]
            consumer.assign(asked)
            ended: set[int] = set()
            until = time.monotonic() + timeout
            while len(ended) < len(asked):
                assert time.monotonic() < until, f"{topic} was not read to its end"
                for message in consumer.consume(1_000, timeout=0.2):
                    error = message.error()
                    if error is None:
                        found.append(message)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        ended.add(message.partition() or 0)
                    else:
                        raise confluent_kafka.KafkaException(error)
        return sorted(found, key=lambda message: (message.partition(), message.offset()))

    def bodies(self, topic: str) -> list[bytes | None]:
        """What :meth:`read` finds, bodies alone."""
        return [message.value() for message in self.read(topic)]

    def watermarks(self, topic: str) -> dict[int, tuple[int, int]]:
        """Partition → its first offset and the one after its last."""
        with self.consumer() as consumer:
            return {
                number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=30)
                for number in self.partitions(topic)
            }

    def committed(self, group: str, topic: str) -> dict[int, tuple[int, str | None]]:
        """Partition → the offset that a group has committed, and its metadata; without others."""
        asked = [TopicPartition(topic, number) for number in self.partitions(topic)]
        with self.consumer(group) as consumer:
            found = consumer.committed(asked, timeout=30)
        return {each.partition: (each.offset, each.metadata) for each in found if each.offset >= 0}

    def commit(
        self, group: str, topic: str, partition: int, offset: int, metadata: str = ""
    ) -> None:
        """Commit as an operator's tool does: without a member."""
        place = TopicPartition(topic, partition, offset, metadata)
        with self.consumer(group) as consumer:
            consumer.commit(offsets=[place], asynchronous=False)

    @contextmanager
    def member(self, group: str, topic: str) -> Iterator[Consumer]:
        """A member of a group, with partitions assigned; ask it to poll to keep it one."""
        with self.consumer(group, {"auto.offset.reset": "earliest"}) as consumer:
            consumer.subscribe([topic])
            until = time.monotonic() + 30
            while not consumer.assignment():
                assert time.monotonic() < until, "the group gave it no partition"
                consumer.poll(0.1)
            consumer.pause(consumer.assignment())
            yield consumer


@dataclass
class MockKafka(KafkaServer):
    """librdkafka's mock cluster.

    :param brokers: How many brokers.
    """

    kind: ClassVar[str] = "mock"
    can: ClassVar[frozenset[str]] = frozenset()

    brokers: int = 1

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "mock.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kafka_mock", str(self.brokers)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.bootstrap = self._answer()

    def tell(self, command: str, *arguments: Any) -> None:
        """Have a command of ``tests/kafka_mock.py`` carried out."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        wrong = self._answer()
        if wrong is not None:
            raise RuntimeError(wrong)

    def _answer(self) -> Any:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.stop()
            tail = (self.folder / "mock.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the mock cluster ended: {tail}")
        return json.loads(line)

    def topic(
        self, name: str | None = None, partitions: int = 1, settings: Mapping[str, str] = _NONE
    ) -> str:
        assert not settings, "the mock's topics have none"
        name = name or f"topic-{uuid.uuid4().hex}"
        self.tell("topic_create", name, partitions, 1)
        return name


@dataclass
class NoidaKafka(KafkaServer):
    """``noida-db``, with its Kafka alone; it keeps its data over :meth:`kill` and :meth:`run`."""

    kind: ClassVar[str] = "noida"
    can: ClassVar[frozenset[str]] = frozenset({ADMIN, GROUPS, RETENTION, TIMES, TRANSACTIONS})

    port: int = field(default_factory=free_port)

    def run(self, *, wait: float = 30.0) -> None:
        program = find_noida()
        if program is None:
            raise RuntimeError("noida-db is not installed")
        # Its package makes it executable at its first start, beside another process maybe.
        program.chmod(0o755)
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [str(program), "start", "--only", "kafka", "--kafka-port", str(self.port)]
        with (self.folder / "noida.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--data-dir", str(self.folder / "data")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + wait
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                tail = (self.folder / "noida.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"noida-db did not start: {tail}")
            time.sleep(0.02)
        self.bootstrap = f"127.0.0.1:{self.port}"

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


@dataclass
class RealKafka(KafkaServer):
    """The broker that the environment names; tests make topics and groups of their own there."""

    kind: ClassVar[str] = "real"
    can: ClassVar[frozenset[str]] = NoidaKafka.can | {RESTART}

    def run(self) -> None:
        given = given_bootstrap()
        if given is None:
            raise RuntimeError("KAFKA_BOOTSTRAP names no broker")
        self.bootstrap = given
