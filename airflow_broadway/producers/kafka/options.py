"""Declares the options of the Kafka producer; does not import the client."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, ClassVar, Final

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import CONN_ID, SECONDS_OR_ZERO, TEXT, Rule, one_of

#: The default connection, that of Airflow's Kafka provider.
DEFAULT_CONNECTION: Final = "kafka_default"

#: Settings of librdkafka that this package reserves, with the reason.
OWNED: Final[Mapping[str, str]] = {
    "allow.auto.create.topics": "no topic is created by reading it",
    "auto.offset.reset": "offset_reset_policy, for a group that is new; no run resets silently",
    "enable.auto.commit": "offsets are committed by what became of each message",
    "enable.auto.offset.store": "offsets are committed by what became of each message",
    "enable.partition.eof": "a run ends when it has seen the end of each partition",
    "group.id": "the option group_id",
    "group.instance.id": "a run is no member of the group",
    "isolation.level": "what was aborted is never read",
    "enable.idempotence": "dead letters are sent so",
    "acks": "dead letters are confirmed by all replicas",
}

#: Prefixes of settings that open no file, load no library and run no command.  Others do
#: (``plugin.library.paths``, ``sasl.kerberos.kinit.cmd``), or may in a later librdkafka.
_HARMLESS: Final = (
    *("api.version.", "broker.", "client.dns.lookup", "client.rack", "connections.max.idle.ms"),
    *("fetch.", "max.", "message.max.bytes", "metadata.", "queued.", "receive.message.max.bytes"),
    *("reconnect.", "retry.", "sasl.mechanism", "security.protocol", "socket."),
    "topic.metadata.",
)

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_SECRET = re.compile(
    r"password|secret|(?:^|\.)ssl\.key\.pem$|oauthbearer\.config|credentials|jaas|token",
    re.IGNORECASE,
)
_HOST = re.compile(r"(?:[A-Za-z0-9_]+://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}")


def is_secret(name: str) -> bool:
    """Returns whether a setting of librdkafka is a secret, by its name."""
    return _SECRET.search(name) is not None


def _is_topic(value: object) -> bool:
    return (
        isinstance(value, str) and _TOPIC.fullmatch(value) is not None and value not in (".", "..")
    )


def hosts_of(value: str | Sequence[str]) -> list[str]:
    """Returns the brokers that the option ``hosts`` names."""
    return [host.strip() for host in value.split(",")] if isinstance(value, str) else [*value]


def _are_hosts(value: object) -> bool:
    return (
        isinstance(value, (str, list, tuple))
        and bool(value)
        and all(isinstance(host, str) and _HOST.fullmatch(host) for host in hosts_of(value))
    )


def reset_timestamp(policy: object) -> datetime | None:
    """Parses the timestamp of an offset reset policy; ``None`` for ``earliest`` and ``latest``.

    :raises ValueError: If it is neither a keyword nor a timestamp with a time zone.
    """
    if policy in ("earliest", "latest"):
        return None
    timestamp = policy if isinstance(policy, datetime) else datetime.fromisoformat(str(policy))
    if timestamp.utcoffset() is None:
        raise ValueError("it has no time zone")
    return timestamp.astimezone(timezone.utc)


def _is_policy(value: object) -> bool:
    try:
        reset_timestamp(value)
    except ValueError:
        return False
    return True


_HOSTS = Rule("'host:port,host:port', or a list of 'host:port'", _are_hosts)
_TOPICS = Rule(
    "a list of topics' names: up to 249 letters, digits, '.', '_' and '-'; no pattern",
    lambda v: (
        isinstance(v, (list, tuple))
        and bool(v)
        and all(map(_is_topic, v))
        and len(set(v)) == len(v)
    ),
    lambda text: [topic.strip() for topic in text.split(",")],
)
_A_TOPIC = Rule("a topic's name: up to 249 letters, digits, '.', '_' and '-'", _is_topic)
_POLICY = Rule(
    "'earliest', 'latest' or a timestamp with its time zone, such as '2026-01-31T12:00:00+00:00'",
    _is_policy,
)
_SETTINGS = Rule(
    "a mapping of librdkafka's settings: names to text, numbers or truth values",
    lambda v: (
        isinstance(v, Mapping)
        and all(isinstance(name, str) and name for name in v)
        and all(isinstance(value, (str, int, float, bool)) for value in v.values())
    ),
)


def place_of(message_id: str) -> tuple[str, int, int]:
    """Parses a message id into topic, partition and offset.

    :raises ValueError: If it is not a Kafka message id.
    """
    topic, partition, offset = message_id.rsplit("-", 2)
    if not topic:
        raise ValueError(message_id)
    return topic, int(partition), int(offset)


def partition_of(message: Message) -> int:
    """Returns the same number for all messages of a partition, so that they stay in order."""
    return zlib.crc32(message.message_id.rpartition("-")[0].encode())


def _partition_and_key(message: Message) -> int:
    place = message.message_id.rpartition("-")[0]
    return zlib.crc32(f"{place} {message.metadata.get('key')}".encode("utf-8", "replace"))


def key_group(key: str | None) -> str:
    """Returns a short digest of a key from the metadata; ``""`` for no key."""
    if key is None:
        return ""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@options
class KafkaOptions(Producer):
    """The options of :class:`~airflow_broadway.producers.kafka.KafkaProducer`."""

    kind: ClassVar[str] = "kafka"
    sent_at: ClassVar[tuple[str, ...]] = ("ts",)
    backfills: ClassVar[bool] = True
    actions: ClassVar[Mapping[str, Action]] = {
        "ack": Action.ACK,
        "retry": Action.RETRY,
        "dead_letter": Action.DEAD_LETTER,
        "halt": Action.LEAVE,
    }

    group_id: str = option(
        rule=TEXT,
        doc="The consumer group whose offsets are used, of this pipeline alone.",
    )
    topics: Any = option(rule=_TOPICS, doc="The topics, by name.")
    hosts: Any = option(
        default=None,
        rule=_HOSTS.or_none(),
        doc="Bootstrap brokers; ``None``: the connection's ``bootstrap.servers``.",
    )
    conn_id: str | None = option(
        default=DEFAULT_CONNECTION,
        rule=CONN_ID.or_none(),
        doc="A connection of type ``kafka``, whose extra is librdkafka's settings; ``None``:"
        " ``hosts`` alone.",
    )
    offset_reset_policy: Any = option(
        default="latest",
        rule=_POLICY,
        doc="Where a group begins that has no offset in any partition.  A partition that is"
        " added later is read from its beginning.",
    )
    order: str = option(
        default="partition",
        rule=one_of("partition", "key", "none"),
        doc="Kept in order: a ``partition``, the messages of a ``key`` in it, or ``none``,"
        " with retries by ``retry_topic``.",
    )
    on_expired: str = option(
        default="continue",
        rule=one_of("continue", "fail"),
        doc="When retention has removed unread messages: ``continue`` with an error in the"
        " log, or ``fail``.",
    )
    retry_topic: str | None = option(
        default=None,
        rule=_A_TOPIC.or_none(),
        doc="The topic for messages to be retried, with ``order='none'``; ``None``:"
        " ``<topic>.retry``.",
    )
    dead_letter: str | None = option(
        default=None,
        rule=_A_TOPIC.or_none(),
        doc="The topic for dead letters; ``None``: ``<topic>-dlt``.",
    )
    lateness: float = option(
        default=300.0,
        rule=SECONDS_OR_ZERO,
        doc="By how much messages of the log may be out of order by their timestamps: a"
        " backfill reads this far beyond its interval.",
    )
    settings: Any = option(
        default=None,
        rule=_SETTINGS.or_none(),
        doc="Settings of librdkafka, by its names, such as ``fetch.wait.max.ms``; they"
        " override the connection's.  No secrets, and none that are reserved.",
    )

    def _resolve(self) -> None:
        super()._resolve()
        for name, value in (self.settings or {}).items():
            path = f"KafkaProducer.settings.{name}"
            if is_secret(name):
                raise OptionsError(path, "no secret: it belongs in the connection's extra", "***")
            if name in OWNED:
                raise OptionsError(path, f"nothing: {OWNED[name]}", value)
        if isinstance(self.topics, (list, tuple)):
            letters, retried = {*self.dead_letter_topics}, self.retry_topics
            for name, subject, overlap in (
                ("dead_letter", "dead letters", letters & {*self.topics, *retried}),
                ("retry_topic", "messages to be retried", retried & {*self.topics}),
            ):
                if overlap:
                    rule = f"none of the topics: {subject} would be received again"
                    raise OptionsError(f"KafkaProducer.{name}", rule, sorted(overlap))

    def unsafe_options(self) -> Sequence[str]:
        names = sorted(self.settings or {})
        return [f"settings.{name}" for name in names if not name.startswith(_HARMLESS)]

    def prepare_for_start(self, pipeline: Any) -> Mapping[str, Any]:
        """Partitions messages by topic and partition, as Broadway does, if stages run in parallel.

        :raises OptionsError: If the pipeline partitions otherwise.
        """
        batchers: Mapping[str, Any] = pipeline.batchers
        parts = {"": pipeline, "processors.": pipeline.processors}
        parts |= {f"batchers.{name}.": batcher for name, batcher in batchers.items()}
        for path, part in parts.items():
            if part.partition_by is not None:
                rule = (
                    "no value with a KafkaProducer: it partitions by topic and partition itself"
                    " (order='key': by key too)"
                )
                raise OptionsError(f"{path}partition_by", rule, part.partition_by)
        sizes = [pipeline.processors.concurrency, *(b.concurrency for b in batchers.values())]
        if self.order == "none" or set(sizes) == {1}:  # unordered, or no parallel stage
            return {}
        return {"partition_by": _partition_and_key if self.order == "key" else partition_of}

    # -- derived values ------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """The name of the queue in leases: the group and its topics."""
        return f"{self.group_id}: {', '.join(sorted(self.topics))}"

    def dead_letter_of(self, topic: str) -> str:
        """Returns the dead-letter topic of a topic."""
        return self.dead_letter or f"{topic}-dlt"

    def retry_of(self, topic: str) -> str:
        """Returns the retry topic of a topic."""
        return self.retry_topic or f"{topic}.retry"

    @property
    def retry_topics(self) -> set[str]:
        """The retry topics of all topics."""
        return set(map(self.retry_of, self.topics))

    @property
    def dead_letter_topics(self) -> list[str]:
        """The dead-letter topics, sorted."""
        return sorted(set(map(self.dead_letter_of, self.topics)))

    def outcomes(self) -> set[Action]:
        """Returns the possible actions under the options."""
        actions = {self.actions[self.on_success], self.actions[self.on_failure]}
        if Action.RETRY in actions and self.retry.dead_letter:
            actions.add(Action.DEAD_LETTER)
        return actions

    @property
    def keeps_order(self) -> bool:
        """Whether order is kept per partition or per key."""
        return self.order != "none"

    def group_of(self, message: Message) -> str | None:
        place = message.message_id.rpartition("-")[0]
        if self.order == "partition":
            return place
        if self.order == "key":
            key = message.metadata.get("key")
            return None if key is None else f"{place} {key}"
        return None

    def header_of(self, message: Message, name: str) -> Any:
        headers = message.metadata.get("headers") or ()
        return next((value for other, value in reversed(headers) if other == name), None)
