from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.producers.rabbitmq.journal import Journal
from airflow_broadway.producers.rabbitmq.queues import Queues
from airflow_broadway.producers.rabbitmq.sweep import due_at, sweep

HOUR = 3600.0
LINK: Any = None


class Broker:
    """The queues, by depth."""

    def __init__(self, **depths: int) -> None:
        self.depths = depths
        self.queues = Queues("q")

    def depth(self, link: Any, name: str) -> int | None:
        return self.depths.get(name)

    def ensure_returns(self, link: Any) -> None:
        self.depths.setdefault(self.queues.returns, 0)

    def delete(self, link: Any, name: str) -> int:
        return self.depths.pop(name)


@pytest.fixture(params=["file", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    made = Journal(f"file://{tmp_path}" if request.param == "file" else None, "q")
    made.note_opened("g1", "lease", due_at(1_000.0, 60.0))
    made.note_settled("g1", {}, None)
    return made


def test_a_lease_queue_is_deleted_an_hour_after_its_last_bundle_can_have_lapsed(
    journal: Journal,
) -> None:
    broker: Any = Broker(lease=0)

    sweep(LINK, broker, journal, 1_000.0 + 60.0 + HOUR - 1)
    assert "lease" in broker.depths
    sweep(LINK, broker, journal, 1_000.0 + 60.0 + HOUR)

    assert "lease" not in broker.depths
    assert broker.queues.returns in broker.depths
    assert journal.settled("g1") is not None


def test_a_lease_queue_that_is_not_empty_stays(journal: Journal) -> None:
    broker: Any = Broker(lease=3)

    sweep(LINK, broker, journal, 10 * HOUR)

    assert broker.depths["lease"] == 3


def test_a_journal_outlives_its_queue_by_a_week(journal: Journal) -> None:
    broker: Any = Broker()
    sweep(LINK, broker, journal, 10 * HOUR)
    sweep(LINK, broker, journal, 10 * HOUR + 6 * 86_400)
    assert journal.settled("g1") is not None
    if not journal.durable:
        return

    sweep(LINK, broker, journal, 10 * HOUR + 8 * 86_400)

    assert journal.settled("g1") is None
    assert journal.due(1e12) == []
