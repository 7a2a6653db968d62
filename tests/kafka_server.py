"""Private Kafkas for tests, on loopback only.

:class:`ApacheKafka` is Apache Kafka itself, of the jars that ``scripts/setup.sh --kafka`` resolves.
:class:`MockKafka` is librdkafka's mock cluster, in a process of its own (``tests/kafka_mock.py``),
for failures on request, and for machines without Maven.
``tests/integration/test_kafka_peers.py`` shows what the mock lacks.

Both have operations without our package: fill and read topics, read committed offsets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import confluent_kafka
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.cimpl import NewPartitions, NewTopic

from tests.rabbitmq_server import free_port
from tests.server_process import Server, answers, start_process
from tests.tls import Authority

__all__ = [
    "PASSWORD",
    "QUICK",
    "QUICK_SOURCE",
    "USER",
    "ApacheKafka",
    "KafkaServer",
    "MockKafka",
    "find_jars",
    "nearest_kafka",
]

Settings = Mapping[str, Any]
_NONE: Settings = {}

#: For a client that reconnects without delay.
QUICK: Settings = {"reconnect.backoff.ms": 1}
#: For a source whose fetches wait 20 ms instead of half a second.
QUICK_SOURCE: Settings = {**QUICK, "fetch.wait.max.ms": 20}

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class KafkaServer(Server):
    """One cluster, and its operations.

    :param folder: Of its data and log.
    :param bootstrap: ``host:port``; set once it runs.
    :param settings: Further settings of every client.
    """

    kind: ClassVar[str]

    folder: Path
    bootstrap: str = ""
    process: subprocess.Popen[bytes] | None = None
    settings: Settings = field(default_factory=dict)

    @classmethod
    def start(cls, folder: Path) -> Self:
        """Starts a cluster."""
        server = cls(folder)
        server.run()
        return server

    # -- life cycle ----------------------------------------------------------------------------

    @abstractmethod
    def run(self) -> None:
        """Starts it on its data, and waits until it answers."""

    def kill(self) -> None:
        """``kill -9``."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Ends it gracefully, or kills it after 20 seconds."""
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

    # -- clients -------------------------------------------------------------------------------

    def connection(self, **extra: Any) -> dict[str, Any]:
        """The Airflow connection of it, in Airflow's JSON form."""
        return {"conn_type": "kafka", "extra": {"bootstrap.servers": self.bootstrap, **extra}}

    def producer(self, settings: Settings = _NONE) -> Producer:
        """Opens a producer; ``settings`` are librdkafka's."""
        return Producer({**self.client, **settings})

    @contextmanager
    def consumer(self, group: str = "the tests", settings: Settings = _NONE) -> Iterator[Consumer]:
        """Opens a consumer without automatic commits and topic creation."""
        base = {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
            # The end of a partition is reported after the broker's wait.
            "fetch.wait.max.ms": 20,
        }
        consumer = Consumer({**base, **self.client, **settings})
        try:
            yield consumer
        finally:
            consumer.close()

    def admin(self) -> AdminClient:
        """Opens an admin client, which must outlive its futures."""
        return AdminClient(self.client)

    def _administer(self, operation: str, items: list[Any]) -> None:
        """Calls an operation of the admin client, and waits for its results."""
        admin = self.admin()
        for future in getattr(admin, operation)(items).values():
            future.result(timeout=30)

    @property
    def client(self) -> dict[str, Any]:
        """The settings of every client of it."""
        return {"bootstrap.servers": self.bootstrap, "log_level": 0, **QUICK, **self.settings}

    # -- topics --------------------------------------------------------------------------------

    def topic(
        self, name: str | None = None, partitions: int = 1, settings: Mapping[str, str] = _NONE
    ) -> str:
        """Creates a topic; returns its name."""
        name = name or f"topic-{uuid.uuid4().hex}"
        new = NewTopic(name, partitions, -1, config=dict(settings))
        self._administer("create_topics", [new])
        self._wait_for_leaders(name, partitions)
        return name

    def _wait_for_leaders(self, name: str, partitions: int) -> None:
        """Waits until every broker knows the topic with all leaders."""
        until = time.monotonic() + 30
        for address in self.bootstrap.split(","):
            while True:
                admin = AdminClient({**self.client, "bootstrap.servers": address})
                topic = admin.list_topics(timeout=30).topics.get(name)
                leaders = [part.leader for part in topic.partitions.values()] if topic else []
                if len(leaders) == partitions and min(leaders) >= 0:
                    break
                assert time.monotonic() < until, f"{name} has no leaders"
                time.sleep(0.01)

    def delete_topic(self, name: str) -> None:
        self._administer("delete_topics", [name])

    def add_partitions(self, name: str, total: int) -> None:
        """Raises a topic's number of partitions."""
        self._administer("create_partitions", [NewPartitions(name, total)])
        self._wait_for_leaders(name, total)

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Deletes a partition's messages before an offset, as retention does."""
        self._administer("delete_records", [TopicPartition(topic, partition, offset)])

    def delete_group(self, group: str) -> None:
        """Deletes a group's offsets, as a week without members does."""
        self._administer("delete_consumer_groups", [group])

    def partitions(self, topic: str) -> list[int]:
        """Returns the numbers of a topic's partitions; none for a missing topic."""
        with self.consumer() as consumer:
            return sorted(consumer.list_topics(topic, timeout=30).topics[topic].partitions)

    def fill(
        self,
        topic: str,
        bodies: Iterable[bytes],
        *,
        partition: int | None = None,
        key: bytes | None = None,
        settings: Settings = _NONE,
    ) -> None:
        """Produces messages, and waits for their delivery.

        :param partition: Of all messages; ``None``: round robin.
        """
        producer = self.producer({"linger.ms": 5, **settings})
        numbers = self.partitions(topic) if partition is None else [partition]
        failed: list[KafkaError] = []

        def report(error: KafkaError | None, _: Any) -> None:
            if error is not None:
                failed.append(error)

        for place, body in enumerate(bodies):
            while True:
                try:
                    number = numbers[place % len(numbers)]
                    producer.produce(topic, body, key, number, on_delivery=report)
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
        """Reads all messages of a topic, by partition and offset."""
        messages: list[confluent_kafka.Message] = []
        with self.consumer(settings=settings) as consumer:
            offset = confluent_kafka.OFFSET_BEGINNING if start is None else start
            places = [TopicPartition(topic, number, offset) for number in self.partitions(topic)]
            consumer.assign(places)
            ended: set[int] = set()
            until = time.monotonic() + timeout
            while len(ended) < len(places):
                assert time.monotonic() < until, f"{topic} was not read to its end"
                for message in consumer.consume(1_000, timeout=0.2):
                    error = message.error()
                    if error is None:
                        messages.append(message)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        ended.add(message.partition() or 0)
                    else:
                        raise KafkaException(error)
        return sorted(messages, key=lambda message: (message.partition(), message.offset()))

    def bodies(self, topic: str) -> list[bytes | None]:
        """Reads the bodies of a topic."""
        return [message.value() for message in self.read(topic)]

    def watermarks(self, topic: str) -> dict[int, tuple[int, int]]:
        """Returns the first offset and the end of each partition."""
        with self.consumer() as consumer:
            return {
                number: consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=30)
                for number in self.partitions(topic)
            }

    def committed(self, group: str, topic: str) -> dict[int, tuple[int, str | None]]:
        """Returns a group's committed offset and metadata per partition."""
        places = [TopicPartition(topic, number) for number in self.partitions(topic)]
        with self.consumer(group) as consumer:
            committed = consumer.committed(places, timeout=30)
        return {
            place.partition: (place.offset, place.metadata)
            for place in committed
            if place.offset >= 0
        }

    def lag(self, group: str, topic: str) -> int:
        """Returns a group's lag on a topic."""
        committed = self.committed(group, topic)
        return sum(
            end - committed.get(partition, (low, ""))[0]
            for partition, (low, end) in self.watermarks(topic).items()
        )

    def commit(
        self, group: str, topic: str, partition: int, offset: int, metadata: str = ""
    ) -> None:
        """Commits without a member, as an operator's tool does."""
        place = TopicPartition(topic, partition, offset, metadata)
        with self.consumer(group) as consumer:
            consumer.commit(offsets=[place], asynchronous=False)

    @contextmanager
    def member(self, group: str, topic: str) -> Iterator[Consumer]:
        """Joins a group; it remains a member while it polls."""
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
        """Executes a command of ``tests/kafka_mock.py``."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        error = self._answer()
        if error is not None:
            raise RuntimeError(error)

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


#: A principal restricted by ACLs, with TLS and a password.
USER, PASSWORD = "alice", "pass word of the tests"

_CLUSTER_ID = "airflow-broadway-tests"
_JAVA_OPTIONS = ("-Xms64m", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_LOG_LEVEL = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


@dataclass
class ApacheKafka(KafkaServer):
    """Apache Kafka in KRaft mode; its data survives :meth:`kill` and :meth:`run`.

    Clients connect in plain text, with all rights; or to :attr:`secure` by SASL_SSL, where
    :data:`USER` has the rights of its ACLs.

    :param brokers: Nodes, each a broker and a controller; their ids are 1 and so on.
    :param address: Where clients in plain text find it.
    """

    kind: ClassVar[str] = "apache"

    brokers: int = 1
    address: str = "127.0.0.1"
    nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def run(self, *, wait: float = 90.0) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.ports:
            self.authority = Authority.make(self.folder, "authority")
            certificate, key = self.authority.sign("broker", "127.0.0.1")
            (self.folder / "keystore.pem").write_bytes(key.read_bytes() + certificate.read_bytes())
            for node in range(1, self.brokers + 1):
                self.ports[node] = (free_port(), free_port(), free_port())
            for node in self.ports:
                self._format(node)
        for node in self.ports:
            self.run_node(node)
        self.bootstrap = ",".join(f"{self.address}:{plain}" for plain, _, _ in self.ports.values())
        self._wait(time.monotonic() + wait)

    @property
    def secure(self) -> str:
        """The addresses for SASL_SSL."""
        return ",".join(f"127.0.0.1:{secure}" for _, secure, _ in self.ports.values())

    @property
    def trusted(self) -> dict[str, Any]:
        """The settings of a client that connects as :data:`USER`."""
        return {
            "bootstrap.servers": self.secure,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
            "ssl.ca.location": str(self.authority.certificate),
        }

    def allow(self, kind: str, name: str, *operations: str) -> None:
        """Gives :data:`USER` rights, as ``("topic", name, "read", "describe")``."""
        pattern, host, allow = ResourcePatternType.LITERAL, "*", AclPermissionType.ALLOW
        resource = ResourceType[kind.upper()]
        rights = [
            AclBinding(resource, name, pattern, f"User:{USER}", host, AclOperation[right], allow)
            for right in map(str.upper, operations)
        ]
        self._administer("create_acls", rights)

    def run_node(self, node: int) -> None:
        """Starts one of the nodes."""
        command = _java("kafka.Kafka", self._file(node))
        self.nodes[node] = start_process(command, self.folder / f"node-{node}.log")

    def kill_node(self, node: int) -> None:
        """``kill -9`` of one of the nodes."""
        process = self.nodes.pop(node)
        process.kill()
        process.wait()

    def tool(self, name: str, *arguments: str) -> str:
        """Runs a tool, e.g. ``consumer.group.ConsumerGroupCommand``; returns its output."""
        command = _java(f"org.apache.kafka.tools.{name}", "--bootstrap-server", self.bootstrap)
        done = subprocess.run(
            [*command, *arguments], check=False, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def consumer_groups(self, *arguments: str) -> str:
        """Runs ``kafka-consumer-groups.sh``; returns its output."""
        return self.tool("consumer.group.ConsumerGroupCommand", *arguments)

    def _signal(self, number: signal.Signals) -> None:
        nodes, self.nodes = self.nodes, {}
        for process in nodes.values():
            process.send_signal(number)
        for process in nodes.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _file(self, node: int) -> str:
        return str(self.folder / f"node-{node}.properties")

    def _format(self, node: int) -> None:
        plain, secure, controller = self.ports[node]
        voters = ",".join(f"{node}@127.0.0.1:{ports[2]}" for node, ports in self.ports.items())
        copies = min(3, self.brokers)
        listeners = f"PLAINTEXT://{self.address}:{plain},SASL_SSL://127.0.0.1:{secure}"
        settings = {
            "process.roles": "broker,controller",
            "node.id": node,
            "controller.quorum.voters": voters,
            "listeners": f"{listeners},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": listeners,
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": (
                "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL"
            ),
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": self.folder / "keystore.pem",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "log.dirs": self.folder / f"data-{node}",
            "auto.create.topics.enable": "false",
            "default.replication.factor": copies,
            "min.insync.replicas": max(1, copies - 1),
            "offsets.topic.num.partitions": 1,
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": max(1, copies - 1),
            "group.initial.rebalance.delay.ms": 0,
            "log.index.size.max.bytes": 1_048_576,
            "broker.session.timeout.ms": 6_000,
            "num.network.threads": 2,
            "num.io.threads": 4,
        }
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        Path(self._file(node)).write_text(text)
        scram = f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"
        subprocess.run(
            _java(
                "kafka.tools.StorageTool",
                *("format", "-t", _CLUSTER_ID, "-c", self._file(node), "--add-scram", scram),
            ),
            check=True,
            capture_output=True,
            timeout=120,
        )

    def _wait(self, end: float) -> None:
        """Waits until clients know every node."""
        while True:
            gone = [node for node, process in self.nodes.items() if process.poll() is not None]
            if gone or time.monotonic() > end:
                tail = (self.folder / f"node-{(gone or [1])[0]}.log").read_text(errors="replace")
                self.stop()
                raise RuntimeError(f"Apache Kafka did not start: {tail[-2000:]}")
            if all(answers(self.address, plain) for plain, _, _ in self.ports.values()):
                with self.consumer() as consumer, suppress(KafkaException):
                    if len(consumer.list_topics(timeout=1).brokers) == len(self.nodes):
                        return
            time.sleep(0.05)


def find_jars() -> Path | None:
    """Returns the folder of Apache Kafka's jars, resolved by ``scripts/setup.sh --kafka``."""
    folder = ROOT / "build" / "kafka"
    return folder if (folder / ".whole").exists() else None


def nearest_kafka() -> type[KafkaServer]:
    """Returns Apache Kafka where its jars exist, else librdkafka's mock cluster."""
    return MockKafka if find_jars() is None else ApacheKafka


def _java(main: str, *arguments: str) -> list[str]:
    jars = find_jars()
    if jars is None:
        raise RuntimeError("Apache Kafka is not installed: scripts/setup.sh --kafka")
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    return [java, *_JAVA_OPTIONS, _LOG_LEVEL, "-cp", f"{jars}/*", main, *arguments]
