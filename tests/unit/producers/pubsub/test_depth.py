"""Depth by Cloud Monitoring; ``None`` where it is unknown."""

from __future__ import annotations

import pytest

from airflow_broadway.producers.pubsub import adapter
from airflow_broadway.testing import ManualClock
from tests.pubsub_stub.monitoring import Monitoring


@pytest.fixture
def monitoring(monkeypatch):
    with Monitoring(ManualClock()) as server:
        # An emulator has no Cloud Monitoring.
        monkeypatch.setattr(adapter, "open_metrics", server.client)
        yield server


def test_ready_is_unacked_minus_leased(monitoring, sub):
    sub.put("a", "b", "c")
    assert len(sub.begin().take()) == 3
    monitoring.values = {
        "num_undelivered_messages": [10, 99],
        "oldest_unacked_message_age": [4711, 1],
    }

    other = sub.begin()
    depth = other.producer.depth(other.env)

    assert depth is not None
    # Google's age includes leased messages.
    assert (depth.ready, depth.leased, depth.oldest_age) == (7, 3, 4711.0)
    sub.clock.advance(600.0)  # the lease has lapsed, unsettled
    later = other.producer.depth(other.env)
    assert later is not None
    assert (later.ready, later.leased) == (10, 0)
    for request in monitoring.requests:
        assert request.name == "projects/broadway-tests"
        assert f'subscription_id = "{sub.name.split("/")[-1]}"' in request.filter


@pytest.mark.parametrize("reason", ["denied", "no value", "half of it", "an emulator"])
def test_unknown_depth_is_none(reason, monitoring, monkeypatch, sub):
    run = sub.begin()
    monitoring.refuses = reason == "denied"
    if reason == "half of it":
        monitoring.values = {"num_undelivered_messages": [10]}
    if reason == "an emulator":
        monkeypatch.undo()
    assert run.producer.depth(run.env) is None
