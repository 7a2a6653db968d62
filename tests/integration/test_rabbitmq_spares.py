"""Lease queues that a run leaves for the next, at a real broker."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from airflow_broadway.producers.rabbitmq.broker import lease_queues
from tests.rabbitmq_place import Place

pytestmark = pytest.mark.broker


def lease_queues_of(place: Place) -> list[str]:
    return place.server.queue_names(f"broadway.lease.{place.name}.")


def run(place: Place, generation: str, **options: Any) -> None:
    place.send(b"1")
    _, report = place.settle(generation, on_failure="retry", **options)
    assert report.acked == 1


def test_runs_of_two_leases_on_one_queue_leave_one_lease_queue_each(place: Place) -> None:
    place.declare()

    for turn in range(3):
        run(place, f"long-{turn}", lease=3600.0)
        run(place, f"short-{turn}", lease=600.0)

    assert len(lease_queues_of(place)) == 2


def test_each_of_several_producers_finds_a_lease_queue(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(*generations: str) -> set[str]:
        """The lease queues of producers that are at work beside each other."""
        with contextlib.ExitStack() as stack:
            options: dict[str, Any] = {"concurrency": 2, "on_failure": "retry"}
            names = set()
            for generation in generations:
                source = stack.enter_context(place.source(generation, **options))
                place.send(b"1")
                assert len(place.take(source)) == 1
                assert source.stop() == []
                names.add(str(source.lease.state["lease_queue"]))
        return names

    # Given a run of two producers
    place.declare()
    before = used("g1", "g2")
    left = set(lease_queues_of(place)) - before
    assert len(left) == 2

    # When the next takes place, both find one, and declare none for themselves
    monkeypatch.setattr(lease_queues, "_MAX_TRIES", 0)
    assert used("g3", "g4") == left
