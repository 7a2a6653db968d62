"""Unresponsive quorum queues, which RabbitMQ may leave behind when it is killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.testing.contract import settlement_of
from tests.rabbitmq_fixtures import skip_without_own_server, wanted_server
from tests.rabbitmq_place import Place

pytestmark = pytest.mark.broker


@pytest.fixture
def place(tmp_path):
    skip_without_own_server()  # the tests stop processes of the broker
    place_ = Place(wanted_server(), tmp_path)
    place_.declare()
    return place_


def test_an_unresponsive_holding_queue_loses_nothing(place):
    # Given a holding queue without a leader, as every one is briefly while its broker starts
    place.send(b"1")
    messages, lease = place.hold("g1")
    queue = lease.state["holding_queue"]
    place.server.stop_queue(queue)

    # When it is settled, then an error is raised
    options = {"backoff_min": 0.01, "backoff_max": 0.1, "reconnect_timeout": 3.0}
    with pytest.raises(ProducerUnavailable):
        place.carry_out(lease, settlement_of(messages), **options)

    # And once it responds, it is settled
    place.server.start_queue(queue)
    assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=1)


class TestStandingQueues:
    """A delay queue that a run declared, and that ends each connection that uses it."""

    def make_unresponsive(
        self, place: Place, *, noted: bool
    ) -> tuple[str, Callable[[], SettleReport]]:
        """Returns an unresponsive delay queue, and a function that settles a message into it.

        :param noted: Whether the journal records the queue as declared and not yet relied on.
        """
        place.send(b"1")
        with place.source("g1") as source:
            messages = place.take(source) + list(source.stop())
            lease = source.lease
        queue = place.queues.delay(60)
        if noted:
            QueueJournal(place.env().staging, place.name).note_declared(queue)
        with place.channel() as channel:
            channel.queue_declare(queue, durable=True, arguments=place.queues.delay_arguments(60))
        place.server.stop_queue(queue)
        retry = Verdict(Action.RETRY, 60.0, "why", "process")
        options = {"backoff_min": 0.01, "backoff_max": 0.1, "reconnect_timeout": 3.0}
        return queue, lambda: place.carry_out(lease, settlement_of(messages, rest=retry), **options)

    def test_an_unused_queue_is_redeclared_on_the_next_connection(self, place):
        queue, settle = self.make_unresponsive(place, noted=True)

        assert settle() == SettleReport(requeued=1)

        assert place.get(queue) is not None

    def test_a_queue_that_may_hold_messages_is_not_deleted(self, place):
        queue, settle = self.make_unresponsive(place, noted=False)

        with pytest.raises(ProducerUnavailable, match=r"'broadway\.delay.*does not answer"):
            settle()

        place.server.start_queue(queue)
        assert settle() == SettleReport(requeued=1)
