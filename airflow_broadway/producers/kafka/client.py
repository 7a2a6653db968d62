"""Connects to one cluster by confluent-kafka's clients, and translates their errors.

A consumer here never joins its group: it is *assigned* partitions, and commits as a non-member.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ConnectionMissing, ProducerError, ProducerUnavailable
from airflow_broadway.producers.kafka.claims import Committed, Place
from airflow_broadway.producers.kafka.errors import Denied, is_out_of_range, is_passing, translated
from airflow_broadway.producers.kafka.options import DEFAULT_CONNECTION, KafkaOptions, hosts_of
from airflow_broadway.producers.kafka.settling import FOREVER, Range, Ranges
from airflow_broadway.producers.kit.checks import connection_of

if TYPE_CHECKING:
    import confluent_kafka

log = logging.getLogger(__name__)

#: The client's own log; it is verbose while brokers restart.
_client_log = logging.getLogger(f"{__name__}.librdkafka")
# A connection has consumer properties too, and librdkafka warns of them in a producer.
_client_log.addFilter(lambda record: "is a consumer property" not in record.getMessage())

#: Client settings that users may override.
_DEFAULTS: Final = {
    "socket.timeout.ms": 20_000,
    "socket.connection.setup.timeout.ms": 5_000,
    "fetch.wait.max.ms": 500,
    "queued.max.messages.kbytes": 16_384,
    # Without it a corrupt batch is delivered unchecked, or is fetched endlessly without an error.
    "check.crcs": True,
}
#: Timeouts of admin requests and of delivery reports, in seconds.
_ADMIN_TIMEOUT: Final = 5.0
_CONFIRM_TIMEOUT: Final = 60.0
#: The gap between two wanted ranges above which seeking is cheaper than reading on.
_SEEK_GAP: Final = 2_000
#: Seconds without a message or event after which the cluster counts as unreachable.
_SILENCE_TIMEOUT: Final = 20.0
#: Seconds between two attempts of a request while a partition has no leader or a group no
#: coordinator.
_RETRY_INTERVAL: Final = 0.2
#: Timeouts of a request, one after another, before an election counts as failed; 60 seconds by
#: default, as ``default.api.timeout.ms`` of Kafka's own clients.
_ELECTION_TIMEOUTS: Final = 3
#: Requests to a partition's leader in one timeout: it may be dead.
_LEADER_ATTEMPTS: Final = 4
#: Errors of a leader or coordinator that is moving: retriable by Kafka's protocol, but not reported
#: so by the client.  A request to a leader that died times out if the election takes longer.
_PASSING: Final = (
    *("_TRANSPORT", "_TIMED_OUT", "_DESTROY_BROKER", "NOT_COORDINATOR"),
    *("COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS"),
    *("LEADER_NOT_AVAILABLE", "NOT_LEADER_FOR_PARTITION", "OFFSET_NOT_AVAILABLE"),
    *("FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH", "KAFKA_STORAGE_ERROR"),
)


def library() -> Any:
    """Imports confluent-kafka.

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
    """Builds librdkafka's settings from connection and options, including secrets.

    :raises ConnectionMissing: If the connection is missing, or no broker is named.
    """
    connection = connection_of(
        env, producer.conn_id, default=DEFAULT_CONNECTION, types=("kafka",), service="Kafka"
    )
    settings: dict[str, Any] = {}
    if connection is not None:
        settings.update({str(name): value for name, value in connection.extra.items()})
        if connection.host and "bootstrap.servers" not in settings:
            port = f":{connection.port}" if connection.port else ""
            settings["bootstrap.servers"] = f"{connection.host}{port}"
        if connection.login:
            settings.setdefault("sasl.username", connection.login)
        if connection.password:
            settings.setdefault("sasl.password", connection.password)
    settings.update(producer.settings or {})
    if producer.hosts is not None:
        settings["bootstrap.servers"] = ",".join(hosts_of(producer.hosts))
    if not settings.get("bootstrap.servers"):
        raise ConnectionMissing(
            f"no broker of the Kafka cluster is named: give the connection {producer.conn_id!r} an"
            ' extra {"bootstrap.servers": "host:port"}, or the producer hosts="host:port"'
        )
    return {**_DEFAULTS, "client.id": f"broadway-{socket.gethostname()}-{os.getpid()}", **settings}


class Cluster:
    """A connection to the cluster, with a consumer that never joins its group; for one thread.

    :raises ConnectionMissing: If no broker is named, or the client is not installed.
    :raises ProducerError: If the client rejects its settings.
    """

    def __init__(self, producer: KafkaOptions, env: ProducerEnv) -> None:
        self._kafka = library()
        self._producer = producer
        self._settings = settings_of(producer, env)
        #: The client's last ``error_cb`` reports.
        self._reports: deque[Any] = deque(maxlen=20)
        #: The cluster id, once a broker has answered; the bootstrap servers until then.
        self.id = str(self._settings["bootstrap.servers"])
        #: The cluster, for error messages.
        self.where = f"on {self._settings['bootstrap.servers']}"
        self._sender: Any = None
        self._assigned = False
        self.consumer: confluent_kafka.Consumer = self._consumer()
        #: A consumer without partitions.  A broker answers a connection in order: a request of the
        #: consumer would wait for its fetch, half a second by default.
        self._observer: Any = None
        self._timeout = self._seconds("socket.timeout.ms")
        #: Seconds for which a broker may delay a fetch response.
        self.fetch_wait = self._seconds("fetch.wait.max.ms")
        self.eof: int = self._kafka.KafkaError._PARTITION_EOF
        self._admin: Any = None  # it must outlive its futures
        self._has_controller = False

    def _consumer(self) -> Any:
        config = {
            **self._settings,
            "group.id": self._producer.group_id,
            "allow.auto.create.topics": False,
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
        config.pop("group.instance.id", None)
        return self._create_client(self._kafka.Consumer, config)

    def _seconds(self, name: str) -> float:
        """Converts a setting from milliseconds to seconds; librdkafka has accepted its syntax."""
        return int(str(self._settings[name]), base=0) / 1000

    def _create_client(self, kind: Any, config: Mapping[str, Any]) -> Any:
        try:
            return kind({**config, "error_cb": self._reports.append}, logger=_client_log)
        except (self._kafka.KafkaException, ValueError, TypeError) as error:
            text = translated(error, "the Kafka client cannot be made of its settings", self.where)
            raise ProducerError(
                f"{text}; correct the option settings or the extra of the connection"
            ) from None

    # -- topics and offsets --------------------------------------------------------------------

    def topics(self) -> dict[str, list[int]]:
        """Returns the partitions of each existing topic, including retry topics.

        :raises ProducerUnavailable: If no broker answers.
        """
        topics = {topic: self.partitions(topic) for topic in sorted(self._producer.topics)}
        for topic in sorted(self._producer.retry_topics):
            with suppress(Denied):  # without Describe a missing topic is reported as denied
                topics[topic] = self.partitions(topic)
        return {topic: numbers for topic, numbers in topics.items() if numbers}

    def partitions(self, topic: str) -> list[int]:
        """Returns the partitions of a topic; none if it does not exist.

        The consumer requests them: an admin client or a producer would create the topic.
        """
        action = f"the topic {topic!r} cannot be looked up"
        answer = self._call(lambda: self.consumer.list_topics(topic, timeout=self._timeout), action)
        self.id = str(answer.cluster_id or self.id)
        described = answer.topics[topic]
        missing = ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC")
        if described.error is not None and described.error.name() not in missing:
            raise self.error(described.error, action)
        return sorted(described.partitions)

    def committed(self, places: Sequence[Place]) -> dict[Place, Committed]:
        """Returns the committed offset and metadata of each partition that has one."""
        request = [self._kafka.TopicPartition(*place) for place in places]
        answer = self._send_request(
            lambda: self.consumer.committed(request, timeout=self._timeout),
            f"the offsets of the group {self._producer.group_id!r} cannot be read",
        )
        return {
            (row.topic, row.partition): Committed.read(row.offset, row.metadata or "")
            for row in answer
            if row.offset >= 0
        }

    def commit(self, offsets: Mapping[Place, Committed]) -> None:
        """Commits offsets for the group, in one request.

        :raises ProducerError: If the cluster rejects the commit, e.g. the group has members.
        """
        if not offsets:
            return
        request = [
            self._kafka.TopicPartition(*place, committed.offset, committed.metadata)
            for place, committed in offsets.items()
        ]
        self._send_request(
            lambda: self.consumer.commit(offsets=request, asynchronous=False),
            f"offsets of the group {self._producer.group_id!r} cannot be committed",
        )

    def ends(self, place: Place) -> tuple[int, int]:
        """Returns the low watermark and the last stable offset of a partition."""
        partition = self._kafka.TopicPartition(*place)
        if self._assigned and self._observer is None:
            self._observer = self._consumer()
        consumer = self._observer or self.consumer
        timeout = self._timeout / _LEADER_ATTEMPTS
        ends: tuple[int, int] = self._send_request(
            lambda: consumer.get_watermark_offsets(partition, timeout=timeout),
            f"the ends of {place[0]}-{place[1]} cannot be read",
            consumer,
        )
        return ends

    def known_end(self, place: Place) -> int:
        """Returns the end of an assigned partition by its last fetch response; -1: unknown."""
        partition = self._kafka.TopicPartition(*place)
        ends = self._call(
            lambda: self.consumer.get_watermark_offsets(partition, cached=True),
            f"the ends of {place[0]}-{place[1]} are not known",
        )
        return -1 if ends is None else int(ends[1])

    def at_timestamp(self, places: Iterable[Place], seconds: float) -> dict[Place, int]:
        """Returns the first offset with a timestamp at or after ``seconds``; -1: none."""
        request = [self._kafka.TopicPartition(*place, round(seconds * 1000)) for place in places]
        timeout = self._timeout / _LEADER_ATTEMPTS
        answer = self._send_request(
            lambda: self.consumer.offsets_for_times(request, timeout=timeout),
            "offsets cannot be looked up by a timestamp",
        )
        return {(row.topic, row.partition): max(-1, row.offset) for row in answer}

    def _send_request(
        self,
        request: Callable[[], Any],
        action: str,
        client: confluent_kafka.Consumer | None = None,
    ) -> Any:
        """Sends a request, and retries it during leader elections.

        :param client: The client that sends it; by default :attr:`consumer`.
        :raises ProducerError: The error of the request, or of one of its partitions.
        """
        end = time.monotonic() + _ELECTION_TIMEOUTS * self._timeout
        while True:
            try:
                answer = request()
                errors = [getattr(row, "error", None) for row in answer or ()]
                error = next((error for error in errors if error is not None), None)
                if error is None:
                    return answer
            except self._kafka.KafkaException as raised:
                error = raised.args[0]
            passing = error.retriable() or error.name() in _PASSING
            if not passing or time.monotonic() + _RETRY_INTERVAL > end:
                raise self.error(error, action)
            # It looks for new leaders by itself only if it was connected to the old one.
            with suppress(self._kafka.KafkaException):
                (client or self.consumer).list_topics(timeout=self._timeout / _LEADER_ATTEMPTS)
            time.sleep(_RETRY_INTERVAL)

    # -- administration ------------------------------------------------------------------------

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """Returns the id of each topic that has one; a topic created again has a new id."""
        answers = self._request_admin("describe_topics", self._kafka.TopicCollection(list(topics)))
        ids = {topic: str(answer.topic_id or "") for topic, answer in answers.items()}
        return {topic: topic_id for topic, topic_id in ids.items() if topic_id.strip("A=-0")}

    def cleanup_policies(self, topics: Iterable[str]) -> dict[str, str]:
        """Returns the ``cleanup.policy`` of topics: ``"delete"``, ``"compact"``, or both."""
        from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]

        request = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in topics]
        answers = self._request_admin("describe_configs", request)
        policies = {key.name: answer.get("cleanup.policy") for key, answer in answers.items()}
        return {topic: str(p.value) for topic, p in policies.items() if p is not None}

    def members(self, group: str) -> list[str] | None:
        """Returns the members of a group, by client and host; ``None``: unknown."""
        answers = self._request_admin("describe_consumer_groups", [group])
        if group not in answers:
            return None
        return sorted(f"{member.client_id} at {member.host}" for member in answers[group].members)

    def _request_admin(self, method: str, request: Any) -> dict[Any, Any]:
        """Sends an admin request, and returns the successful responses only.

        Each request needs its own ACL, and not every broker supports all of them.
        """
        from confluent_kafka.admin import AdminClient

        responses: dict[Any, Any] = {}
        try:
            if self._admin is None:
                self._admin = self._create_client(AdminClient, self._settings)
                metadata = self._admin.list_topics(timeout=_ADMIN_TIMEOUT)
                self._has_controller = metadata.controller_id in metadata.brokers
            if not self._has_controller:
                return responses
            futures = getattr(self._admin, method)(request, request_timeout=_ADMIN_TIMEOUT)
        except (self._kafka.KafkaException, ProducerError, AttributeError, ValueError) as error:
            log.debug("The cluster's administration cannot be asked: %s", error)
            return responses
        for key, future in futures.items():
            try:
                responses[key] = future.result(_ADMIN_TIMEOUT + 1)
            except (self._kafka.KafkaException, TimeoutError) as error:
                log.debug("%s is not known: %s", key, error)
        return responses

    # -- reading -------------------------------------------------------------------------------

    def assign(
        self, offsets: Mapping[Place, int], epochs: Mapping[Place, int] | None = None
    ) -> None:
        """Assigns partitions to the consumer, from the offsets on, in place of earlier ones."""
        partitions = [
            self._kafka.TopicPartition(*place, offset, leader_epoch=(epochs or {}).get(place, -1))
            for place, offset in offsets.items()
        ]
        self._assigned = True
        self._call(lambda: self.consumer.assign(partitions), "partitions cannot be assigned")

    def seek(self, place: Place, offset: int) -> None:
        """Seeks an assigned partition to another offset."""
        target = self._kafka.TopicPartition(*place, offset)
        self._call(
            lambda: self.consumer.seek(target), f"{place[0]}-{place[1]} cannot be read at {offset}"
        )

    def leave(self, place: Place) -> None:
        """Unassigns a partition.

        Pausing it is not enough: a paused partition stays paused when it is assigned again.
        """
        partition = self._kafka.TopicPartition(*place)
        self._call(
            lambda: self.consumer.incremental_unassign([partition]), "partitions cannot be left"
        )

    def consume(self, most: int, timeout: float) -> list[Any]:
        """Fetches up to ``most`` messages and events; waits for them up to ``timeout`` seconds."""
        records: list[Any] = self._call(
            lambda: self.consumer.consume(most, timeout), "messages cannot be received"
        )
        return records

    def read(
        self,
        wanted: Mapping[Place, Ranges],
        action: str,
        *,
        first: bool = False,
        timeout: float = 0.0,
    ) -> Iterator[tuple[Place, Any]]:
        """Yields the records at the wanted offsets, in order within each partition.

        Offsets that the log no longer has are skipped.  The consumer's assignment is replaced.

        :param action: The action, for error messages.
        :param first: Whether to read only the first record of each partition.
        :param timeout: Seconds without a response after which to fail; 0: the default.
        :raises ProducerUnavailable: If a partition does not answer.
        """
        # Reversed, so that finished ranges are popped from the end.
        waiting = {place: list(reversed(ranges)) for place, ranges in wanted.items() if ranges}
        assigned = False
        last_response = time.monotonic()
        while waiting:
            if not assigned:
                self.assign({place: ranges[-1][0] for place, ranges in waiting.items()})
                assigned = True
            records = self.consume(500, 0.1)
            if records:
                last_response = time.monotonic()
            elif time.monotonic() - last_response > (timeout or _SILENCE_TIMEOUT):
                silent, ranges = next(iter(waiting.items()))
                raise self.silence(silent, ranges[-1][0], action)
            for record in records:
                place = record.topic(), record.partition()
                ranges = waiting.get(place, [])
                if not ranges:
                    continue
                error = record.error()
                if error is None:
                    offset = record.offset()
                    _drop_below(ranges, offset)
                    if ranges and ranges[-1][0] == offset:
                        yield place, record
                        if first:
                            ranges.clear()
                    _drop_below(ranges, offset + 1)
                    if ranges and ranges[-1][0] - offset > _SEEK_GAP:
                        self.seek(place, ranges[-1][0])
                elif error.code() == self.eof:
                    _drop_below(ranges, record.offset())
                elif is_out_of_range(error):
                    low, end = self.ends(place)
                    _drop_below(ranges, low if ranges[-1][0] < end else FOREVER)
                    # librdkafka stops fetching a partition after this error: assign it again.
                    assigned = False
                elif not is_passing(error):
                    raise self.error(error, action)
                if not ranges:
                    del waiting[place]
                    self.leave(place)

    def _call(self, call: Callable[[], Any], action: str) -> Any:
        try:
            return call()
        except self._kafka.KafkaException as error:
            raise self.error(error, action) from None
        except RuntimeError as error:  # the consumer is closed
            raise ProducerError(f"{action}: {error}") from None

    # -- sending -------------------------------------------------------------------------------

    def sender(self) -> Any:
        """Returns an idempotent producer with ``acks=all``."""
        if self._sender is None:
            config = {**self._settings, "enable.idempotence": True, "acks": "all", "linger.ms": 5}
            self._sender = self._create_client(self._kafka.Producer, config)
        return self._sender

    def send(self, topic: str, refuse: Callable[[Any], None], **message: Any) -> None:
        """Produces a message, and waits while the client's own queue is full.

        :param refuse: Called with the error if delivery fails, by :meth:`confirm` at the latest.
        """
        sender = self.sender()

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                refuse(error)

        while True:
            try:
                sender.produce(topic, on_delivery=delivered, **message)
            except BufferError:
                sender.poll(0.1)
            except Exception as error:  # a message that cannot be encoded fails alone
                return refuse(error)
            else:
                sender.poll(0)
                return None

    def confirm(self) -> None:
        """Waits until each message that was sent is confirmed or rejected.

        :raises ProducerUnavailable: If the cluster does not answer.
        """
        if self.sender().flush(_CONFIRM_TIMEOUT):
            raise self.unavailable("messages that are sent are not confirmed")

    # -- the end -------------------------------------------------------------------------------

    def error(self, error: Any, action: str) -> ProducerError:
        """Translates a client error into a ProducerError."""
        self._serve_reports()
        return translated(error, action, self.where, tuple(self._reports))

    def unavailable(self, action: str) -> ProducerUnavailable:
        """Returns the error for a cluster that does not answer."""
        self._serve_reports()
        return ProducerUnavailable(f"{action} {self.where}: no broker answers{self._last_report()}")

    def silence(self, place: Place, position: int, action: str) -> ProducerUnavailable:
        """Returns the error for a partition from which no message arrives.

        Its broker is unreachable, or the length field of a record batch is corrupt: librdkafka
        takes such a batch for a truncated one, and fetches it repeatedly without an error.
        """
        try:
            end = self.ends(place)[1]
        except ProducerError:
            end = position
        if end <= position:
            return self.unavailable(action)
        cause = self._last_report() or (
            ": it seems that a batch of messages there is damaged in its head; nothing behind it"
            " can be received"
        )
        return ProducerUnavailable(
            f"{action} {self.where}: the broker answers, but nothing comes of {place[0]}-{place[1]}"
            f" from offset {position} on, and its end is at {end}{cause}"
        )

    def _last_report(self) -> str:
        """Returns the client's last connection error as a suffix for an error text."""
        last = next((e for e in reversed(self._reports) if e.name() != "_ALL_BROKERS_DOWN"), None)
        return "" if last is None else f" (last client error: {last.str()})"

    def _serve_reports(self) -> None:
        """Polls the client, which serves ``error_cb`` only then."""
        if not self._assigned:  # polling an assigned consumer might drop a message
            with suppress(self._kafka.KafkaException, RuntimeError):
                self.consumer.poll(0)

    def close(self) -> None:
        """Releases connections.  Safe to repeat."""
        for consumer in filter(None, (self.consumer, self._observer)):
            consumer.close()
        self._sender = None


def _drop_below(ranges: list[Range], offset: int) -> None:
    """Removes the offsets below ``offset`` from reversed ranges."""
    while ranges and ranges[-1][1] <= offset:
        ranges.pop()
    if ranges and ranges[-1][0] < offset:
        ranges[-1] = offset, ranges[-1][1]
