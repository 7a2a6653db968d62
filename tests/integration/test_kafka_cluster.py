"""A cluster of three brokers, one of which is killed while a run holds messages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.producers.kafka.client import Cluster
from tests.kafka_fixtures import skip_without_apache_kafka
from tests.kafka_group import KafkaGroup
from tests.kafka_server import ApacheKafka
from tests.waiting import eventually

pytestmark = pytest.mark.broker


@pytest.fixture
def cluster(tmp_path):
    skip_without_apache_kafka()
    server = ApacheKafka(tmp_path / "kafka", brokers=3)
    try:
        server.run()
        yield server
    finally:
        server.kill()


def test_killing_one_of_three_brokers_loses_nothing(cluster, tmp_path):
    group = KafkaGroup(cluster, tmp_path, partitions=3)
    bodies = group.fill(300)

    def leaders() -> list[int]:
        partitions = cluster.admin().list_topics(timeout=30).topics[group.topic].partitions
        return [partition.leader for partition in partitions.values()]

    with group.source("first") as source:
        messages = group.take(source, 150)
        leader = leaders()[0]

        # When the leader of a partition is killed during the run
        cluster.kill_node(leader)
        messages += group.take(source)
        source.stop()
        lease = source.lease
    eventually(lambda: leader not in leaders(), timeout=120.0)
    dead = Verdict(Action.DEAD_LETTER, reason="Broken: no", stage="process")

    # Then the run continues and settles its messages, and the other brokers have its commits
    report = group.settle(lease, messages, {messages[0].message_id: dead})
    assert report == SettleReport(acked=299, dead_lettered=1)
    assert sorted(message.data for message in messages) == bodies
    assert group.committed() == {0: 100, 1: 100, 2: 100}
    assert cluster.bodies(group.letters) == [messages[0].data]

    # And later messages are received with two brokers, then with three again
    group.fill(3, start=300)
    assert len(group.drain()) == 3
    cluster.run_node(leader)
    group.fill(3, start=303)
    assert len(group.drain()) == 3


def test_a_client_that_never_reached_the_old_leader_queries_offsets_at_the_new_one(
    cluster, tmp_path
):
    # Given a dead leader of a partition, other than the group's coordinator, whose connection would
    # make the client look for leaders
    group = KafkaGroup(cluster, tmp_path, partitions=3)
    group.fill(300)
    with closing(Cluster(group.producer(), group.env("first"))) as client:
        client.committed([(group.topic, 0)])
    topics = cluster.admin().list_topics(timeout=30).topics
    [coordinator] = [p.leader for p in topics["__consumer_offsets"].partitions.values()]
    number, leader = next(
        (number, partition.leader)
        for number, partition in topics[group.topic].partitions.items()
        if partition.leader != coordinator
    )
    cluster.kill_node(leader)

    # When other clients query its offsets before a new leader is elected
    place = (group.topic, number)
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        clients = [
            stack.enter_context(closing(Cluster(group.producer(), group.env("second"))))
            for _ in range(2)
        ]
        ends = pool.submit(clients[0].ends, place)
        first = pool.submit(clients[1].at_timestamp, [place], 0.0)

        # Then they wait for it
        assert ends.result(90) == (0, 100)
        assert first.result(90) == {place: 0}
