from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.core.formats.ownership import Ownership, OwnershipLost, highest_try
from airflow_broadway.core.formats.work import Work
from airflow_broadway.testing import ManualClock

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def files(tmp_path: Path) -> LocalFiles:
    return LocalFiles(tmp_path)


def lease(files: LocalFiles, generation: str = "g", *, seconds: float) -> None:
    made = Lease(
        kind="sqlite",
        generation=generation,
        seconds=60,
        deadline=START + timedelta(seconds=seconds),
    )
    files.replace(paths.lease(generation), json.dumps(made.to_json()))


def fence(
    files: LocalFiles, clock: ManualClock, *, name: str = "task", number: int = 1
) -> Ownership:
    work = Work(name=name, try_number=number, pipeline={}, run={}, plans=[])
    assert files.create(paths.of_try(name, number), work.dumps())
    return Ownership(files, name, number, clock=clock)


def test_a_later_try_fences_off(files: LocalFiles, clock: ManualClock) -> None:
    lease(files, seconds=10)
    given = fence(files, clock)
    given.check(["g"])
    files.create(paths.of_try("task", 2), "{}")
    with pytest.raises(OwnershipLost, match="try 2 of 'task' has begun, so try 1 stops here"):
        given.check(["g"], fresh=True)


def test_what_was_read_serves_for_a_second_only(files: LocalFiles, clock: ManualClock) -> None:
    lease(files, seconds=10)
    given = fence(files, clock)
    given.check(["g"])
    files.create(paths.of_try("task", 2), "{}")
    given.check(["g"])
    clock.sleep(1.1)
    with pytest.raises(OwnershipLost):
        given.check(["g"])


@pytest.mark.parametrize("asleep_in", ["work", "g"])
def test_what_was_read_before_a_sleep_serves_once(
    files: LocalFiles, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, asleep_in: str
) -> None:
    # Given a process that is stopped right after it has read
    lease(files, seconds=1000)
    given = fence(files, clock)

    def list_and_sleep(self: LocalFiles, folder: str) -> list[str]:
        found = real(self, folder)
        if folder == asleep_in:
            monkeypatch.setattr(LocalFiles, "list", real)
            clock.sleep(60)
            files.create(paths.of_try("task", 2) if folder == "work" else paths.intent("g"), "{}")
        return found

    real = LocalFiles.list
    monkeypatch.setattr(LocalFiles, "list", list_and_sleep)

    # Then it begins the batch that it looked for, and no further one
    given.check(["g"])
    with pytest.raises(LeaseLapsed):
        given.check(["g"])


def test_tries_of_other_tasks_do_not_count(files: LocalFiles, clock: ManualClock) -> None:
    lease(files, seconds=10)
    given = fence(files, clock, name="a")
    files.create(paths.of_try("a-b", 7), "{}")
    files.create(paths.of_try("a.b", 7), "{}")
    given.check(["g"], fresh=True)
    assert highest_try(files, "a") == 1
    assert highest_try(files, "nobody") == 0


@pytest.mark.parametrize("path", [paths.intent("g"), paths.settled("g")])
def test_a_settled_generation_is_refused_with_the_cure(
    files: LocalFiles, clock: ManualClock, path: str
) -> None:
    lease(files, seconds=10)
    files.create(path, "{}")
    with pytest.raises(LeaseLapsed, match="no longer holds its messages: clear `process`"):
        fence(files, clock).check(["g"])


def test_a_lapsed_lease_is_refused_and_a_renewed_one_is_not(
    files: LocalFiles, clock: ManualClock
) -> None:
    lease(files, seconds=10)
    given = fence(files, clock)
    given.check(["g"])
    clock.sleep(11)
    lease(files, seconds=20)
    given.check(["g"], fresh=True)
    clock.sleep(11)
    with pytest.raises(LeaseLapsed, match="lapsed at 2026-01-01T00:00:20"):
        given.check(["g"])


def test_without_a_renewal_the_lease_of_the_manifest_counts(
    files: LocalFiles, clock: ManualClock
) -> None:
    made = Lease(kind="k", generation="g", seconds=1, deadline=START + timedelta(seconds=5))
    files.create(paths.manifest("g"), json.dumps({"version": 1, "lease": made.to_json()}))
    given = fence(files, clock)
    given.check(["g"])
    clock.sleep(6)
    with pytest.raises(LeaseLapsed):
        given.check(["g"])


def test_a_generation_that_published_nothing_is_refused(
    files: LocalFiles, clock: ManualClock
) -> None:
    with pytest.raises(LeaseLapsed, match="has no manifest"):
        fence(files, clock).check(["g"])


def test_one_lapsed_generation_voids_the_batch(files: LocalFiles, clock: ManualClock) -> None:
    lease(files, "g", seconds=10)
    lease(files, "h", seconds=-1)
    with pytest.raises(LeaseLapsed, match="generation h"):
        fence(files, clock).check(["g", "h"])


def test_small_batches_share_what_is_read(
    files: LocalFiles, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given 100 batches a second, of two generations
    for name in ("g", "h"):
        lease(files, name, seconds=100)
    given = fence(files, clock)
    asked: list[str] = []

    def counted(self: LocalFiles, folder: str) -> list[str]:
        asked.append(folder)
        return real(self, folder)

    real = LocalFiles.list
    monkeypatch.setattr(LocalFiles, "list", counted)
    for _ in range(995):
        given.check(["g", "h"])
        clock.sleep(0.01)

    # Then each thing is looked at once a second, however many there are
    assert sorted(asked) == ["g"] * 10 + ["h"] * 10 + ["work"] * 10


def test_without_a_name_there_are_no_tries_to_look_for(
    files: LocalFiles, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease(files, seconds=10)
    files.create(paths.of_try("task", 7), "{}")
    files.create(paths.of_try("task", 9, "tries"), "{}")
    Ownership(files, clock=clock).check(["g"], fresh=True)
    Ownership(files, "task", 9, folder="tries", clock=clock).check(["g"], fresh=True)
    with pytest.raises(OwnershipLost, match="try 9 of 'task'"):
        Ownership(files, "task", 8, folder="tries", clock=clock).check(["g"], fresh=True)
