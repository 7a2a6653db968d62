"""Which messages of a portion a generation may handle, at a broker of receipts."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.producers.kit.failures import Failures
from airflow_broadway.producers.kit.receipts.isolation import Isolation, Sorted
from airflow_broadway.producers.kit.receipts.receipts import ReceiptsFolder
from airflow_broadway.testing.clock import ManualClock

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def isolation_of(tmp_path: Path, **deaths: int) -> Isolation:
    """With so many deaths of each message, and ``max_crashes`` of 2: a portion is 10, then 1."""
    staging, failures = f"file://{tmp_path}", partial(Failures, kept_days=1)
    for key, count in deaths.items():
        for _ in range(count):
            ReceiptsFolder("sqs", staging, "q", failures=failures).deaths.count([key], NOW)
    folder = ReceiptsFolder("sqs", staging, "q", failures=failures)
    env = ProducerEnv(generation="g", clock=ManualClock(NOW))
    return Isolation(Producer(max_crashes=2), env, folder)


def test_a_run_begins_with_suspects_and_takes_nothing_beside_them(tmp_path: Path) -> None:
    isolation = isolation_of(tmp_path, a=1, b=2, c=2)

    found = isolation.sorted(["x", "a", "b", "c"], {}, fresh=True, now=NOW)

    assert found == Sorted(["b", "c"], ["x", "a"], [])
    assert isolation.alone


def test_one_death_changes_nothing(tmp_path: Path) -> None:
    isolation = isolation_of(tmp_path, a=1)

    assert isolation.sorted(["x", "a"], {}, fresh=True, now=NOW) == Sorted(["x", "a"], [], ())
    assert not isolation.alone


def test_suspects_wait_while_a_run_holds_something(tmp_path: Path) -> None:
    isolation = isolation_of(tmp_path, a=2)

    assert isolation.sorted(["x", "a"], {}, fresh=False, now=NOW) == Sorted(["x"], ["a"], ())
    assert not isolation.alone


def test_what_crashed_alone_is_set_aside_at_any_time(tmp_path: Path) -> None:
    for fresh in (True, False):
        isolation = isolation_of(tmp_path / str(fresh), a=4)

        found = isolation.sorted(["x", "a"], {}, fresh=fresh, now=NOW)

        assert found == Sorted(["x"], [], ["a"])
        assert not isolation.alone


def test_what_follows_a_suspect_in_its_group_waits_with_it(tmp_path: Path) -> None:
    groups = {"a1": "A", "a2": "A", "a3": "A", "b1": "B", "a4": "A"}
    isolation = isolation_of(tmp_path, a2=2)

    found = isolation.sorted(["a1", "a2", "a3", "b1"], groups, fresh=False, now=NOW)

    assert found == Sorted(["a1", "b1"], ["a2", "a3"], ())
    # And what comes later in this run
    assert isolation.sorted(["a4"], groups, fresh=False, now=NOW) == Sorted([], ["a4"], ())


def test_a_suspect_does_not_overtake_its_group(tmp_path: Path) -> None:
    isolation = isolation_of(tmp_path, a2=2, b1=2)
    groups = {"a1": "A", "a2": "A", "b1": "B"}

    found = isolation.sorted(["a1", "a2", "b1"], groups, fresh=True, now=NOW)

    assert found == Sorted(["b1"], ["a1", "a2"], [])


def test_a_suspect_behind_another_of_its_group_alone_holds_up_nothing(tmp_path: Path) -> None:
    isolation = isolation_of(tmp_path, a2=2)
    groups = {"a1": "A", "a2": "A", "b1": "B"}

    found = isolation.sorted(["a1", "a2", "b1"], groups, fresh=True, now=NOW)

    assert found == Sorted(["a1", "b1"], ["a2"], ())
    assert not isolation.alone


def test_suspects_are_looked_for_only_where_there_are_some(tmp_path: Path) -> None:
    assert not isolation_of(tmp_path / "none").searches
    assert not isolation_of(tmp_path / "one", a=1).searches
    assert isolation_of(tmp_path / "two", a=2).searches
