"""Kafka in the traffic tests: a message is confirmed by its delivery report.

Draining reads the topics with librdkafka, because messages cannot be removed from a log.  A message
is finished if it is below the group's committed offset, or if the newest claim in the staging
folder, or the journal of the claim's generation, says so.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.kafka_proxy import KafkaProxy
from tests.kafka_server import KafkaServer
from tests.traffic.brokers import DEAD, QueuedMessage
from tests.traffic.publisher import body_of, number_of

_PARTITIONS = 4
#: Messages after which a growing topic gets more partitions.
_GROWS_AT = 150
#: Duration of a transaction, in seconds.
_OPEN = 0.05
#: Number of message keys.
_KEYS = 16
_GROUP = "traffic"


class _Sender:
    """Publishes with keys; a key determines the partition."""

    def __init__(self, server: KafkaServer, topic: str, **settings: Any) -> None:
        self._producer = server.producer({"linger.ms": 2, **settings})
        self._server = server
        self._topic = topic
        self._partitions = _PARTITIONS

    def send(self, numbers: Sequence[int]) -> list[int]:
        confirmed: list[int] = []
        for number in numbers:

            def result(error: Any, _: Any, number: int = number) -> None:
                if error is None:
                    confirmed.append(number)

            self._producer.produce(
                self._topic,
                body_of(number),
                str(number % _KEYS),
                number % _KEYS % self._partitions,
                on_delivery=result,
            )
        self._producer.flush(30)
        return confirmed

    def close(self) -> None:
        self._producer.flush(30)


class _Growing(_Sender):
    """Adds partitions after :data:`_GROWS_AT` messages."""

    def send(self, numbers: Sequence[int]) -> list[int]:
        if numbers[0] > _GROWS_AT and self._partitions == _PARTITIONS:
            self._partitions = _PARTITIONS + 3
            self._server.add_partitions(self._topic, self._partitions)
            self._producer.list_topics(self._topic, timeout=30)  # refreshes its metadata
        return super().send(numbers)


class _Transactional(_Sender):
    """Sends every message twice: in a transaction that is aborted, and in one that is committed.

    A consumer that receives aborted messages handles them twice without a mark.
    """

    def __init__(self, server: KafkaServer, topic: str) -> None:
        super().__init__(server, topic, **{"transactional.id": topic})
        self._aborting = _Sender(server, topic, **{"transactional.id": f"aborting {topic}"})
        for sender in (self, self._aborting):
            sender._producer.init_transactions(30)

    def send(self, numbers: Sequence[int]) -> list[int]:
        for sender in (self._aborting, self):
            sender._producer.begin_transaction()
        self._aborting.send(numbers)
        confirmed = super().send(numbers)
        time.sleep(_OPEN)
        self._aborting._producer.abort_transaction(30)
        self._producer.commit_transaction(30)
        return confirmed


_SENDERS: Mapping[str, type[_Sender]] = {
    "plain": _Sender,
    "growing": _Growing,
    "transactions": _Transactional,
}


class KafkaTraffic:
    """A topic and its dead-letter topic.

    :param folder: The folder whose ``staging`` contains the claims.
    :param order: The producer's option ``order``.
    :param traffic: ``plain``, ``transactions``, or ``growing`` (partitions are added).
    """

    kind = "kafka"

    def __init__(
        self, server: KafkaServer, folder: Path, *, order: str = "partition", traffic: str = "plain"
    ) -> None:
        self._traffic = traffic
        self._order = order
        self._server = server
        self._folder = folder
        self._topic = server.topic(f"traffic-{uuid.uuid4().hex[:12]}", _PARTITIONS)
        self._dead = server.topic(f"{self._topic}-dlt", 1)
        self._retries = f"{self._topic}.retry"
        if order == "none":
            server.topic(self._retries, 2)
        self._proxy: KafkaProxy | None = None
        #: The offsets that :meth:`drain` has returned, by topic and partition.
        self._drain_queue: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.options: Mapping[str, Any] = {
            "topics": [self._topic],
            "group_id": _GROUP,
            "order": order,
        }
        self.connections = {"traffic": server.connection()}

    def address(self) -> tuple[str, int]:
        """Returns host and port of the server."""
        host, _, port = self._server.bootstrap.partition(":")
        return host, int(port)

    def use_proxy(self, port: int) -> None:
        """Makes the next runs connect to the proxy at this port, also to advertised addresses."""
        self._proxy = KafkaProxy(self._server.bootstrap, through=port).__enter__()
        self.connections = {
            "traffic": self._server.connection(**{"bootstrap.servers": self._proxy.bootstrap})
        }

    def group_of(self, number: int) -> int | None:
        if self._traffic == "growing":  # adding partitions moves keys to other partitions
            return None
        key = number % _KEYS
        return {"none": None, "partition": key % _PARTITIONS, "key": key}[self._order]

    def is_unlocked(self) -> bool:
        return True

    def sender(self) -> _Sender:
        return _SENDERS[self._traffic](self._server, self._topic)

    def drain(self) -> list[QueuedMessage]:
        if self._proxy is not None:
            self._proxy.__exit__()
            self._proxy = None
        topics = [topic for topic in (self._topic, self._retries) if self._server.partitions(topic)]
        left = [message for topic in topics for message in self._left(topic)]
        return [*left, *self._dead_letters()]

    def _left(self, topic: str) -> Iterator[QueuedMessage]:
        committed = self._server.committed(_GROUP, topic)
        places = {
            number: _Place.of(self._folder, topic, number, committed.get(number, (0, ""))[0])
            for number in self._server.partitions(topic)
        }
        for message in self._server.read(topic):
            partition, offset = message.partition() or 0, message.offset() or 0
            found, place = self._drain_queue[topic, partition], places[partition]
            if offset in found or place.is_done(offset):
                continue
            found.add(offset)
            number = number_of(message.value() or b"")
            if topic == self._topic:
                yield QueuedMessage(number, *place.where(offset))
            else:
                headers: dict[str, Any] = dict(message.headers() or [])
                due = int(headers["broadway.not-before"]) / 1000 <= time.time()
                yield QueuedMessage(number, "returns" if due else "delay", True)

    def _dead_letters(self) -> Iterator[QueuedMessage]:
        drained = self._drain_queue[self._dead, 0]
        for message in self._server.read(self._dead):
            offset = message.offset() or 0
            if offset in drained:
                continue
            drained.add(offset)
            headers = dict(message.headers() or [])
            duplicates = headers["broadway.again"] == b"1"
            yield QueuedMessage(number_of(message.value() or b""), DEAD, duplicates)


class _Place(NamedTuple):
    """The state of a partition: its committed offset and its newest claim.

    :param at_once: Offsets that the claim's generation has settled immediately.
    """

    committed: int
    claim: Mapping[str, Any]
    at_once: frozenset[int]

    @classmethod
    def of(cls, folder: Path, topic: str, partition: int, committed: int) -> _Place:
        """Reads the newest claim; empty if the partition was never claimed."""
        pattern = f"staging/**/claims/{topic}/{partition}/*.json"
        versions = sorted(folder.glob(pattern), key=lambda path: path.name)
        if not versions:
            return cls(committed, {}, frozenset())
        claim: dict[str, Any] = json.loads(versions[-1].read_bytes())
        if not claim.get("generation"):
            return cls(committed, claim, frozenset())
        name = hashlib.sha256(claim["generation"].encode()).hexdigest()[:20]
        log = versions[-1].parents[3] / name
        if (log / "begun.json").exists():  # the generation has recorded its settlement plan
            places = json.loads((log / "begun.json").read_bytes())["plan"]["places"]
            if f"{topic}-{partition}" in places:
                marked = max(claim.get("marked", 0), claim["end"])
                planned = {**places[f"{topic}-{partition}"][1], "marked": marked}
                return cls(max(committed, planned.get("start", 0)), planned, frozenset())
        rows = [row for path in log.glob("now-*.json") for row in json.loads(path.read_bytes())]
        final = {
            row[2]
            for row in rows
            if row[:2] == [topic, partition] and (row[3] in ("ack", "dead_letter") or row[8])
        }
        return cls(committed, claim, frozenset(final))

    def is_done(self, offset: int) -> bool:
        """Returns whether the message at this offset is finished."""
        done = self.claim.get("done", ())
        return offset < self.committed or offset in self.at_once or _within(done, offset)

    def where(self, offset: int) -> tuple[str, bool]:
        """Returns the place of the message at this offset, and whether it is marked."""
        claim = self.claim
        end = claim.get("end", 0)
        if claim.get("generation") and offset < end:
            return "leased", True
        failed = claim.get("failed", {}).get(str(offset))
        if failed is not None and failed[1] > time.time():
            return "delay", True
        duplicates = offset < max(claim.get("marked", 0), end)
        return ("returns", True) if duplicates else ("source", False)


def _within(ranges: Sequence[Sequence[int]], offset: int) -> bool:
    return any(low <= offset < high for low, high in ranges)
