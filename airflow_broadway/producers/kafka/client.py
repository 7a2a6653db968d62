"""Connects to one cluster: confluent-kafka's clients, and their errors translated.

A consumer here is no member of its group: it is *assigned* partitions, and commits from outside.
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
# A connection has settings of consumers too, of which a producer warns.
_client_log.addFilter(lambda record: "is a consumer property" not in record.getMessage())

#: Settings of clients that users may set otherwise.
_DEFAULTS: Final = {
    "socket.timeout.ms": 20_000,
    "socket.connection.setup.timeout.ms": 5_000,
    "fetch.wait.max.ms": 500,
    "queued.max.messages.kbytes": 16_384,
    # Else a damaged batch is handed out as it is, or is fetched for ever without an error.
    "check.crcs": True,
}
#: Seconds that an answer of the administration, and confirms, may take.
_ADMIN_TIMEOUT: Final = 5.0
_CONFIRM_TIMEOUT: Final = 60.0
#: A gap between two wanted ranges from which on seeking is cheaper than reading on.
_SEEK_GAP: Final = 2_000
#: Seconds without a message, or an event, after which the cluster is out of reach.
_SILENCE_TIMEOUT: Final = 20.0
#: Seconds between two tries of a request while a partition or a group has no leader.
_RETRY_INTERVAL: Final = 0.2
#: Errors of a broker that goes away, or of a group whose coordinator did, which the client calls
#: final.
_PASSING: Final = (
    *("_TRANSPORT", "_DESTROY_BROKER", "NOT_COORDINATOR"),
    *("COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS"),
)


def library() -> Any:
    """Imports the client.

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
    """Returns the settings of librdkafka, by connection and options; with secrets.

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
    """One consumer of the cluster, outside its group; used from one thread.

    :raises ConnectionMissing: If no broker is named, or the client is not installed.
    :raises ProducerError: If the client does not take its settings.
    """

    def __init__(self, producer: KafkaOptions, env: ProducerEnv) -> None:
        self._kafka = library()
        self._producer = producer
        self._settings = settings_of(producer, env)
        #: What the client reported of its connections.
        self._seen: deque[Any] = deque(maxlen=20)
        #: The cluster's own id, once it has answered.
        self.id = str(self._settings["bootstrap.servers"])
        #: For errors.
        self.where = f"on {self._settings['bootstrap.servers']}"
        self._sender: Any = None
        self._assigned = False
        self.consumer: confluent_kafka.Consumer = self._consumer()
        self._timeout = self._seconds("socket.timeout.ms")
        #: Seconds that a broker waits for more before it answers.
        self.fetch_wait = self._seconds("fetch.wait.max.ms")
        self.eof: int = self._kafka.KafkaError._PARTITION_EOF
        self._admin: Any = None  # it must outlive its answers
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
        return self._made(self._kafka.Consumer, config)

    def _seconds(self, name: str) -> float:
        """Returns a setting in milliseconds, which librdkafka has accepted, in seconds."""
        return int(str(self._settings[name]), base=0) / 1000

    def _made(self, kind: Any, config: Mapping[str, Any]) -> Any:
        try:
            return kind({**config, "error_cb": self._seen.append}, logger=_client_log)
        except (self._kafka.KafkaException, ValueError, TypeError) as error:
            text = translated(error, "the Kafka client cannot be made of its settings", self.where)
            raise ProducerError(
                f"{text}; correct the option settings or the extra of the connection"
            ) from None

    # -- topics and offsets --------------------------------------------------------------------

    def topics(self) -> dict[str, list[int]]:
        """Returns the partitions of each topic that exists, retry topics too.

        :raises ProducerUnavailable: If no broker answers.
        """
        topics = {topic: self.partitions(topic) for topic in sorted(self._producer.topics)}
        for topic in sorted(self._producer.retry_topics):
            with suppress(Denied):  # it may not exist: that is the same to a user without rights
                topics[topic] = self.partitions(topic)
        return {topic: numbers for topic, numbers in topics.items() if numbers}

    def partitions(self, topic: str) -> list[int]:
        """Returns the partitions of a topic; none if it does not exist.

        It asks with the consumer: an admin client, or a producer, would create the topic.
        """
        action = f"the topic {topic!r} cannot be looked up"
        answer = self._guarded(
            lambda: self.consumer.list_topics(topic, timeout=self._timeout), action
        )
        self.id = str(answer.cluster_id or self.id)
        described = answer.topics[topic]
        missing = ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC")
        if described.error is not None and described.error.name() not in missing:
            raise self.error(described.error, action)
        return sorted(described.partitions)

    def committed(self, places: Sequence[Place]) -> dict[Place, Committed]:
        """Returns what the group has committed, for each partition that has an offset."""
        request = [self._kafka.TopicPartition(*place) for place in places]
        answer = self._requested(
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

        :raises ProducerError: If the cluster refuses, as where the group has members.
        """
        if not offsets:
            return
        request = [
            self._kafka.TopicPartition(*place, committed.offset, committed.metadata)
            for place, committed in offsets.items()
        ]
        self._requested(
            lambda: self.consumer.commit(offsets=request, asynchronous=False),
            f"offsets of the group {self._producer.group_id!r} cannot be committed",
        )

    def ends(self, place: Place) -> tuple[int, int]:
        """Returns the first offset of a partition, and the one behind the last that may be read."""
        partition = self._kafka.TopicPartition(*place)
        ends: tuple[int, int] = self._requested(
            lambda: self.consumer.get_watermark_offsets(partition, timeout=self._timeout),
            f"the ends of {place[0]}-{place[1]} cannot be read",
        )
        return ends

    def known_end(self, place: Place) -> int:
        """Returns the end of an assigned partition by its last answer; -1: there was none."""
        partition = self._kafka.TopicPartition(*place)
        ends = self._guarded(
            lambda: self.consumer.get_watermark_offsets(partition, cached=True),
            f"the ends of {place[0]}-{place[1]} are not known",
        )
        return -1 if ends is None else int(ends[1])

    def at_timestamp(self, places: Iterable[Place], seconds: float) -> dict[Place, int]:
        """Returns the first offset whose timestamp is not before one; -1: there is none."""
        request = [self._kafka.TopicPartition(*place, round(seconds * 1000)) for place in places]
        answer = self._requested(
            lambda: self.consumer.offsets_for_times(request, timeout=self._timeout),
            "offsets cannot be looked up by a timestamp",
        )
        return {(row.topic, row.partition): max(-1, row.offset) for row in answer}

    def _requested(self, request: Callable[[], Any], action: str) -> Any:
        """Sends a request, and repeats it while a leader is being elected, for the timeout at most.

        :raises ProducerError: The request's own error, or that of one of its partitions.
        """
        end = time.monotonic() + self._timeout
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
            time.sleep(_RETRY_INTERVAL)

    # -- what only checks ask for --------------------------------------------------------------

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """Returns the id of each topic that has one: another, once the topic is made anew."""
        answers = self._answers("describe_topics", self._kafka.TopicCollection(list(topics)))
        ids = {topic: str(answer.topic_id or "") for topic, answer in answers.items()}
        return {topic: topic_id for topic, topic_id in ids.items() if topic_id.strip("A=-0")}

    def cleanup_policies(self, topics: Iterable[str]) -> dict[str, str]:
        """Returns the ``cleanup.policy`` of topics: ``"delete"``, ``"compact"``, or both."""
        from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]

        request = [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in topics]
        answers = self._answers("describe_configs", request)
        policies = {key.name: answer.get("cleanup.policy") for key, answer in answers.items()}
        return {topic: str(p.value) for topic, p in policies.items() if p is not None}

    def members(self, group: str) -> list[str] | None:
        """Returns the members of a group, by client and host; ``None``: not known."""
        answers = self._answers("describe_consumer_groups", [group])
        if group not in answers:
            return None
        return sorted(f"{member.client_id} at {member.host}" for member in answers[group].members)

    def _answers(self, method: str, request: Any) -> dict[Any, Any]:
        """Asks the cluster's administration; returns no answer that is not given.

        Each request needs a right of its own, and not every broker serves every one.
        """
        from confluent_kafka.admin import AdminClient

        answers: dict[Any, Any] = {}
        try:
            if self._admin is None:
                self._admin = self._made(AdminClient, self._settings)
                metadata = self._admin.list_topics(timeout=_ADMIN_TIMEOUT)
                self._has_controller = metadata.controller_id in metadata.brokers
            if not self._has_controller:
                return answers
            futures = getattr(self._admin, method)(request, request_timeout=_ADMIN_TIMEOUT)
        except (self._kafka.KafkaException, ProducerError, AttributeError, ValueError) as error:
            log.debug("The cluster's administration cannot be asked: %s", error)
            return answers
        for key, future in futures.items():
            try:
                answers[key] = future.result(_ADMIN_TIMEOUT + 1)
            except (self._kafka.KafkaException, TimeoutError) as error:
                log.debug("%s is not known: %s", key, error)
        return answers

    # -- reading -------------------------------------------------------------------------------

    def assign(
        self, offsets: Mapping[Place, int], epochs: Mapping[Place, int] | None = None
    ) -> None:
        """Reads these partitions from these offsets on, and no others."""
        partitions = [
            self._kafka.TopicPartition(*place, offset, leader_epoch=(epochs or {}).get(place, -1))
            for place, offset in offsets.items()
        ]
        self._assigned = True
        self._guarded(lambda: self.consumer.assign(partitions), "partitions cannot be assigned")

    def seek(self, place: Place, offset: int) -> None:
        """Goes on reading an assigned partition at another offset."""
        target = self._kafka.TopicPartition(*place, offset)
        self._guarded(
            lambda: self.consumer.seek(target), f"{place[0]}-{place[1]} cannot be read at {offset}"
        )

    def leave(self, place: Place) -> None:
        """Stops reading a partition.

        It is not only paused: what is paused stays so, even when it is assigned once more.
        """
        partition = self._kafka.TopicPartition(*place)
        self._guarded(
            lambda: self.consumer.incremental_unassign([partition]), "partitions cannot be left"
        )

    def consume(self, most: int, timeout: float) -> list[Any]:
        """Fetches messages and events; waits until they are ``most``, or for ``timeout``."""
        records: list[Any] = self._guarded(
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
        """Yields the records at some offsets, in order of each partition; the rest are gone.

        It takes the consumer for itself.

        :param action: What is tried, for errors.
        :param first: Whether the first record of each partition is enough.
        :param timeout: Seconds without an answer; 0: as usual.
        :raises ProducerUnavailable: If a partition does not answer.
        """
        # Reversed: those that are done with are taken from the end.
        waiting = {place: list(reversed(ranges)) for place, ranges in wanted.items() if ranges}
        assigned = False
        heard = time.monotonic()
        while waiting:
            if not assigned:
                self.assign({place: ranges[-1][0] for place, ranges in waiting.items()})
                assigned = True
            records = self.consume(500, 0.1)
            if records:
                heard = time.monotonic()
            elif time.monotonic() - heard > (timeout or _SILENCE_TIMEOUT):
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
                    # The client reads no more of a partition that it could not read on.
                    assigned = False
                elif not is_passing(error):
                    raise self.error(error, action)
                if not ranges:
                    del waiting[place]
                    self.leave(place)

    def _guarded(self, call: Callable[[], Any], action: str) -> Any:
        try:
            return call()
        except self._kafka.KafkaException as error:
            raise self.error(error, action) from None
        except RuntimeError as error:  # it is closed
            raise ProducerError(f"{action}: {error}") from None

    # -- sending -------------------------------------------------------------------------------

    def sender(self) -> Any:
        """Returns a producer that confirms each message by all replicas, once."""
        if self._sender is None:
            config = {**self._settings, "enable.idempotence": True, "acks": "all", "linger.ms": 5}
            self._sender = self._made(self._kafka.Producer, config)
        return self._sender

    def send(self, topic: str, refuse: Callable[[Any], None], **message: Any) -> None:
        """Sends a message, and waits while the client's own queue is full.

        :param refuse: Called with the error if it is not sent, by :meth:`confirm` at the latest.
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
            except Exception as error:  # what no client can encode fails alone
                return refuse(error)
            else:
                sender.poll(0)
                return None

    def confirm(self) -> None:
        """Waits until each message that was sent is confirmed or refused.

        :raises ProducerUnavailable: If the cluster does not answer.
        """
        if self.sender().flush(_CONFIRM_TIMEOUT):
            raise self.unavailable("messages that are sent are not confirmed")

    # -- the end -------------------------------------------------------------------------------

    def error(self, error: Any, action: str) -> ProducerError:
        """Returns the error of ours for one of the client's."""
        self._serve_reports()
        return translated(error, action, self.where, tuple(self._seen))

    def unavailable(self, action: str) -> ProducerUnavailable:
        """Returns the error of a cluster that does not answer."""
        self._serve_reports()
        return ProducerUnavailable(f"{action} {self.where}: no broker answers{self._last_report()}")

    def silence(self, place: Place, position: int, action: str) -> ProducerUnavailable:
        """Returns the error of a partition that is read at an offset, and does not answer.

        Its broker is out of reach; or a batch of messages is damaged in its length: the client
        takes it for one that was cut off, and fetches it again and again without an error.
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
        """Returns the client's last report of its connections, for the end of a sentence."""
        last = next((e for e in reversed(self._seen) if e.name() != "_ALL_BROKERS_DOWN"), None)
        return "" if last is None else f" (the client says: {last.str()})"

    def _serve_reports(self) -> None:
        """Takes the client's reports of its connections, which it gives only when it is polled."""
        if not self._assigned:  # else a message might come, and be lost here
            with suppress(self._kafka.KafkaException, RuntimeError):
                self.consumer.poll(0)

    def close(self) -> None:
        """Releases connections.  Safe to repeat."""
        self.consumer.close()
        self._sender = None


def _drop_below(ranges: list[Range], offset: int) -> None:
    """Removes what is below an offset."""
    while ranges and ranges[-1][1] <= offset:
        ranges.pop()
    if ranges and ranges[-1][0] < offset:
        ranges[-1] = offset, ranges[-1][1]
