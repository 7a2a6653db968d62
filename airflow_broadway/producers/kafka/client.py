"""The way to one cluster: confluent-kafka's clients, and their errors translated.

A consumer here is no member of its group: it is *assigned* partitions, and commits from outside.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_broadway.core.custody.producer import Connection, ProducerEnv
from airflow_broadway.core.errors import ConnectionMissing, ProducerError, ProducerUnavailable
from airflow_broadway.producers.kafka.admin import Admin
from airflow_broadway.producers.kafka.claims import Place
from airflow_broadway.producers.kafka.errors import Denied, translated
from airflow_broadway.producers.kafka.options import DEFAULT_CONNECTION, KafkaOptions

if TYPE_CHECKING:
    import confluent_kafka

log = logging.getLogger(__name__)

#: What the client says about its connections goes here; it is chatty while brokers restart.
_client_log = logging.getLogger(f"{__name__}.librdkafka")

#: Kilobytes that a consumer fetches ahead.
_QUEUED_KILOBYTES: Final = 16_384
#: Seconds between two tries of a request while a partition or a group has no leader.
_RETRY_INTERVAL: Final = 0.2
#: Errors of a broker that goes away, or of a group whose coordinator did, which the client calls
#: final.
_PASSING: Final = (
    *("_TRANSPORT", "_DESTROY_BROKER", "NOT_COORDINATOR"),
    *("COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS"),
)


class Committed(NamedTuple):
    """What a group has committed for a partition.

    :param metadata: What stands beside the offset: text of whoever committed.
    """

    offset: int
    metadata: str


def library() -> Any:
    """The client's module.

    :raises ConnectionMissing: If it is not installed.
    """
    try:
        import confluent_kafka
    except ImportError:
        raise ConnectionMissing(
            "KafkaProducer needs confluent-kafka: install airflow-broadway[kafka]"
        ) from None
    return confluent_kafka


def settings_of(producer: KafkaOptions, env: ProducerEnv) -> dict[str, Any]:
    """The settings of librdkafka, by connection and options; with secrets.

    :raises ConnectionMissing: If the connection is not there, or nobody names a broker.
    """
    connection = _connection(producer, env)
    made: dict[str, Any] = {}
    if connection is not None:
        made.update({str(name): value for name, value in connection.extra.items()})
        if connection.host and "bootstrap.servers" not in made:
            port = f":{connection.port}" if connection.port else ""
            made["bootstrap.servers"] = f"{connection.host}{port}"
        for name, value in (
            ("sasl.username", connection.login),
            ("sasl.password", connection.password),
        ):
            if value:
                made.setdefault(name, value)
    made.update(producer.settings or {})
    if producer.hosts is not None:
        made["bootstrap.servers"] = _hosts(producer.hosts)
    client = producer.client_config
    if client.sasl is not None:
        made["sasl.mechanism"] = client.sasl
    if client.ssl is not None or client.sasl is not None:
        made["security.protocol"] = _protocol(client.ssl, client.sasl, made)
    if not made.get("bootstrap.servers"):
        raise ConnectionMissing(
            f"nobody says where the Kafka cluster is: give the connection {producer.conn_id!r} an"
            ' extra {"bootstrap.servers": "host:port"}, or the producer hosts="host:port"'
        )
    made["client.id"] = (
        f"{client.client_id_prefix or 'broadway'}-{socket.gethostname()}-{os.getpid()}"
    )
    made["socket.connection.setup.timeout.ms"] = round(client.connect_timeout * 1000)
    return made


def _protocol(ssl: bool | None, sasl: str | None, made: Mapping[str, Any]) -> str:
    given = str(made.get("security.protocol", "plaintext")).upper()
    encrypted = given.endswith("SSL") if ssl is None else ssl
    authenticated = given.startswith("SASL") if sasl is None else True
    plain = "SSL" if encrypted else "PLAINTEXT"
    return f"SASL_{plain}" if authenticated else plain


def _connection(producer: KafkaOptions, env: ProducerEnv) -> Connection | None:
    if producer.conn_id is None:
        return None
    try:
        return env.connections.get(producer.conn_id)
    except ConnectionMissing:
        if producer.hosts is not None and producer.conn_id == DEFAULT_CONNECTION:
            return None
        raise


def _hosts(hosts: Any) -> str:
    if isinstance(hosts, str):
        return hosts
    return ",".join(each if isinstance(each, str) else f"{each[0]}:{each[1]}" for each in hosts)


class Cluster:
    """One consumer of the cluster, outside its group; used from one thread.

    :raises ConnectionMissing: If nobody says where it is, or the client is not installed.
    :raises ProducerError: If the client does not take its settings.
    """

    def __init__(self, producer: KafkaOptions, env: ProducerEnv) -> None:
        self._kafka = library()
        self._producer = producer
        self._settings = settings_of(producer, env)
        self._timeout: float = producer.client_config.request_timeout
        #: What the client said of its connections.
        self._seen: deque[Any] = deque(maxlen=20)
        #: For errors.
        self.where = f"on {self._settings['bootstrap.servers']}"
        self._sender: Any = None
        self._assigned = False
        self.consumer: confluent_kafka.Consumer = self._consumer()
        self.eof: int = self._kafka.KafkaError._PARTITION_EOF
        #: For what only checks want to know.
        self.admin = Admin(self._kafka, self._admin)

    def _consumer(self) -> Any:
        fetch = self._producer.fetch_config
        config = {
            "fetch.min.bytes": fetch.min_bytes,
            "fetch.wait.max.ms": round(fetch.max_wait_time * 1000),
            "max.partition.fetch.bytes": fetch.max_bytes,
            "queued.max.messages.kbytes": _QUEUED_KILOBYTES,
            # Else a damaged batch is handed out as it is, or never comes and nobody says so.
            "check.crcs": True,
            **self._settings,
            "group.id": self._producer.group_id,
            "allow.auto.create.topics": False,
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "error_cb": self._seen.append,
        }
        config.pop("group.instance.id", None)
        return self._made(self._kafka.Consumer, config)

    def _admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        return self._made(
            AdminClient, {**self._without(_OF_CONSUMERS), "error_cb": self._seen.append}
        )

    def _made(self, kind: Any, config: dict[str, Any]) -> Any:
        # What librdkafka would print goes to a logger, which may be told to be quiet.
        try:
            return kind(config, logger=_client_log)
        except (self._kafka.KafkaException, ValueError, TypeError) as error:
            found = translated(error, "the Kafka client cannot be made of its settings", self.where)
            raise ProducerError(f"{found}; look at the extra of the connection") from None

    # -- what there is -------------------------------------------------------------------------

    def metadata(self) -> tuple[str, dict[str, list[int]]]:
        """Returns the cluster's id, and the partitions of each topic that exists, retry topics too.

        :raises ProducerUnavailable: If nobody answers.
        """
        found: dict[str, list[int]] = {}
        cluster = ""
        for topic in sorted(self._producer.topics):
            cluster, numbers = self._topic(topic)
            if numbers:
                found[topic] = numbers
        for topic in sorted(set(map(self._producer.retry_of, self._producer.topics))):
            with suppress(Denied):  # it may not exist: that is the same to a user without rights
                numbers = self.partitions(topic)
                if numbers:
                    found[topic] = numbers
        return cluster, found

    def _topic(self, topic: str) -> tuple[str, list[int]]:
        """A topic's partitions, none if it is not there, and the cluster's id.

        Asked with the consumer: asked with an admin client, or a producer, a topic is created.
        """
        try:
            answer = self.consumer.list_topics(topic, timeout=self._timeout)
        except self._kafka.KafkaException as error:
            raise self.error(error, f"the topic {topic!r} cannot be asked for") from None
        about = answer.topics[topic]
        if about.error is not None and about.error.name() not in (
            "UNKNOWN_TOPIC_OR_PART",
            "_UNKNOWN_TOPIC",
        ):
            raise self.error(about.error, f"the topic {topic!r} cannot be asked for")
        name = answer.cluster_id or self._settings["bootstrap.servers"]
        return str(name), sorted(about.partitions)

    def _without(self, names: Collection[str]) -> dict[str, Any]:
        return {name: value for name, value in self._settings.items() if name not in names}

    def partitions(self, topic: str) -> list[int]:
        """The partitions of a topic; none if it is not there."""
        return self._topic(topic)[1]

    def has_topic(self, topic: str) -> bool:
        """Whether a topic is there."""
        return bool(self._topic(topic)[1])

    def committed(self, places: Sequence[Place]) -> dict[Place, Committed]:
        """What the group has committed, for each partition that has an offset."""
        asked = [self._kafka.TopicPartition(*place) for place in places]
        doing = f"the offsets of the group {self._producer.group_id!r} cannot be read"
        found = self._requested(
            lambda: self.consumer.committed(asked, timeout=self._timeout), doing
        )
        made: dict[Place, Committed] = {}
        for each in found:
            if each.offset >= 0:
                made[each.topic, each.partition] = Committed(each.offset, each.metadata or "")
        return made

    def commit(self, offsets: Mapping[Place, Committed]) -> None:
        """Commit offsets for the group, in one request.

        :raises ProducerError: If the cluster refuses, as where the group has members.
        """
        if not offsets:
            return
        group = self._producer.group_id
        doing = f"offsets of the group {group!r} cannot be committed"
        places = [
            self._kafka.TopicPartition(topic, partition, given.offset, given.metadata)
            for (topic, partition), given in offsets.items()
        ]
        self._requested(lambda: self.consumer.commit(offsets=places, asynchronous=False), doing)

    def ends(self, place: Place) -> tuple[int, int]:
        """The first offset of a partition, and the one behind the last that may be read."""
        partition = self._kafka.TopicPartition(*place)
        found: tuple[int, int] = self._requested(
            lambda: self.consumer.get_watermark_offsets(partition, timeout=self._timeout),
            f"the ends of {place[0]}-{place[1]} cannot be read",
        )
        return found

    def known_end(self, place: Place) -> int:
        """The end of an assigned partition, as its last answer said; -1: it has said nothing."""
        try:
            found = self.consumer.get_watermark_offsets(
                self._kafka.TopicPartition(*place), cached=True
            )
        except self._kafka.KafkaException:
            return -1
        return -1 if found is None else max(-1, found[1])

    def at_instants(self, places: Iterable[Place], seconds: float) -> dict[Place, int]:
        """The first offset whose instant is not before an instant; -1: there is none."""
        asked = [self._kafka.TopicPartition(*place, round(seconds * 1000)) for place in places]
        doing = "offsets cannot be looked up by an instant"
        found = self._requested(
            lambda: self.consumer.offsets_for_times(asked, timeout=self._timeout), doing
        )
        return {(each.topic, each.partition): max(-1, each.offset) for each in found}

    def _requested(self, request: Callable[[], Any], doing: str) -> Any:
        """Sends a request, and repeats it while a leader is being elected, for the timeout at most.

        :raises ProducerError: The request's own error, or that of one of its partitions.
        """
        end = time.monotonic() + self._timeout
        while True:
            try:
                found = request()
                errors = [getattr(each, "error", None) for each in found or ()]
                error = next((each for each in errors if each is not None), None)
                if error is None:
                    return found
            except self._kafka.KafkaException as raised:
                error = raised.args[0]
            passing = error.retriable() or error.name() in _PASSING
            if not passing or time.monotonic() + _RETRY_INTERVAL > end:
                raise self.error(error, doing)
            time.sleep(_RETRY_INTERVAL)

    # -- reading -------------------------------------------------------------------------------

    def assign(
        self, offsets: Mapping[Place, int], epochs: Mapping[Place, int] | None = None
    ) -> None:
        """Read these partitions from these offsets on, and no others."""
        made = []
        for place, offset in offsets.items():
            epoch = -1 if epochs is None else epochs.get(place, -1)
            about = {"leader_epoch": epoch} if epoch >= 0 else {}
            made.append(self._kafka.TopicPartition(*place, offset, **about))
        self._assigned = True
        self._guarded(lambda: self.consumer.assign(made), "partitions cannot be assigned")

    def seek(self, place: Place, offset: int) -> None:
        """Go on reading an assigned partition at another offset."""
        target = self._kafka.TopicPartition(*place, offset)
        self._guarded(
            lambda: self.consumer.seek(target), f"{place[0]}-{place[1]} cannot be read at {offset}"
        )

    def leave(self, places: Iterable[Place]) -> None:
        """Read these partitions no more.

        They are not only paused: what is paused stays so, even when it is assigned anew.
        """
        made = [self._kafka.TopicPartition(*place) for place in places]
        if made:
            self._guarded(
                lambda: self.consumer.incremental_unassign(made), "partitions cannot be left"
            )

    def consume(self, most: int, timeout: float) -> list[Any]:
        """Up to so many messages and events; waits until they are that many, or for ``timeout``."""
        found: list[Any] = self._guarded(
            lambda: self.consumer.consume(most, timeout), "messages cannot be received"
        )
        return found

    def _guarded(self, work: Any, doing: str) -> Any:
        try:
            return work()
        except self._kafka.KafkaException as error:
            raise self.error(error, doing) from None
        except RuntimeError as error:  # it is closed
            raise ProducerError(f"{doing}: {error}") from None

    # -- sending -------------------------------------------------------------------------------

    def sender(self) -> Any:
        """A producer that confirms each message by all replicas, once."""
        if self._sender is None:
            config = {
                **self._without(_OF_CONSUMERS),
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 5,
                "error_cb": self._seen.append,
            }
            self._sender = self._made(self._kafka.Producer, config)
        return self._sender

    # -- the end -------------------------------------------------------------------------------

    def error(self, error: Any, doing: str) -> ProducerError:
        """The error of ours for one of the client's."""
        self._listen()
        return translated(error, doing, self.where, tuple(self._seen))

    def unavailable(self, doing: str) -> ProducerUnavailable:
        """The error of a cluster that says nothing."""
        self._listen()
        return ProducerUnavailable(f"{doing} {self.where}: nobody answers{self.last_word()}")

    def last_word(self) -> str:
        """What the client said last of its connections, for the end of a sentence; or nothing."""
        last = next((e for e in reversed(self._seen) if e.name() != "_ALL_BROKERS_DOWN"), None)
        return "" if last is None else f" (the client says: {last.str()})"

    def _listen(self) -> None:
        """Hear what the client has to say of its connections: it tells only who polls."""
        if not self._assigned:  # else a message might come, and be lost here
            with suppress(self._kafka.KafkaException, RuntimeError):
                self.consumer.poll(0)

    def close(self) -> None:
        """Release connections.  Safe to repeat."""
        self.consumer.close()
        self._sender = None


#: Settings of consumers that may stand in a connection, and that a producer warns about.
_OF_CONSUMERS: Final = frozenset(
    {
        "group.id",
        "group.instance.id",
        "group.protocol",
        "auto.offset.reset",
        "auto.commit.interval.ms",
        "check.crcs",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.partition.eof",
        "fetch.error.backoff.ms",
        "fetch.max.bytes",
        "fetch.message.max.bytes",
        "fetch.min.bytes",
        "fetch.queue.backoff.ms",
        "fetch.wait.max.ms",
        "heartbeat.interval.ms",
        "isolation.level",
        "max.partition.fetch.bytes",
        "max.poll.interval.ms",
        "partition.assignment.strategy",
        "queued.max.messages.kbytes",
        "queued.min.messages",
        "session.timeout.ms",
    }
)
