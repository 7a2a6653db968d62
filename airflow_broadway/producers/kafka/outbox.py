"""Sends messages to other topics: to the retry topic, or to the topic for dead letters.

No body is kept in staging: it is read from the log again.  A copy has the message's key and
headers, and behind these, as text in UTF-8, ours (``broadway.…``); a dead letter also has those of
Kafka Connect (``__connect.errors.…``).  Its own timestamp is that of its sending: a topic's
retention goes by it, so a copy with the timestamp of an old message would be removed unread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.core.text import cut
from airflow_broadway.producers.kafka.claims import Place
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.options import KafkaOptions, place_of
from airflow_broadway.producers.kafka.records import NOT_BEFORE, copy_of, is_of_retry, is_ours
from airflow_broadway.producers.kafka.settling import of_offsets

#: Headers that only a copy has of which they are known.
_WHERE_KNOWN: Final = ("broadway.body", "broadway.timestamp")
_GONE: Final = "gone: it was compacted, or removed by retention"
_TOO_LARGE: Final = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")


class Why(NamedTuple):
    """Explains why a message is sent to another topic.

    :param entry: Its verdict; its id is its place in its own topic.
    :param again: Whether it may have been sent before.
    :param not_before: Seconds since 1970 before which it is not retried; ``None``: it is a dead
        letter.
    """

    entry: Entry
    again: bool
    not_before: float | None = None


def _timestamp(record: Any) -> str:
    """Returns when a message was produced, or appended, in milliseconds; empty if unknown."""
    kind, timestamp = (0, 0) if record is None else record.timestamp()
    return str(timestamp) if kind else ""


def _exception(reason: str) -> tuple[str, str]:
    """Splits a reason into the class of an exception, if it names one, and the text."""
    kind, colon, text = reason.partition(": ")
    return (kind, text) if colon and kind.isidentifier() else ("", reason)


@dataclass
class Outbox:
    """Sends copies of one generation's messages."""

    cluster: Cluster
    producer: KafkaOptions
    pipeline: str
    generation: str

    def __post_init__(self) -> None:
        #: Dead letters that were too large for their topic.
        self._large: list[tuple[Place, int, Why, Any]] = []
        self._unavailable: ProducerUnavailable | None = None
        self._refused: dict[tuple[Place, int], str] = {}
        #: Topic → its partitions.
        self._topics: dict[str, list[int]] = {}

    def send(
        self, wanted: Mapping[Place, Mapping[int, Why]], replaced: Container[Place]
    ) -> dict[tuple[Place, int], str]:
        """Sends copies of messages, and waits until each is confirmed.

        :param wanted: Why each is sent, by place and offset.
        :param replaced: Partitions that were deleted and created again since they were read: the
            bodies there are others'.
        :returns: The messages of which no copy could be sent, and why.
        :raises ProducerUnavailable: If the cluster cannot be reached.
        """
        left = {place: deque(sorted(whys)) for place, whys in wanted.items()}
        there = {place: of_offsets(whys) for place, whys in wanted.items() if place not in replaced}
        for place, record in self.cluster.read(there, "messages cannot be read from the log"):
            while left[place][0] < record.offset():
                gone_offset = left[place].popleft()
                self._add(place, gone_offset, wanted[place][gone_offset], None, body=_GONE)
            offset = left[place].popleft()
            self._add(place, offset, wanted[place][offset], record)
        for place, offsets in left.items():
            gone = "gone: the topic was made anew" if place in replaced else _GONE
            for offset in offsets:
                self._add(place, offset, wanted[place][offset], None, body=gone)
        self.cluster.confirm()
        large, self._large = self._large, []
        for place, offset, why, record in large:
            size = len(record.value() or b"")
            self._add(place, offset, why, record, body=f"too large for the topic: {size:,} bytes")
        self.cluster.confirm()
        if self._unavailable is not None:
            raise self._unavailable
        return self._refused

    def _add(self, place: Place, offset: int, why: Why, record: Any, *, body: str = "") -> None:
        """Sends one.

        :param body: Why a dead letter goes without its body.
        """
        retried = why.not_before is not None
        if record is None and retried:
            return  # it is gone from the log: nothing is left to be retried
        source, partition, _ = place_of(why.entry.message_id)
        topic = (self.producer.retry_of if retried else self.producer.dead_letter_of)(source)
        if topic not in self._topics:
            self._topics[topic] = self.cluster.partitions(topic)
        partitions = self._topics[topic]
        if not partitions:
            what = "messages to be retried" if retried else "dead letters"
            self._refused[place, offset] = (
                f"there is no topic {topic!r} for {what} {self.cluster.where}: create it"
            )
            return
        message: dict[str, Any] = {"headers": self._headers(record, why, body)}
        if retried:
            message["partition"] = partitions[partition % len(partitions)]
        if record is not None:
            if record.key() is not None:
                message["key"] = record.key()
            if not body:
                message["value"] = record.value()

        def refuse(error: Any) -> None:
            if any(name in str(error) for name in _TOO_LARGE) and not (body or retried):
                self._large.append((place, offset, why, record))
                return
            what = "a message to be retried" if retried else "a dead letter"
            translated = self.cluster.error(error, f"{what} cannot be sent")
            if isinstance(translated, ProducerUnavailable):
                self._unavailable = translated
            self._refused[place, offset] = str(translated)

        self.cluster.send(topic, refuse, **message)

    def _headers(self, record: Any, why: Why, body: str) -> list[tuple[str, Any]]:
        """Returns a copy's headers: the message's own, then why it was sent.

        :param record: The message; ``None`` if it is gone.
        :param body: Why there is no body.
        """
        group, verdict = self.producer.group_id, why.entry.verdict
        copied = None if record is None else copy_of(record, group)
        topic, partition, offset = place_of(why.entry.message_id)
        where = {"topic": topic, "partition": partition, "offset": offset, "stage": verdict.stage}
        ours = {
            "broadway.group": group,
            "broadway.attempt": why.entry.attempt,
            "broadway.generation": self.generation,
            "broadway.timestamp": _timestamp(copied or record),
        }
        if why.not_before is not None:
            is_replaced = is_of_retry
            added = {
                **{f"broadway.{name}": value for name, value in where.items()},
                "broadway.reason": cut(verdict.reason, MAX_REASON),
                **ours,
                NOT_BEFORE: round(why.not_before * 1000),
            }
        else:
            is_replaced = is_ours
            kind, text = _exception(verdict.reason)
            added = {
                **{f"__connect.errors.{name}": value for name, value in where.items()},
                "__connect.errors.exception.class.name": kind,
                "__connect.errors.exception.message": cut(text, MAX_REASON),
                "__connect.errors.connector.name": self.pipeline,
                "__connect.errors.task.id": self.generation,
                **ours,
                "broadway.again": "1" if why.again else "0",
                "broadway.body": body,
            }
        own = [] if record is None else record.headers() or []
        kept = [(name, value) for name, value in own if not is_replaced(name)]
        known = {n: v for n, v in added.items() if v != "" or n not in _WHERE_KNOWN}
        return kept + [(n, str(v).encode("utf-8", "replace")) for n, v in known.items()]
