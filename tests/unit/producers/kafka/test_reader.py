"""Reading of one partition, without a cluster."""

from __future__ import annotations

from typing import Any

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.kafka.opening import View
from airflow_broadway.producers.kafka.options import key_group
from airflow_broadway.producers.kafka.reader import PartitionReader
from airflow_broadway.producers.kafka.settling import Claim, Failed

NOW = 1_000.0


class Record:
    """A message of the Kafka client."""

    def __init__(self, offset: int, key: bytes | None = None, /, **headers: object) -> None:
        self._offset, self._key = offset, key
        self._headers = [
            (f"broadway.{name.replace('_', '-')}", str(value).encode())
            for name, value in headers.items()
        ]

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def headers(self) -> list[tuple[str, bytes]]:
        return self._headers

    def value(self) -> bytes:
        return b""

    def leader_epoch(self) -> int | None:
        return None


def reader(order: str = "partition", *, retries: bool = False, **fields: Any) -> PartitionReader:
    return reader_of(View(Claim(start=0, **fields), end=100), order, retries=retries)


def reader_of(view: View, order: str = "none", *, retries: bool = False) -> PartitionReader:
    producer = KafkaProducer(group_id="g", topics=["t"], order=order)
    place = ("t.retry" if retries else "t", 0)
    return PartitionReader(place, view, NOW, producer, ProducerEnv(generation="own"))


def offsets(records: Any) -> list[int]:
    return [record.offset() for record in records]


def copied(offset: int, *, due: float, group: str = "g", generation: str = "other") -> Record:
    return Record(
        offset,
        group=group,
        generation=generation,
        topic="t",
        partition=0,
        offset=offset,
        attempt=1,
        not_before=round(due * 1000),
    )


def test_waiting_message_blocks_ordered_partition_until_due():
    one = reader(failed={3: Failed(1, NOW + 50.0)})

    assert offsets(one.wanted([Record(n) for n in range(6)], NOW)) == [0, 1, 2]
    assert (one.finished, one.position, one.look_again) == (True, 3, NOW + 50.0)

    one.go_on(NOW + 50.0)
    taken = one.take(one.wanted([Record(n) for n in range(3, 6)], NOW + 50.0))
    assert offsets(taken) == [3, 4, 5]
    assert one.marks(taken) == [(2, True), (1, False), (1, False)]


def test_waiting_message_blocks_its_key():
    one = reader("key", failed={0: Failed(1, NOW + 50.0, key_group("a"))})

    taken = one.take(one.wanted([Record(n, b"ab"[n % 2 : n % 2 + 1]) for n in range(6)], NOW))

    assert offsets(taken) == [1, 3, 5]
    assert one.left == ((0, 1), (2, 3), (4, 5))


def test_skipped_key_is_not_overtaken_when_due():
    one = reader("key", failed={0: Failed(1, NOW + 50.0, key_group("a"))})
    assert offsets(one.take(one.wanted([Record(0, b"a"), Record(1, b"a")], NOW))) == []

    one.go_on(NOW + 50.0)
    taken = one.take(one.wanted([Record(2, b"a"), Record(3, b"b")], NOW + 50.0))

    assert offsets(taken) == [3]
    assert one.left == ((0, 3),)


def test_keyless_message_waits_alone():
    one = reader("key", failed={1: Failed(1, NOW + 50.0)})

    assert offsets(one.take(one.wanted([Record(n) for n in range(3)], NOW))) == [0, 2]
    assert one.left == ((1, 2),)


def test_undue_copy_blocks_retry_topic():
    one = reader("none", retries=True)
    records = [copied(0, due=NOW), copied(1, due=NOW + 9.0), copied(2, due=NOW)]

    assert offsets(one.wanted(records, NOW)) == [0]
    assert (one.finished, one.look_again) == (True, NOW + 9.0)


def test_own_copy_ends_reading():
    one = reader("none", retries=True)

    records = [copied(0, due=0.0), copied(1, due=0.0, generation="own")]
    assert offsets(one.wanted(records, NOW)) == [0]
    assert (one.finished, one.look_again) == (True, None)


def test_copies_of_other_groups_are_skipped():
    one = reader("none", retries=True)
    records = [copied(0, due=NOW + 9.0, group="other"), Record(1), copied(2, due=NOW)]

    taken = one.take(one.wanted(records, NOW))

    assert offsets(taken) == [2]


def test_finished_messages_beyond_offset_are_skipped():
    one = reader("none", done=((1, 3),), marked=4)

    taken = one.take(one.wanted([Record(n) for n in range(5)], NOW))

    assert offsets(taken) == [0, 3, 4]
    assert one.marks(taken) == [(1, True), (1, True), (1, False)]


def test_claim_reaches_ahead_within_log():
    one = reader()
    one.wanted([Record(0)], NOW)

    assert one.ahead(10) == 10
    assert one.ahead(1_000_000) == 4_000


def test_compacted_waiting_message_is_superseded():
    one = reader(failed={2: Failed(1, 0.0), 4: Failed(1, 0.0), 9: Failed(1, 0.0)})

    assert one.superseded(0, [Record(1), Record(4), Record(5)]) == [2]


def test_partition_claimed_elsewhere_is_polled_again():
    claim = Claim(start=0, generation="another", end=5)
    view = View(Claim(start=0, marked=5), end=100, known=claim, held_until=NOW + 100.0)
    one = reader_of(view)

    assert one.quiet
    assert one.look_again == NOW + 10.0
