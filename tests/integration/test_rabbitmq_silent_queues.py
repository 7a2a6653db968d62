"""Quorum queues that do not answer: what RabbitMQ leaves of some when it is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker.topology import Topology
from airflow_broadway.testing.contract import settlement_of
from tests.rabbitmq_fixtures import skip_without_own_server, wanted_server
from tests.rabbitmq_place import Place

pytestmark = pytest.mark.broker


@pytest.fixture
def place(tmp_path: Path) -> Place:
    skip_without_own_server()  # the tests end processes of the broker's
    made = Place(wanted_server(), tmp_path)
    made.declare()
    return made


def test_a_lease_queue_is_deleted_only_when_it_answers(place: Place) -> None:
    # Given a lease queue that has no leader, as all have for a moment when their broker starts
    place.send(b"1")
    with place.source("g1") as source:
        messages = place.take(source) + list(source.stop())
        lease = source.lease
    queue = lease.state["lease_queue"]
    place.server.stop_queue(queue)
    link = ConnectionThread.to(address_for(place.producer(), place.env()))

    # When it is deleted, then it is not: RabbitMQ may end the dead-letter workers of all queues
    topology = Topology(place.producer())
    with pytest.raises(ProducerUnavailable, match="INTERNAL_ERROR"):
        topology.delete(link, queue)
    link.close()

    # And as soon as it answers it can be
    place.server.start_queue(queue)
    assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=1)
