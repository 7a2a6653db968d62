"""How full a subscription is: by Cloud Monitoring, or not known; never 0 for what is not known."""

from __future__ import annotations

import pytest

from airflow_broadway.producers.pubsub import adapter
from airflow_broadway.testing import ManualClock
from tests.pubsub_stub.monitoring import Monitoring
from tests.unit.producers.pubsub.kit import place


@pytest.fixture
def monitoring(monkeypatch):
    with Monitoring(ManualClock()) as made:
        # An emulator has no Cloud Monitoring beside it; this one has.
        monkeypatch.setattr(adapter, "open_metrics", made.client)
        yield made


def test_what_waits_is_what_is_not_acknowledged_and_not_held_by_runs(monitoring, tmp_path):
    with place(tmp_path) as at:
        at.put("a", "b", "c")
        run = at.begin()
        assert len(run.take()) == 3
        monitoring.values = {
            "num_undelivered_messages": [10, 99],
            "oldest_unacked_message_age": [4711, 1],
        }

        other = at.begin()
        depth = other.producer.depth(other.env)

        assert depth is not None
        # Google's age is of all that is not acknowledged, though the oldest may be among the held.
        assert (depth.ready, depth.leased, depth.oldest_age) == (7, 3, 4711.0)
        at.clock.advance(600.0)  # the lease has lapsed, and nobody has settled
        later = other.producer.depth(other.env)
        assert later is not None
        assert (later.ready, later.leased) == (10, 0)
        for request in monitoring.asked:
            assert request.name == "projects/broadway-tests"
            assert f'subscription_id = "{at.name.split("/")[-1]}"' in request.filter


@pytest.mark.parametrize("why", ["denied", "no value", "half of it", "an emulator"])
def test_what_is_not_known_is_not_0(why, monitoring, monkeypatch, tmp_path):
    with place(tmp_path) as at:
        run = at.begin()
        monitoring.refuses = why == "denied"
        if why == "half of it":
            monitoring.values = {"num_undelivered_messages": [10]}
        if why == "an emulator":
            monkeypatch.undo()
        assert run.producer.depth(run.env) is None
