from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

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
def clock():
    return ManualClock()


@pytest.fixture
def files(tmp_path):
    return LocalFiles(tmp_path)


def lease(files: LocalFiles, generation: str = "g", *, seconds: float) -> None:
    deadline = START + timedelta(seconds=seconds)
    lease = Lease(kind="sqlite", generation=generation, seconds=60, deadline=deadline)
    files.replace(paths.lease(generation), json.dumps(lease.to_json()))


def fence(
    files: LocalFiles, clock: ManualClock, *, name: str = "task", number: int = 1
) -> Ownership:
    work = Work(name=name, try_number=number, pipeline={}, run={}, plans=[])
    assert files.create(paths.of_try(name, number), work.dumps())
    return Ownership(files, name, number, clock=clock)


def test_later_try_fences_off(files, clock):
    lease(files, seconds=10)
    ownership = fence(files, clock)
    ownership.check(["g"])
    files.create(paths.of_try("task", 2), "{}")
    with pytest.raises(OwnershipLost, match="try 2 of 'task' has begun, so try 1 stops here"):
        ownership.check(["g"], fresh=True)


def test_listing_is_reused_for_one_second(files, clock):
    lease(files, seconds=10)
    ownership = fence(files, clock)
    ownership.check(["g"])
    files.create(paths.of_try("task", 2), "{}")
    ownership.check(["g"])
    clock.sleep(1.1)
    with pytest.raises(OwnershipLost):
        ownership.check(["g"])


@pytest.mark.parametrize("asleep_in", ["work", "g"])
def test_listing_before_a_sleep_is_used_once(files, clock, monkeypatch, asleep_in):
    # Given a process that is stopped right after it has read
    lease(files, seconds=1000)
    ownership = fence(files, clock)

    def list_and_sleep(self, folder):
        names = real(self, folder)
        if folder == asleep_in:
            monkeypatch.setattr(LocalFiles, "list", real)
            clock.sleep(60)
            files.create(paths.of_try("task", 2) if folder == "work" else paths.intent("g"), "{}")
        return names

    real = LocalFiles.list
    monkeypatch.setattr(LocalFiles, "list", list_and_sleep)

    # Then it begins the batch that it read for, and no further one
    ownership.check(["g"])
    with pytest.raises(LeaseLapsed):
        ownership.check(["g"])


def test_tries_of_other_tasks_do_not_count(files, clock):
    lease(files, seconds=10)
    ownership = fence(files, clock, name="a")
    files.create(paths.of_try("a-b", 7), "{}")
    files.create(paths.of_try("a.b", 7), "{}")
    ownership.check(["g"], fresh=True)
    assert highest_try(files, "a") == 1
    assert highest_try(files, "unknown") == 0


@pytest.mark.parametrize("path", [paths.intent("g"), paths.settled("g")])
def test_settled_generation_is_refused_with_the_cure(files, clock, path):
    lease(files, seconds=10)
    files.create(path, "{}")
    with pytest.raises(LeaseLapsed, match="no longer holds its messages: clear `process`"):
        fence(files, clock).check(["g"])


def test_lapsed_lease_is_refused_and_renewed_one_is_not(files, clock):
    lease(files, seconds=10)
    ownership = fence(files, clock)
    ownership.check(["g"])
    clock.sleep(11)
    lease(files, seconds=20)
    ownership.check(["g"], fresh=True)
    clock.sleep(11)
    with pytest.raises(LeaseLapsed, match="lapsed at 2026-01-01T00:00:20"):
        ownership.check(["g"])


def test_manifest_lease_counts_without_renewal(files, clock):
    lease = Lease(kind="k", generation="g", seconds=1, deadline=START + timedelta(seconds=5))
    files.create(paths.manifest("g"), json.dumps({"version": 1, "lease": lease.to_json()}))
    ownership = fence(files, clock)
    ownership.check(["g"])
    clock.sleep(6)
    with pytest.raises(LeaseLapsed):
        ownership.check(["g"])


def test_unpublished_generation_is_refused(files, clock):
    with pytest.raises(LeaseLapsed, match="has no manifest"):
        fence(files, clock).check(["g"])


def test_one_lapsed_generation_voids_the_batch(files, clock):
    lease(files, "g", seconds=10)
    lease(files, "h", seconds=-1)
    with pytest.raises(LeaseLapsed, match="generation h"):
        fence(files, clock).check(["g", "h"])


def test_small_batches_share_listings(files, clock, monkeypatch):
    # Given 100 batches a second, of two generations
    for name in ("g", "h"):
        lease(files, name, seconds=100)
    ownership = fence(files, clock)
    requests: list[str] = []

    def counted(self, folder):
        requests.append(folder)
        return real(self, folder)

    real = LocalFiles.list
    monkeypatch.setattr(LocalFiles, "list", counted)
    for _ in range(995):
        ownership.check(["g", "h"])
        clock.sleep(0.01)

    # Then every folder is listed once a second
    assert sorted(requests) == ["g"] * 10 + ["h"] * 10 + ["work"] * 10


def test_unnamed_ownership_looks_for_no_tries(files, clock, monkeypatch):
    lease(files, seconds=10)
    files.create(paths.of_try("task", 7), "{}")
    files.create(paths.of_try("task", 9, "tries"), "{}")
    Ownership(files, clock=clock).check(["g"], fresh=True)
    Ownership(files, "task", 9, folder="tries", clock=clock).check(["g"], fresh=True)
    with pytest.raises(OwnershipLost, match="try 9 of 'task'"):
        Ownership(files, "task", 8, folder="tries", clock=clock).check(["g"], fresh=True)
