"""Kafka: what a delivery report names is confirmed; what is left is what no table calls finished.

Nothing can be taken out of a log, so what lies in a partition is read with librdkafka alone, and
which of it is finished from the tables in staging, whose format is ours: there is no other word on
it.  Kafka's own, the committed offset, must never be ahead of them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kafka_proxy import KafkaProxy
from tests.kafka_server import KafkaServer
from tests.living.brokers import DEAD, Left
from tests.living.publisher import body_of, number_of

__all__ = ["LivingKafka"]

_PARTITIONS = 4
#: Messages after which a topic that grows has more partitions.
_GROWS_AT = 150
#: Seconds for which a transaction is open.
_OPEN = 0.05
#: Keys of messages.
_KEYS = 16
_GROUP = "living"


class _Sender:
    """Each key has a partition of its own; later, :class:`_Growing`, there are more."""

    def __init__(self, server: KafkaServer, topic: str, **settings: Any) -> None:
        self._producer = server.producer({"linger.ms": 2, **settings})
        self._server = server
        self._topic = topic
        self._partitions = _PARTITIONS

    def send(self, numbers: Sequence[int]) -> list[int]:
        confirmed: list[int] = []
        for number in numbers:

            def told(error: Any, _: Any, number: int = number) -> None:
                if error is None:
                    confirmed.append(number)

            self._producer.produce(
                self._topic,
                body_of(number),
                str(number % _KEYS),
                number % _KEYS % self._partitions,
                on_delivery=told,
            )
        self._producer.flush(30)
        return confirmed

    def close(self) -> None:
        self._producer.flush(30)


class _Growing(_Sender):
    """Adds partitions once it has sent some."""

    def send(self, numbers: Sequence[int]) -> list[int]:
        if numbers[0] > _GROWS_AT and self._partitions == _PARTITIONS:
            self._partitions = _PARTITIONS + 3
            self._server.add_partitions(self._topic, self._partitions)
            self._producer.list_topics(self._topic, timeout=30)  # else it knows none of them
        return super().send(numbers)


class _Transactional(_Sender):
    """Sends in transactions, each open for a while; what one of them aborts another sends again.

    What was aborted nobody may ever see: it would be handled twice, and nothing would tell.
    """

    def __init__(self, server: KafkaServer, topic: str) -> None:
        super().__init__(server, topic, **{"transactional.id": topic})
        self._aborting = _Sender(server, topic, **{"transactional.id": f"aborting {topic}"})
        for each in (self, self._aborting):
            each._producer.init_transactions(30)

    def send(self, numbers: Sequence[int]) -> list[int]:
        for each in (self._aborting, self):
            each._producer.begin_transaction()
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


class LivingKafka:
    """A topic of its own at a server, and one for its dead letters.

    :param folder: Whose ``staging`` has the tables.
    :param order: The producer's option.
    :param traffic: How messages come: ``plain``, in ``transactions``, or to a topic that is
        ``growing``.
    """

    kind = "kafka"

    def __init__(
        self,
        server: KafkaServer,
        folder: Path,
        *,
        order: str = "partition",
        traffic: str = "plain",
    ) -> None:
        self._traffic = traffic
        self._server = server
        self._folder = folder
        self._topic = server.topic(f"living-{uuid.uuid4().hex[:12]}", _PARTITIONS)
        self._dead = server.topic(f"{self._topic}-dlt", 1)
        self._proxy: KafkaProxy | None = None
        #: Partition → offsets that :meth:`drain` has found.
        self._drained: dict[int, set[int]] = {}
        self.options: Mapping[str, Any] = {
            "topics": [self._topic],
            "group_id": _GROUP,
            "order": order,
        }
        self.connections = {"living": server.connection()}

    def address(self) -> tuple[str, int]:
        """Where a proxy reaches the server."""
        host, _, port = self._server.bootstrap.partition(":")
        return host, int(port)

    def reached_by(self, port: int) -> None:
        """Let runs go through a proxy at this port, wherever the server sends them."""
        self._proxy = KafkaProxy(self._server.bootstrap, through=port).__enter__()
        self.connections = {
            "living": self._server.connection(**{"bootstrap.servers": self._proxy.bootstrap})
        }

    def free(self) -> bool:
        return True

    def sender(self) -> _Sender:
        return _SENDERS[self._traffic](self._server, self._topic)

    def drain(self) -> list[Left]:
        if self._proxy is not None:
            self._proxy.__exit__()
            self._proxy = None
        return [*self._left(), *self._dead_letters()]

    def _left(self) -> Iterator[Left]:
        tables = {number: self._table(number) for number in self._server.partitions(self._topic)}
        for partition, (offset, _) in self._server.committed(_GROUP, self._topic).items():
            assert offset <= tables[partition].get("base", 0), "the mirror is ahead of the table"
        for message in self._server.read(self._topic):
            partition, offset = message.partition() or 0, message.offset() or 0
            found = self._drained.setdefault(partition, set())
            table = tables[partition]
            if offset in found or _is_done(table, offset):
                continue
            found.add(offset)
            number = number_of(message.value() or b"")
            yield Left(number, *_place(table, offset))

    def _table(self, partition: int) -> dict[str, Any]:
        """The newest version; nothing where nobody has opened the partition."""
        pattern = f"staging/**/tables/{self._topic}/{partition}/*.json"
        versions = sorted(self._folder.glob(pattern), key=lambda path: path.name)
        found: dict[str, Any] = json.loads(versions[-1].read_bytes()) if versions else {}
        return found

    def _dead_letters(self) -> Iterator[Left]:
        found = self._drained.setdefault(-1, set())
        for message in self._server.read(self._dead):
            offset = message.offset() or 0
            if offset in found:
                continue
            found.add(offset)
            headers = dict(message.headers() or [])
            again = headers["broadway.again"] == b"1"
            yield Left(number_of(message.value() or b""), DEAD, again)


def _is_done(table: Mapping[str, Any], offset: int) -> bool:
    return bool(table) and (offset < table["base"] or _within(table.get("done", ()), offset))


def _place(table: Mapping[str, Any], offset: int) -> tuple[str, bool]:
    """Where a message is, and whether it comes marked."""
    for ranges, *_ in table.get("claims", {}).values():
        if _within(ranges, offset):
            return "leased", True
    held = table.get("held", {}).get(str(offset))
    if held is not None and held[1] > time.time():
        return "delay", True
    again = held is not None or _within(table.get("marks", ()), offset)
    return ("returns", True) if again else ("source", False)


def _within(ranges: Sequence[Sequence[int]], offset: int) -> bool:
    return any(low <= offset < high for low, high in ranges)
