"""Dead letters: the message as it is in the log, and why, in headers.

No body is kept in staging: who settles reads it from the log again.  A letter has the message's
key and headers, and behind these, as text in UTF-8, those of Kafka Connect (``__connect.errors.…``)
and ours (``broadway.…``).  Its own instant is that of its sending: a topic's retention goes by it,
so a letter with the instant of an old message would be removed before anybody has read it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.core.text import cut
from airflow_broadway.producers.kafka.client import Cluster, Place
from airflow_broadway.producers.kafka.options import KafkaOptions
from airflow_broadway.producers.kafka.silence import silence_error
from airflow_broadway.producers.kafka.table import Table

__all__ = ["LogReader", "Why", "headers_of", "is_ours", "send"]

#: What our headers begin with; those of an earlier letter, sent again by somebody, give way.
_OURS: Final = ("__connect.errors.", "broadway.")
#: Headers that only a letter has which knows what they say.
_WHERE_KNOWN: Final = ("broadway.body", "broadway.timestamp")
#: A gap between two wanted offsets from which on seeking is cheaper than reading on.
_SEEK_GAP: Final = 2_000
#: Seconds without a message, or a word about the end, after which the cluster is out of reach.
_SILENCE_TIMEOUT: Final = 20.0
#: Seconds that letters may take to be confirmed.
_CONFIRM_TIMEOUT: Final = 60.0
_NO_TABLES: Final[Mapping[Place, Table]] = MappingProxyType({})
_TOO_LARGE: Final = ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")


def is_ours(name: str) -> bool:
    """Whether a header says why a message is a dead letter, or was one."""
    return name.startswith(_OURS)


class Why(NamedTuple):
    """Why a message is a dead letter.

    :param again: Whether it may have been sent before.
    """

    reason: str
    stage: str
    attempt: int
    again: bool


class LogReader:
    """Reads single messages of the log again; takes the cluster's consumer for itself."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lost = False

    def read(self, wanted: Mapping[Place, Sequence[int]]) -> Iterator[tuple[Place, int, Any]]:
        """The messages at some offsets, in order of each partition.

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
                doing = "dead letters cannot be read from the log"
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
        """What a message, or an event, says of the offsets that are wanted."""
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
            raise self._cluster.error(error, "dead letters cannot be read from the log")


def headers_of(
    record: Any,
    place: Place,
    offset: int,
    why: Why,
    *,
    pipeline: str,
    group: str,
    generation: str,
    body: str = "",
) -> list[tuple[str, bytes | None]]:
    """A letter's headers: the message's own, then why.

    :param record: The message; ``None`` if it is gone.
    :param body: Why there is no body.
    """
    own = [] if record is None else record.headers() or []
    kept = [(name, value) for name, value in own if not name.startswith(_OURS)]
    kind, text = _exception(why.reason)
    about = {
        "__connect.errors.topic": place[0],
        "__connect.errors.partition": str(place[1]),
        "__connect.errors.offset": str(offset),
        "__connect.errors.stage": why.stage,
        "__connect.errors.exception.class.name": kind,
        "__connect.errors.exception.message": cut(text, MAX_REASON),
        "__connect.errors.connector.name": pipeline,
        "__connect.errors.task.id": generation,
        "broadway.group": group,
        "broadway.attempt": str(why.attempt),
        "broadway.generation": generation,
        "broadway.again": "1" if why.again else "0",
        "broadway.timestamp": _instant(record),
        "broadway.body": body,
    }
    ours = [
        (name, value.encode("utf-8", "replace"))
        for name, value in about.items()
        if value or name not in _WHERE_KNOWN
    ]
    return [*kept, *ours]


def _instant(record: Any) -> str:
    """When a message was produced, or appended, in milliseconds since 1970; empty if unknown."""
    kind, instant = (0, 0) if record is None else record.timestamp()
    return str(instant) if kind else ""


def _exception(reason: str) -> tuple[str, str]:
    """The class that a reason names, if it is that of an exception; and what it says."""
    kind, colon, text = reason.partition(": ")
    return (kind, text) if colon and kind.isidentifier() else ("", reason)


def send(
    cluster: Cluster,
    producer: KafkaOptions,
    wanted: Mapping[Place, Mapping[int, Why]],
    *,
    pipeline: str,
    generation: str,
    tables: Mapping[Place, Table] = _NO_TABLES,
) -> dict[tuple[Place, int], str]:
    """Send dead letters, and wait until each is confirmed.

    :param wanted: Why, by place and offset.
    :param tables: What was read: where a topic is another by now, so are the bodies there.
    :returns: The messages of which no letter could be sent, and why; they are to come again.
    :raises ProducerUnavailable: If the cluster cannot be reached.
    """
    sending = _Sending(cluster, producer, pipeline, generation)
    anew = _made_anew(cluster, {place: each for place, each in tables.items() if place in wanted})
    for place in anew:
        for offset, why in sorted(wanted[place].items()):
            sending.letter(place, offset, why, None, body="gone: the topic was made anew")
    offsets = {place: sorted(each) for place, each in wanted.items() if place not in anew}
    for place, offset, record in LogReader(cluster).read(offsets):
        sending.letter(place, offset, wanted[place][offset], record)
    sending.confirm()
    return sending.refused


def _made_anew(cluster: Cluster, tables: Mapping[Place, Table]) -> set[Place]:
    """Where the log is not the one that was read, as far as it can be told."""
    known = {topic: table.topic_id for (topic, _), table in tables.items() if table.topic_id}
    ids = cluster.admin.topic_ids(known) if known else {}
    other = {topic for topic, found in ids.items() if found != known[topic]}
    return {
        place
        for place, table in tables.items()
        if place[0] in other or cluster.ends(place)[1] < table.highest
    }


class _Sending:
    """Letters on their way."""

    def __init__(
        self, cluster: Cluster, producer: KafkaOptions, pipeline: str, generation: str
    ) -> None:
        self._cluster = cluster
        self._producer = producer
        self._pipeline = pipeline
        self._generation = generation
        self._sender = cluster.sender()
        #: Of messages that were too large for the dead-letter topic.
        self._large: list[tuple[Place, int, Why, Any]] = []
        self._unavailable: Any = None
        self.refused: dict[tuple[Place, int], str] = {}
        self._topics: set[str] = set()

    def letter(self, place: Place, offset: int, why: Why, record: Any, *, body: str = "") -> None:
        """Send one.

        :param body: Why the letter goes without its body.
        """
        topic = self._producer.dead_letter_of(place[0])
        if not self._is_there(topic):
            self.refused[place, offset] = (
                f"there is no topic {topic!r} for dead letters {self._cluster.where}: create it"
            )
            return
        gone = record is None
        headers = headers_of(
            record,
            place,
            offset,
            why,
            pipeline=self._pipeline,
            group=self._producer.group_id,
            generation=self._generation,
            body=body or ("gone: it was compacted, or removed by retention" if gone else ""),
        )
        about: dict[str, Any] = {"headers": headers}
        if record is not None:
            if record.key() is not None:
                about["key"] = record.key()
            if not body:
                about["value"] = record.value()

        def told(error: Any, _: Any) -> None:
            if error is not None:
                self._failed(error, place, offset, why, record, again=bool(body))

        try:
            self._produce(topic, about, told)
        except Exception as error:  # what no client can encode fails alone
            if not body and any(name in str(error) for name in _TOO_LARGE):
                self._large.append((place, offset, why, record))
                return
            self.refused[place, offset] = f"{type(error).__name__}: {cut(str(error), 300)}"

    def _produce(self, topic: str, about: dict[str, Any], told: Any) -> None:
        while True:
            try:
                self._sender.produce(topic, on_delivery=told, **about)
            except BufferError:  # the client's own queue is full
                self._sender.poll(0.1)
            else:
                self._sender.poll(0)
                return

    def _is_there(self, topic: str) -> bool:
        if topic not in self._topics and self._cluster.has_topic(topic):
            self._topics.add(topic)
        return topic in self._topics

    def _failed(
        self, error: Any, place: Place, offset: int, why: Why, record: Any, *, again: bool
    ) -> None:
        """What the cluster says of a letter that it did not take."""
        if error.name() in _TOO_LARGE and not again:
            self._large.append((place, offset, why, record))
            return
        found = self._cluster.error(error, "a dead letter cannot be sent")
        if isinstance(found, ProducerUnavailable):
            self._unavailable = found
        self.refused[place, offset] = str(found)

    def confirm(self) -> None:
        """Wait until each letter is confirmed or refused.

        :raises ProducerUnavailable: If the cluster does not say.
        """
        self._flush()
        large, self._large = self._large, []
        for place, offset, why, record in large:
            size = len(record.value() or b"")
            self.letter(place, offset, why, record, body=f"too large for the topic: {size:,} bytes")
        self._flush()
        if self._unavailable is not None:
            raise self._unavailable

    def _flush(self) -> None:
        if self._sender.flush(_CONFIRM_TIMEOUT):
            raise self._cluster.unavailable("dead letters are not confirmed")
