from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.producers.rabbitmq.journal import Journal
from airflow_broadway.producers.rabbitmq.queues import Queues
from airflow_broadway.producers.rabbitmq.sweep import due_at, sweep

HOUR = 3600.0
LINK: Any = None
#: From when on the lease queue may be looked at, and from when on it may be deleted unasked.
DUE, SURE = due_at(1_000.0, 60.0)


def unknown(queue: str) -> int | None:
    return None


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
    made.note_opened("g1", "lease", DUE, SURE)
    made.note_settled("g1", {}, None)
    return made


def test_a_lease_queue_is_deleted_an_hour_after_its_last_bundle_can_have_lapsed(
    journal: Journal,
) -> None:
    broker: Any = Broker(lease=0)

    sweep(LINK, broker, journal, SURE - 1, unknown)
    assert "lease" in broker.depths
    sweep(LINK, broker, journal, SURE, unknown)

    assert SURE >= 1_000.0 + 60.0 + HOUR
    assert "lease" not in broker.depths
    assert broker.queues.returns in broker.depths
    assert journal.settled("g1") is not None


def test_it_is_deleted_sooner_where_the_management_api_counts_what_lapses(
    journal: Journal,
) -> None:
    broker: Any = Broker(lease=0)
    asked: list[str] = []

    def counted(queue: str) -> int:
        asked.append(queue)
        return 0

    sweep(LINK, broker, journal, DUE - 1, counted)
    assert (asked, "lease" in broker.depths) == ([], True)
    sweep(LINK, broker, journal, DUE, counted)

    assert (asked, "lease" in broker.depths) == (["lease"], False)


def test_what_hides_in_the_dead_letter_worker_keeps_its_queue(journal: Journal) -> None:
    # AMQP's count is 0, the management API's is not.
    broker: Any = Broker(lease=0)

    sweep(LINK, broker, journal, DUE, lambda queue: 150)
    sweep(LINK, broker, journal, SURE - 1, unknown)

    assert "lease" in broker.depths


def test_a_lease_queue_that_is_not_empty_stays(journal: Journal) -> None:
    broker: Any = Broker(lease=3)

    sweep(LINK, broker, journal, 10 * HOUR, unknown)

    assert broker.depths["lease"] == 3


def test_a_journal_outlives_its_queue_by_a_week(journal: Journal) -> None:
    broker: Any = Broker()
    sweep(LINK, broker, journal, 10 * HOUR, unknown)
    sweep(LINK, broker, journal, 10 * HOUR + 6 * 86_400, unknown)
    assert journal.settled("g1") is not None
    if not journal.durable:
        return

    sweep(LINK, broker, journal, 10 * HOUR + 8 * 86_400, unknown)

    assert journal.settled("g1") is None
    assert journal.due(1e12) == []
