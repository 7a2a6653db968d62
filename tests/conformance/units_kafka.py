"""The unit cases of the area ``kafka``.

Broadway's acknowledger is a value: sent offsets, acknowledged offsets, and the last offset that may
be committed.  Its equivalent is a claim with the offsets that callbacks have settled immediately.
The committed offset is one more than Broadway's: the next offset to read, as in Kafka.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_broadway import Broadway, Message, Processors
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.kafka.records import Records
from airflow_broadway.producers.kafka.settling import Claim, Decision, Read, end_claim
from tests.conformance.observed import Case

_GENERATION = "g"


class _ClaimedPartition:
    """A claimed partition with received messages; missing offsets are gaps of the log."""

    def __init__(self, assigned: int, polled: Iterable[int]) -> None:
        self._polled = sorted(polled)
        end = self._polled[-1] + 1
        self._claim = Claim(start=assigned, generation=_GENERATION, end=end)
        self._settle: dict[int, Decision] = {}

    def settle(self, offsets: Iterable[int], action: Action = Action.ACK) -> None:
        """Settles messages; those not held are ignored, as in Broadway."""
        result = self._polled
        self._settle |= {offset: Decision(action) for offset in offsets if offset in result}

    @property
    def offset(self) -> int:
        """The offset that a commit would use now."""
        claim, unsettled = self._claim, [o for o in self._polled if o not in self._settle]
        decisions = {offset: Decision(Action.RELEASE) for offset in unsettled}
        read = Read(claim.start, claim.end, len(self._polled))
        return end_claim(claim, read, decisions, self._settle, None).after.start


def contiguous(case: Case) -> None:
    given, expect = case["given"], case["expect"]
    result = _ClaimedPartition(given["assigned_offset"], given["polled_offsets"])
    last = given["polled_offsets"][-1]
    committed, results = result.offset, []
    for offsets in given["ack_calls"]:
        result.settle(offsets)
        moved = result.offset if result.offset != committed else None
        committed = result.offset
        results.append([committed == last + 1, None if moved is None else moved - 1])
    assert expect["columns"] == ["drained", "committed_offset"]
    assert results == expect["results"]


def failures(case: Case) -> None:
    # Broadway acknowledges failed messages, like ``on_failure="ack"``; the default here is a retry.
    given, expect = case["given"], case["expect"]
    producer = KafkaProducer(group_id="g", topics=["t"], on_failure="ack")
    ref = Records(_GENERATION, by_key=False)
    both = [*given["successful_offsets"], *given["failed_offsets"]]
    result = _ClaimedPartition(min(both), both)
    done: list[int] = []
    for name, failed in (("successful_offsets", False), ("failed_offsets", True)):
        for offset in given[name]:
            [message] = _messages(ref, "t", 0, [offset])
            verdict = producer.verdict(message, failed=failed, stage="batch")
            assert verdict.action is Action.ACK
            result.settle([offset], verdict.action)
            done.append(offset)
    assert sorted(done) == expect["acked_offsets"]
    assert result.offset == max(both) + 1


def commits(case: Case) -> None:
    # A run commits once, at its end; the offset advances with each batch, like Broadway's commits.
    given, expect = case["given"], case["expect"]
    first, count, size = given["begin_offset"], given["messages_per_partition"], given["batch_size"]
    held, moved = _ClaimedPartition(first, range(first, first + count)), []
    for start in range(first, first + count, size):
        held.settle(range(start, start + size))
        moved.append(held.offset - 1)
    assert moved == expect["acks_per_partition"]


class _Record:
    """A stub of a confluent_kafka message."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return b"body"

    def key(self) -> bytes | None:
        return b"key"

    def headers(self) -> list[tuple[str, bytes]] | None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_700_000_000_000


def _messages(records: Records, topic: str, partition: int, offsets: list[int]) -> list[Message]:
    return records.messages(
        topic, partition, map(_Record, offsets), None, datetime.now(UTC), position=0
    )


def metadata(case: Case) -> None:
    given, expect = case["given"]["message"], case["expect"]
    records = Records(_GENERATION, by_key=False)
    [message] = _messages(records, given["topic"], given["partition"], [given["offset"]])
    assert list(message.metadata) == expect["metadata_keys"]
    assert message.batch_key == tuple(expect["batch_key"])
    for name, value in given.items():
        assert message.metadata[name] == value
    for path, attributes in _PARTITIONED.items():
        assert "cannot set option :partition_by" in expect["error"]
        with pytest.raises(OptionsError) as raised:
            type("P", (_OnKafka,), dict(attributes))()
        assert raised.value.path == path


class _OnKafka(Broadway):
    producer = KafkaProducer(group_id="g", topics=["t"])

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


def _by_size(message: Message) -> int:
    return message.size


_PARTITIONED: Mapping[str, Mapping[str, Any]] = {
    "processors.partition_by": {"processors": Processors(concurrency=2, partition_by=_by_size)}
}

KAFKA: dict[str, Callable[[Case], None]] = {
    **{f"kafka-00{number}": contiguous for number in range(1, 6)},
    "kafka-006": failures,
    "kafka-007": commits,
    "kafka-009": metadata,
}
