"""Silent clusters are unreachable, silent partitions damaged, even next to healthy ones."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kafka import client, reader
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.source import KafkaSource
from airflow_broadway.testing.clock import ManualClock
from tests.kafka_group import KafkaGroup
from tests.kafka_proxy import KafkaProxy
from tests.kafka_server import MockKafka

pytestmark = pytest.mark.broker


def test_a_silent_cluster_is_unreachable(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_SILENCE_TIMEOUT", 1.0)
    with MockKafka.start(tmp_path / "mock") as kafka:
        group = KafkaGroup(kafka, tmp_path)
        group.fill(5)
        with group.source() as source:
            kafka.kill()
            with pytest.raises(ProducerUnavailable, match=r"nothing can be received .*: no broker"):
                source.receive(5, timeout=0.0)


def without_end(marker: bytes) -> Callable[[int, bytes], bytes]:
    """Makes the batch that begins with a message declare more bytes than it has: as if cut off."""

    def change(kind: int, response: bytes) -> bytes:
        # In the log's format 2: 61 bytes of a batch, then 6 of its first record, then its value.
        length = response.find(marker) - 6 - 61 + 8
        if length < 0:
            return response
        return response[:length] + struct.pack(">i", 100_000) + response[length + 4 :]

    return change


@pytest.mark.parametrize("traffic", [True, False])
def test_a_silent_partition_is_reported(kafka, tmp_path, monkeypatch, traffic):
    # Given a batch with a damaged length, which the client fetches for ever without an error
    monkeypatch.setattr(reader, "_SILENCE_TIMEOUT", 0.5)
    monkeypatch.setattr(client, "_SILENCE_TIMEOUT", 0.5)
    group = KafkaGroup(kafka, tmp_path, partitions=2)
    kafka.fill(group.topic, [b"damaged"], partition=1)
    error = rf"nothing comes of {group.topic}-1 from offset 0 on, and its end is at 1: it seems th"
    received: list[Message] = []

    def receive(source: KafkaSource) -> None:
        for _ in range(1_000):
            if traffic:
                kafka.fill(group.topic, [b"whole"], partition=0)
            received.extend(source.receive(10, timeout=0.0))

    with KafkaProxy(kafka.bootstrap, change=without_end(b"damaged")) as proxy:
        group.options["hosts"] = proxy.bootstrap

        # Then neither silence nor traffic in another partition hides it
        with group.source("damaged") as source, pytest.raises(ProducerUnavailable, match=error):
            receive(source)
        assert bool(received) is traffic

        # And reading it again for a dead letter fails in the same way
        cluster = Cluster(group.producer(), group.env(""))
        letters = cluster.read({(group.topic, 1): ((0, 1),)}, "it cannot be read")
        with pytest.raises(ProducerUnavailable, match=error):
            next(letters)
        cluster.close()


def test_a_response_over_the_clients_limit_names_the_setting(apache_kafka, tmp_path, monkeypatch):
    # Given a message above the limit of a fetch: the first message is fetched all the same
    monkeypatch.setattr(reader, "_SILENCE_TIMEOUT", 0.5)
    limit = {"fetch.max.bytes": 10_000, "message.max.bytes": 10_000}
    group = KafkaGroup(
        apache_kafka, tmp_path, settings={**limit, "receive.message.max.bytes": 20_000}
    )
    apache_kafka.fill(group.topic, [b"x" * 100_000])

    with pytest.raises(ProducerUnavailable, match=r"increase receive\.message\.max\.bytes"):
        group.drain()


def test_waiting_partitions_are_not_silent():
    clock, place = ManualClock(), ("a", 0)
    silence = reader.Silence(clock, wait=30.0)
    for _ in range(100):
        clock.advance(5.0)
        silence.listened([place], all_heard=False)
    for _ in range(50):  # a run handles messages for an hour between two looks
        clock.advance(3600.0)
        silence.listened([place], all_heard=True)

    assert silence.overdue([place]) is None
    clock.advance(1.0)
    silence.listened([place], all_heard=True)
    assert silence.overdue([place]) == place
    silence.heard(place)
    assert silence.overdue([place]) is None
