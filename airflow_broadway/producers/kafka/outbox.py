"""Sends messages to other topics: to the retry topic, or to the topic for dead letters.

No body is kept in staging: it is read from the log again.  A copy has the message's key and
headers, and behind these, as text in UTF-8, ours (``broadway.…``); a dead letter also has those of
Kafka Connect (``__connect.errors.…``).  Its own timestamp is that of its sending: a topic's
retention goes by it, so a copy with the timestamp of an old message would be removed unread.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.core.text import cut
from airflow_broadway.producers.kafka.claims import Place
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.options import KafkaOptions, place_of
from airflow_broadway.producers.kafka.records import (
    NOT_BEFORE,
    is_of_retry,
    is_ours,
    origin_of,
)
from airflow_broadway.producers.kafka.silence import silence_error

#: Headers that only a copy has of which they are known.
_WHERE_KNOWN: Final = ("broadway.body", "broadway.timestamp")
#: A gap between two wanted offsets from which on seeking is cheaper than reading on.
_SEEK_GAP: Final = 2_000
#: Seconds without a message, or an event, after which the cluster is out of reach.
_SILENCE_TIMEOUT: Final = 20.0
#: Seconds that copies may take to be confirmed.
_CONFIRM_TIMEOUT: Final = 60.0
_GONE: Final = "gone: it was compacted, or removed by retention"
_TOO_LARGE: Final = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")


class Why(NamedTuple):
    """Explains why a message is sent to another topic.

    :param message_id: The message's, by its place in its own topic.
    :param again: Whether it may have been sent before.
    :param not_before: Seconds since 1970 before which it is not retried; ``None``: it is a dead
        letter.
    """

    message_id: str
    reason: str
    stage: str
    attempt: int
    again: bool
    not_before: float | None = None


class LogReader:
    """Reads single messages of the log again; takes the cluster's consumer for itself."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lost = False

    def read(self, wanted: Mapping[Place, Sequence[int]]) -> Iterator[tuple[Place, int, Any]]:
        """Yields the messages at some offsets, in order of each partition.

        :param wanted: Ascending offsets.
        :returns: Place, offset, and the client's message; ``None`` where it is gone.
        :raises ProducerUnavailable: If nobody answers.
        """
        cluster = self._cluster
        waiting = {place: list(reversed(offsets)) for place, offsets in wanted.items() if offsets}
        cluster.assign({place: offsets[-1] for place, offsets in waiting.items()})
        heard = time.monotonic()
        while waiting:
            records = cluster.consume(500, 0.1)
            if records:
                heard = time.monotonic()
            elif time.monotonic() - heard > _SILENCE_TIMEOUT:
                silent, offsets = next(iter(waiting.items()))
                doing = "messages cannot be read from the log"
                raise silence_error(cluster, silent, offsets[-1], doing)
            if self._lost:  # the client reads no more of a partition that it could not read on
                self._lost = False
                cluster.assign({place: offsets[-1] for place, offsets in waiting.items()})
            for record in records:
                place = record.topic(), record.partition()
                left = waiting.get(place)
                if left is None:
                    continue
                yield from self._found(place, left, record)
                if not left:
                    del waiting[place]
                    cluster.leave([place])
                elif record.error() is None and left[-1] - record.offset() > _SEEK_GAP:
                    cluster.seek(place, left[-1])

    def _found(
        self, place: Place, left: list[int], record: Any
    ) -> Iterator[tuple[Place, int, Any]]:
        """Yields what a message, or an event, tells of the offsets that are wanted."""
        error = record.error()
        if error is None:
            offset = record.offset()
            while left and left[-1] < offset:
                yield place, left.pop(), None
            if left and left[-1] == offset:
                yield place, left.pop(), record
        elif error.code() == self._cluster.eof:
            while left and left[-1] < record.offset():
                yield place, left.pop(), None
        elif error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
            low, end = self._cluster.ends(place)
            while left and not low <= left[-1] < end:
                yield place, left.pop(), None
            self._lost = True
        elif not error.retriable() and not error.name().startswith("_"):
            raise self._cluster.error(error, "messages cannot be read from the log")


def headers_of(
    record: Any,
    why: Why,
    *,
    pipeline: str,
    group: str,
    generation: str,
    body: str = "",
) -> list[tuple[str, Any]]:
    """Returns a copy's headers: the message's own, then why it was sent.

    :param record: The message; ``None`` if it is gone.
    :param body: Why there is no body.
    """
    origin = None if record is None else origin_of(record, group)
    topic, partition, offset = place_of(why.message_id)
    own = [] if record is None else record.headers() or []
    timestamp = _timestamp(record) if origin is None else origin.timestamp or ""
    ours = {
        "broadway.group": group,
        "broadway.attempt": why.attempt,
        "broadway.generation": generation,
        "broadway.timestamp": timestamp,
    }
    if why.not_before is not None:
        kept = [(name, value) for name, value in own if not is_of_retry(name)]
        about = {
            "broadway.topic": topic,
            "broadway.partition": partition,
            "broadway.offset": offset,
            "broadway.stage": why.stage,
            "broadway.reason": cut(why.reason, MAX_REASON),
            **ours,
            NOT_BEFORE: round(why.not_before * 1000),
        }
    else:
        kept = [(name, value) for name, value in own if not is_ours(name)]
        kind, text = _exception(why.reason)
        about = {
            "__connect.errors.topic": topic,
            "__connect.errors.partition": partition,
            "__connect.errors.offset": offset,
            "__connect.errors.stage": why.stage,
            "__connect.errors.exception.class.name": kind,
            "__connect.errors.exception.message": cut(text, MAX_REASON),
            "__connect.errors.connector.name": pipeline,
            "__connect.errors.task.id": generation,
            **ours,
            "broadway.again": "1" if why.again else "0",
            "broadway.body": body,
        }
    made = [
        (name, str(value).encode("utf-8", "replace"))
        for name, value in about.items()
        if value != "" or name not in _WHERE_KNOWN
    ]
    return [*kept, *made]


def _timestamp(record: Any) -> str:
    """Returns when a message was produced, or appended, in milliseconds; empty if unknown."""
    kind, timestamp = (0, 0) if record is None else record.timestamp()
    return str(timestamp) if kind else ""


def _exception(reason: str) -> tuple[str, str]:
    """Splits a reason into the class of an exception, if it names one, and the text."""
    kind, colon, text = reason.partition(": ")
    return (kind, text) if colon and kind.isidentifier() else ("", reason)


def send(
    cluster: Cluster,
    producer: KafkaOptions,
    wanted: Mapping[Place, Mapping[int, Why]],
    *,
    pipeline: str,
    generation: str,
    replaced: Container[Place],
) -> dict[tuple[Place, int], str]:
    """Sends copies of messages, and waits until each is confirmed.

    :param wanted: Why each is sent, by place and offset.
    :param replaced: Partitions that were deleted and created again since they were read: the
        bodies there are others'.
    :returns: The messages of which no copy could be sent, and why.
    :raises ProducerUnavailable: If the cluster cannot be reached.
    """
    outbox = _Outbox(cluster, producer, pipeline, generation)
    offsets: dict[Place, list[int]] = {}
    for place, whys in wanted.items():
        if place not in replaced:
            offsets[place] = sorted(whys)
            continue
        for offset, why in sorted(whys.items()):
            outbox.add(place, offset, why, None, body="gone: the topic was made anew")
    for place, offset, record in LogReader(cluster).read(offsets):
        outbox.add(place, offset, wanted[place][offset], record)
    outbox.confirm()
    return outbox.refused


class _Outbox:
    """Copies on their way."""

    def __init__(
        self, cluster: Cluster, producer: KafkaOptions, pipeline: str, generation: str
    ) -> None:
        self._cluster = cluster
        self._producer = producer
        self._pipeline = pipeline
        self._generation = generation
        self._sender = cluster.sender()
        #: Dead letters that were too large for their topic.
        self._large: list[tuple[Place, int, Why, Any]] = []
        self._unavailable: ProducerUnavailable | None = None
        self.refused: dict[tuple[Place, int], str] = {}
        #: Topic → its partitions.
        self._topics: dict[str, list[int]] = {}

    def add(self, place: Place, offset: int, why: Why, record: Any, *, body: str = "") -> None:
        """Sends one.

        :param body: Why a dead letter goes without its body.
        """
        if record is None and why.not_before is not None:
            return  # it is gone from the log: nothing is left to be retried
        source, partition, _ = place_of(why.message_id)
        retried = why.not_before is not None
        topic = (self._producer.retry_of if retried else self._producer.dead_letter_of)(source)
        partitions = self._partitions(topic)
        if not partitions:
            what = "messages to be retried" if retried else "dead letters"
            self.refused[place, offset] = (
                f"there is no topic {topic!r} for {what} {self._cluster.where}: create it"
            )
            return
        about: dict[str, Any] = {
            "headers": headers_of(
                record,
                why,
                pipeline=self._pipeline,
                group=self._producer.group_id,
                generation=self._generation,
                body=body or (_GONE if record is None else ""),
            )
        }
        if retried:
            about["partition"] = partitions[partition % len(partitions)]
        if record is not None:
            if record.key() is not None:
                about["key"] = record.key()
            if not body:
                about["value"] = record.value()

        def told(error: Any, _: Any) -> None:
            if error is not None:
                self._failed(error, place, offset, why, record, body=body)

        try:
            produce(self._sender, topic, on_delivery=told, **about)
        except Exception as error:  # what no client can encode fails alone
            if not (body or retried) and any(name in str(error) for name in _TOO_LARGE):
                self._large.append((place, offset, why, record))
                return
            self.refused[place, offset] = f"{type(error).__name__}: {cut(str(error), 300)}"

    def _partitions(self, topic: str) -> list[int]:
        if not self._topics.get(topic):
            self._topics[topic] = self._cluster.partitions(topic)
        return self._topics[topic]

    def _failed(
        self, error: Any, place: Place, offset: int, why: Why, record: Any, *, body: str
    ) -> None:
        """Keeps the error of a copy that the cluster did not take."""
        if error.name() in _TOO_LARGE and not body and why.not_before is None:
            self._large.append((place, offset, why, record))
            return
        what = "a dead letter" if why.not_before is None else "a message to be retried"
        found = self._cluster.error(error, f"{what} cannot be sent")
        if isinstance(found, ProducerUnavailable):
            self._unavailable = found
        self.refused[place, offset] = str(found)

    def confirm(self) -> None:
        """Waits until each copy is confirmed or refused.

        :raises ProducerUnavailable: If the cluster does not say.
        """
        self._flush()
        large, self._large = self._large, []
        for place, offset, why, record in large:
            size = len(record.value() or b"")
            self.add(place, offset, why, record, body=f"too large for the topic: {size:,} bytes")
        self._flush()
        if self._unavailable is not None:
            raise self._unavailable

    def _flush(self) -> None:
        if self._sender.flush(_CONFIRM_TIMEOUT):
            raise self._cluster.unavailable("messages that are sent are not confirmed")


def produce(sender: Any, topic: str, **about: Any) -> None:
    """Produces a message, and waits while the client's own queue is full."""
    while True:
        try:
            sender.produce(topic, **about)
        except BufferError:
            sender.poll(0.1)
        else:
            sender.poll(0)
            return
