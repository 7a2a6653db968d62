"""Which messages of a portion a generation may handle, at a broker of receipts."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kit.failures import Failures
from airflow_broadway.producers.kit.receipts.isolation import Isolation, Sorted
from airflow_broadway.producers.kit.receipts.polls import Received
from airflow_broadway.producers.kit.receipts.receipts import ReceiptsFolder
from airflow_broadway.testing.clock import ManualClock

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def folder_of(tmp_path: Path) -> ReceiptsFolder:
    failures = partial(Failures, kept_days=1)
    return ReceiptsFolder("sqs", f"file://{tmp_path}", "q", failures=failures)


def isolation_of(tmp_path: Path, **deaths: int) -> Isolation:
    """With so many deaths of each message, the last of them alone, and ``max_crashes`` of 2: a
    portion is 10, then 1.
    """
    for key, count in deaths.items():
        for number in range(count):
            folder = folder_of(tmp_path)
            folder.deaths.count(f"{key}{number}", [key], NOW, alone=number == count - 1)
    folder = folder_of(tmp_path)
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


def test_a_suspect_in_front_of_a_worse_one_of_its_group_is_taken_before_it(tmp_path: Path) -> None:
    isolation = isolation_of(tmp_path, a1=2, a2=3, b1=2)
    groups = {"a1": "A", "a2": "A", "b1": "B"}

    found = isolation.sorted(["b1", "a1", "a2"], groups, fresh=True, now=NOW)

    assert found == Sorted(["a1"], ["b1", "a2"], [])


def test_the_worst_suspect_waits_behind_its_group_and_keeps_no_other_out(tmp_path: Path) -> None:
    isolation = isolation_of(tmp_path, a2=3, b1=2)
    groups = {"a1": "A", "a2": "A", "b1": "B"}

    found = isolation.sorted(["a1", "a2", "b1"], groups, fresh=True, now=NOW)

    assert found == Sorted(["b1"], ["a1", "a2"], [])


def test_a_suspect_of_a_group_that_waits_does_not_begin_a_portion(tmp_path: Path) -> None:
    isolation = isolation_of(tmp_path, a1=2, a2=2)
    groups = {"a1": "A", "a2": "A"}
    isolation.sorted(["x", "a1"], groups, fresh=False, now=NOW)

    assert isolation.sorted(["x", "a2"], groups, fresh=True, now=NOW) == Sorted(["x"], ["a2"], ())
    assert not isolation.alone


def test_letters_that_are_tried_again_are_another_generation(tmp_path: Path) -> None:
    """The first one's report stands for good."""
    settled: list[str] = []

    class Refusing(Producer):
        def custodian(self, env: ProducerEnv) -> Any:
            def settle(lease: Lease, settlement: Settlement) -> SettleReport:
                settled.append(lease.generation)
                return SettleReport(failed=1, errors=("there is no such queue",))

            return SimpleNamespace(settle=settle, close=lambda: None)

    folder = folder_of(tmp_path)
    folder.deaths.count("g", ["a"], NOW)
    isolation = Isolation(Refusing(), ProducerEnv(clock=ManualClock(NOW)), folder)
    lease = Lease(kind="sqs", generation="g", seconds=60.0, deadline=NOW, owner={}, state={})
    message = Message(b"", message_id="a")
    for _ in range(2):
        received = {"a": Received("a", "receipt", None)}
        isolation.make_letters([message], received, lease)

    assert len(set(settled)) == 2
    assert isolation.set_aside == 0


def test_suspects_are_looked_for_only_where_there_are_some(tmp_path: Path) -> None:
    assert not isolation_of(tmp_path / "none").searches
    assert not isolation_of(tmp_path / "one", a=1).searches
    assert isolation_of(tmp_path / "two", a=2).searches
    folder_of(tmp_path / "two").deaths.forget(["a"], NOW)
    assert not isolation_of(tmp_path / "two").searches
