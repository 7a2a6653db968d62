from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.rabbitmq.broker import queue_calls
from airflow_broadway.producers.rabbitmq.broker.names import QueueNames
from airflow_broadway.producers.rabbitmq.broker.sweep import due_at, sweep
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, digest

HOUR, DAY = 3600.0, 86_400.0
LEASE = QueueNames("q").lease("g1")
UNUSED, OTHER = (QueueNames("q").lease(each) for each in ("g2", "g3"))
#: From when on the lease queue may be looked at, and from when on it may be deleted unasked.
DUE, SURE = due_at(1_000.0, 60.0)


def unknown(queue: str) -> int | None:
    return None


class Broker:
    """The queues, by depth."""

    def __init__(self, lease: int | None = None) -> None:
        self.depths = {} if lease is None else {LEASE: lease}
        self.queues = QueueNames("q")
        #: Those that do not answer, or have more than they count.
        self.silent: set[str] = set()
        #: Those to which nobody can publish any more.
        self.fenced: set[str] = set()
        self.standing = self.leases = self

    def is_empty(self, connection: Any, name: str) -> bool:
        return self.depths.get(name) == 0 and name not in self.silent

    def fence(self, connection: Any, name: str) -> None:
        self.fenced.add(name)

    def ensure_returns(self, connection: Any) -> None:
        self.depths.setdefault(self.queues.returns, 0)

    def delete(self, connection: Any, name: str) -> int:
        return self.depths.pop(name)


@pytest.fixture(autouse=True)
def depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker is its own connection."""
    monkeypatch.setattr(queue_calls, "depth", lambda broker, name: broker.depths.get(name))


@pytest.fixture(params=["file", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> QueueJournal:
    made = QueueJournal(f"file://{tmp_path}" if request.param == "file" else None, "q")
    made.note_opened("g1", LEASE, DUE, SURE)
    made.note_settled("g1", SettleReport(), None)
    return made


def test_a_lease_queue_is_deleted_an_hour_after_its_last_bundle_can_have_lapsed(
    journal: QueueJournal,
) -> None:
    broker: Any = Broker(lease=0)

    sweep(broker, broker, journal, SURE - 1, unknown)
    assert LEASE in broker.depths
    sweep(broker, broker, journal, SURE, unknown)

    assert SURE >= 1_000.0 + 60.0 + HOUR
    assert LEASE not in broker.depths
    assert broker.queues.returns in broker.depths
    assert journal.settled("g1") is not None


def test_it_is_deleted_sooner_where_the_management_api_counts_what_lapses(
    journal: QueueJournal,
) -> None:
    broker: Any = Broker(lease=0)
    asked: list[str] = []

    def counted(queue: str) -> int:
        asked.append(queue)
        return 0

    sweep(broker, broker, journal, DUE - 1, counted)
    assert (asked, LEASE in broker.depths) == ([], True)
    sweep(broker, broker, journal, DUE, counted)

    assert (asked, LEASE in broker.depths) == ([LEASE], False)


def test_what_hides_in_the_dead_letter_worker_keeps_its_queue(journal: QueueJournal) -> None:
    # AMQP's count is 0, the management API's is not.
    broker: Any = Broker(lease=0)

    sweep(broker, broker, journal, DUE, lambda queue: 150)
    sweep(broker, broker, journal, SURE - 1, unknown)

    assert LEASE in broker.depths


def test_a_lease_queue_that_only_counts_nothing_stays(journal: QueueJournal) -> None:
    # A leader that is slow to answer is counted 0.
    broker: Any = Broker(lease=0)
    broker.silent.add(LEASE)

    sweep(broker, broker, journal, 10 * HOUR, unknown)
    assert LEASE in broker.depths

    broker.silent.clear()
    sweep(broker, broker, journal, 20 * DAY, unknown)
    assert LEASE not in broker.depths


def test_a_lease_queue_that_is_not_empty_stays(journal: QueueJournal) -> None:
    broker: Any = Broker(lease=3)

    sweep(broker, broker, journal, 10 * HOUR, unknown)

    assert broker.depths[LEASE] == 3


def test_a_journal_outlives_its_queue_by_a_week(journal: QueueJournal) -> None:
    broker: Any = Broker()
    sweep(broker, broker, journal, 10 * HOUR, unknown)
    sweep(broker, broker, journal, 10 * HOUR + 6 * 86_400, unknown)
    assert journal.settled("g1") is not None
    if not journal.files.durable:
        return

    sweep(broker, broker, journal, 10 * HOUR + 8 * DAY, unknown)
    assert journal.settled("g1") is not None  # a run may have a bundle in its hands
    sweep(broker, broker, journal, 10 * HOUR + 9 * DAY, unknown)

    assert journal.settled("g1") is None
    assert journal.due(1e12) == []


def test_a_journal_stays_as_long_as_a_returned_bundle_may_speak_of_it(tmp_path: Path) -> None:
    # Given a generation in staged custody whose lease queue is gone, and a Dag that is paused
    journal = QueueJournal(f"file://{tmp_path}", "q")
    journal.note_opened("g1", LEASE, DUE, SURE)
    journal.files.put(f"{digest('g1')}/1.bundle", b"messages")
    broker: Any = Broker()
    sweep(broker, broker, journal, 10 * HOUR, unknown)

    # When bundles lie in the returns queue for weeks, ready or in a run's hands
    broker.depths[broker.queues.returns] = 1
    sweep(broker, broker, journal, 30 * DAY, unknown)
    broker.depths[broker.queues.returns] = 0
    sweep(broker, broker, journal, 40 * DAY, lambda queue: 1)
    sweep(broker, broker, journal, 50 * DAY, unknown)
    broker.depths[broker.queues.returns] = 1
    sweep(broker, broker, journal, 60 * DAY, unknown)

    # Then what they refer to is there, until the broker counts none
    assert journal.files.get(f"{digest('g1')}/1.bundle") == b"messages"
    sweep(broker, broker, journal, 70 * DAY, lambda queue: 0)
    assert journal.due(1e12) == []
    with pytest.raises(StagingError):
        journal.files.get(f"{digest('g1')}/1.bundle")


def test_what_is_no_lease_queue_of_this_source_is_not_looked_at(journal: QueueJournal) -> None:
    broker: Any = Broker(lease=0)
    foreign = QueueNames("another").lease("g1")
    broker.depths[foreign] = 0
    journal.note_opened("forged", foreign, DUE, SURE)

    sweep(broker, broker, journal, SURE, unknown)

    assert foreign in broker.depths
    assert LEASE not in broker.depths


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".DS_Store", "{}"),
        ("1000-aa.json", "no JSON"),
        ("1000-aa.json", "[1]"),
        ("1000-aa.json", '{"queue": "x", "sure": {}}'),
        ("1000-..%2Faa.json", "{}"),
        ("nan-aa.json", "{}"),
    ],
)
def test_a_stray_file_does_not_keep_lease_queues_from_being_swept(
    tmp_path: Path, name: str, text: str
) -> None:
    broker: Any = Broker(lease=0)
    journal = QueueJournal(f"file://{tmp_path}", "q")
    journal.note_opened("g1", LEASE, DUE, SURE)
    [folder] = (tmp_path / "rabbitmq").iterdir()
    (folder / "due" / name).write_text(text)

    sweep(broker, broker, journal, SURE, unknown)

    assert LEASE not in broker.depths


def test_a_lease_queue_is_claimed_by_one_generation_alone(journal: QueueJournal) -> None:
    assert journal.claim(LEASE, "g1")
    assert journal.claim(LEASE, "g1")
    assert not journal.claim(LEASE, "g2")
    assert journal.claim(QueueNames("q").lease("g2"), "g2")


def test_a_lease_queue_is_looked_at_a_minute_after_its_last_bundle_can_have_lapsed() -> None:
    assert due_at(1_000.0, 600.0) == (1_000.0 + 600.0 + 60.0, 1_000.0 + 600.0 + 60.0 + 3_600.0)


@pytest.mark.parametrize("claimed", [False, True])
def test_a_lease_queue_whose_process_died_before_it_came_into_use_is_deleted(
    journal: QueueJournal, claimed: bool
) -> None:
    # Given a queue that was declared for the next run, and perhaps taken, by one that died then
    journal.note_unused(UNUSED, 2_000.0)
    if claimed:
        journal.claim(UNUSED, "g2")
    broker: Any = Broker()
    broker.depths[UNUSED] = 0

    sweep(broker, broker, journal, 1_999.0, unknown)
    assert UNUSED in broker.depths
    sweep(broker, broker, journal, 2_000.0, unknown)

    assert UNUSED not in broker.depths
    assert not [due for due in journal.due(1e12) if due.queue == UNUSED]
    assert not journal.files.names(f"claims/{digest(UNUSED)}")


def test_one_that_does_not_answer_is_asked_every_day_for_a_week(
    journal: QueueJournal, caplog: pytest.LogCaptureFixture
) -> None:
    # Given one that never came into use, in a broker that cannot say whether it is empty
    journal.note_unused(UNUSED, 2_000.0)
    broker: Any = Broker()
    broker.depths[UNUSED] = 0
    broker.silent.add(UNUSED)

    for day in range(8):
        sweep(broker, broker, journal, 2_000.0 + day * DAY, unknown)
        assert [due.queue for due in journal.due(1e12)].count(UNUSED) == 1
    assert "Delete it by hand" not in caplog.text

    # When a week is over, people are asked to
    sweep(broker, broker, journal, 2_000.0 + 8 * DAY, unknown)
    assert UNUSED not in [due.queue for due in journal.due(1e12)]
    assert f"{UNUSED!r} never came into use" in caplog.text


def test_one_that_answers_again_is_deleted(journal: QueueJournal) -> None:
    journal.note_unused(UNUSED, 2_000.0)
    broker: Any = Broker()
    broker.depths[UNUSED] = 0
    broker.silent.add(UNUSED)
    sweep(broker, broker, journal, 2_000.0, unknown)

    broker.silent.clear()
    sweep(broker, broker, journal, 2_000.0 + DAY, unknown)

    assert UNUSED not in broker.depths
    assert UNUSED not in [due.queue for due in journal.due(1e12)]


def test_one_that_came_into_use_is_left_to_its_generation(
    journal: QueueJournal,
) -> None:
    journal.note_unused(UNUSED, 2_000.0)
    journal.claim(UNUSED, "g2")
    journal._unused.clear()  # the process died before it could remove the note
    journal.note_opened("g2", UNUSED, 9_000.0, 9_000.0)
    broker: Any = Broker()
    broker.depths[UNUSED] = 0

    sweep(broker, broker, journal, 2_000.0, unknown)

    assert UNUSED in broker.depths
    assert [due.unused for due in journal.due(1e12) if due.queue == UNUSED] == [False]


def test_one_whose_generation_uses_another_is_deleted(journal: QueueJournal) -> None:
    # Given a process whose connection is lost when it has taken a queue, and that takes another
    journal.note_unused(UNUSED, 2_000.0)
    journal.claim(UNUSED, "g2")
    journal.note_opened("g2", QueueNames("q").lease("g2.1"), 9_000.0, 9_000.0)
    broker: Any = Broker()
    broker.depths[UNUSED] = 0

    sweep(broker, broker, journal, 2_000.0, unknown)

    assert UNUSED not in broker.depths
    assert UNUSED not in [due.queue for due in journal.due(1e12)]


@pytest.mark.parametrize("text", [b"{", b"{}", b"7"])
def test_one_whose_generation_left_what_cannot_be_read_is_left_to_it(
    journal: QueueJournal, text: bytes
) -> None:
    for queue in (UNUSED, OTHER):
        journal.note_unused(queue, 2_000.0)
    journal.claim(UNUSED, "g2")
    journal.note_opened("g2", UNUSED, 9_000.0, 9_000.0)
    journal.note_unused(UNUSED, 2_000.0)
    journal.files.put(f"{digest('g2')}/opened.json", text)
    broker: Any = Broker()
    broker.depths.update({UNUSED: 0, OTHER: 0})

    sweep(broker, broker, journal, 2_000.0, unknown)

    assert UNUSED in broker.depths
    assert OTHER not in broker.depths  # and no other waits for it


def test_who_wakes_while_its_queue_goes_publishes_nothing_to_it(journal: QueueJournal) -> None:
    # Given a process that slept for hours since it took a queue, and wakes once that says "empty"
    class Waking(Broker):
        def is_empty(self, connection: Any, name: str) -> bool:
            empty = super().is_empty(connection, name)
            if name not in self.fenced:
                self.depths[name] += 1
            return empty

        def delete(self, connection: Any, name: str) -> int:
            assert self.depths[name] == 0
            return super().delete(connection, name)

    journal.note_unused(UNUSED, 2_000.0)
    journal.claim(UNUSED, "g2")
    broker: Any = Waking()
    broker.depths[UNUSED] = 0

    sweep(broker, broker, journal, 2_000.0, unknown)

    assert UNUSED not in broker.depths


def test_one_that_a_sweep_deletes_is_taken_by_nobody(journal: QueueJournal) -> None:
    journal.note_unused(UNUSED, 2_000.0)

    assert not journal.is_used(UNUSED)

    assert not journal.claim(UNUSED, "g2")
