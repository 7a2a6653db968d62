"""Publishes copies of messages to the retry topic and the dead-letter topic.

Values are not stored in staging: they are read from the log again.  A copy has the message's key
and headers, followed by ``broadway.…`` headers as UTF-8 text; a dead letter also has the
``__connect.errors.…`` headers of Kafka Connect.  The timestamp of a copy is the time of publishing:
with the original timestamp, retention might remove the copy unread.
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

#: Headers that are omitted if their value is unknown.
_WHERE_KNOWN: Final = ("broadway.body", "broadway.timestamp")
_DELETED: Final = "deleted: it was compacted, or removed by retention"
_TOO_LARGE: Final = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")


class CopyRequest(NamedTuple):
    """A request to publish a copy of a message to another topic.

    :param entry: The entry with the verdict and the id of the original message.
    :param maybe_sent: Whether the copy may have been published before.
    :param not_before: Seconds since the epoch before which it is not retried; ``None``: it is a
        dead letter.
    """

    entry: Entry
    maybe_sent: bool
    not_before: float | None = None


def _timestamp(record: Any) -> str:
    """Returns a record's timestamp in milliseconds as text; ``""`` if unknown."""
    kind, timestamp = (0, 0) if record is None else record.timestamp()
    return str(timestamp) if kind else ""


def _exception(reason: str) -> tuple[str, str]:
    """Splits a reason into the exception class, if it names one, and the text."""
    kind, colon, text = reason.partition(": ")
    return (kind, text) if colon and kind.isidentifier() else ("", reason)


@dataclass
class Outbox:
    """Publishes copies of one generation's messages."""

    cluster: Cluster
    producer: KafkaOptions
    pipeline: str
    generation: str

    def __post_init__(self) -> None:
        #: Dead letters that exceed the size limit of their topic.
        self._large: list[tuple[Place, int, CopyRequest, Any]] = []
        self._unavailable: ProducerUnavailable | None = None
        self._refused: dict[tuple[Place, int], str] = {}
        #: Topic → its partitions.
        self._topics: dict[str, list[int]] = {}

    def send(
        self, wanted: Mapping[Place, Mapping[int, CopyRequest]], replaced: Container[Place]
    ) -> dict[tuple[Place, int], str]:
        """Publishes copies of messages, and waits until each is confirmed.

        :param wanted: The requested copies, by partition and offset.
        :param replaced: Partitions that were deleted and created again since they were read: their
            offsets contain other messages.
        :returns: The error text of each message that could not be published.
        :raises ProducerUnavailable: If the cluster cannot be reached.
        """
        left = {place: deque(sorted(copies)) for place, copies in wanted.items()}
        present = {p: of_offsets(c) for p, c in wanted.items() if p not in replaced}
        for place, record in self.cluster.read(present, "messages cannot be read from the log"):
            while left[place][0] < record.offset():
                missing_offset = left[place].popleft()
                self._add(place, missing_offset, wanted[place][missing_offset], None, body=_DELETED)
            offset = left[place].popleft()
            self._add(place, offset, wanted[place][offset], record)
        for place, offsets in left.items():
            reason = "deleted: the topic was created again" if place in replaced else _DELETED
            for offset in offsets:
                self._add(place, offset, wanted[place][offset], None, body=reason)
        self.cluster.confirm()
        large, self._large = self._large, []
        for place, offset, copy, record in large:
            size = len(record.value() or b"")
            self._add(place, offset, copy, record, body=f"too large for the topic: {size:,} bytes")
        self.cluster.confirm()
        if self._unavailable is not None:
            raise self._unavailable
        return self._refused

    def _add(
        self, place: Place, offset: int, copy: CopyRequest, record: Any, *, body: str = ""
    ) -> None:
        """Publishes one copy.

        :param body: The reason why a dead letter has no value.
        """
        retried = copy.not_before is not None
        if record is None and retried:
            return  # the message is no longer in the log: there is nothing to retry
        source, partition, _ = place_of(copy.entry.message_id)
        topic = (self.producer.retry_of if retried else self.producer.dead_letter_of)(source)
        if topic not in self._topics:
            self._topics[topic] = self.cluster.partitions(topic)
        partitions = self._topics[topic]
        if not partitions:
            kind = "messages to be retried" if retried else "dead letters"
            self._refused[place, offset] = (
                f"there is no topic {topic!r} for {kind} {self.cluster.where}: create it"
            )
            return
        message: dict[str, Any] = {"headers": self._headers(record, copy, body)}
        if retried:
            message["partition"] = partitions[partition % len(partitions)]
        if record is not None:
            if record.key() is not None:
                message["key"] = record.key()
            if not body:
                message["value"] = record.value()

        def refuse(error: Any) -> None:
            if any(name in str(error) for name in _TOO_LARGE) and not (body or retried):
                self._large.append((place, offset, copy, record))
                return
            kind = "a message to be retried" if retried else "a dead letter"
            translated = self.cluster.error(error, f"{kind} cannot be sent")
            if isinstance(translated, ProducerUnavailable):
                self._unavailable = translated
            self._refused[place, offset] = str(translated)

        self.cluster.send(topic, refuse, **message)

    def _headers(self, record: Any, copy: CopyRequest, body: str) -> list[tuple[str, Any]]:
        """Returns a copy's headers: those of the message, then the ``broadway.…`` headers.

        :param record: The message; ``None`` if it is no longer in the log.
        :param body: The reason why there is no value.
        """
        group, verdict = self.producer.group_id, copy.entry.verdict
        copied = None if record is None else copy_of(record, group)
        topic, partition, offset = place_of(copy.entry.message_id)
        origin = {"topic": topic, "partition": partition, "offset": offset, "stage": verdict.stage}
        common = {
            "broadway.group": group,
            "broadway.attempt": copy.entry.attempt,
            "broadway.generation": self.generation,
            "broadway.timestamp": _timestamp(copied or record),
        }
        if copy.not_before is not None:
            is_replaced = is_of_retry
            added = {
                **{f"broadway.{name}": value for name, value in origin.items()},
                "broadway.reason": cut(verdict.reason, MAX_REASON),
                **common,
                NOT_BEFORE: round(copy.not_before * 1000),
            }
        else:
            is_replaced = is_ours
            kind, text = _exception(verdict.reason)
            added = {
                **{f"__connect.errors.{name}": value for name, value in origin.items()},
                "__connect.errors.exception.class.name": kind,
                "__connect.errors.exception.message": cut(text, MAX_REASON),
                "__connect.errors.connector.name": self.pipeline,
                "__connect.errors.task.id": self.generation,
                **common,
                "broadway.again": "1" if copy.maybe_sent else "0",
                "broadway.body": body,
            }
        headers = [] if record is None else record.headers() or []
        original = [(name, value) for name, value in headers if not is_replaced(name)]
        known = {n: v for n, v in added.items() if v != "" or n not in _WHERE_KNOWN}
        return original + [(n, str(v).encode("utf-8", "replace")) for n, v in known.items()]
