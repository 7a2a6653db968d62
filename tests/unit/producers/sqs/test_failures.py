"""Recorded failures: few reads during a lease, for any number of runs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kit.failures import Failures
from airflow_broadway.producers.kit.state_files import StateFiles
from airflow_broadway.testing import ManualClock
from tests.fake_sqs import URL, FakeSqs
from tests.unit.producers.sqs.kit import halves

DAYS = 16
RUNS_A_DAY = 60
STAGING = "counted://staging"


class Counted(MemoryFileSystem):  # type: ignore[misc]
    """A store that counts its requests."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    #: Files per read request.
    reads: ClassVar[list[int]] = []
    removals: ClassVar[list[int]] = []
    broken: ClassVar[list[str]] = []

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        if more.pop("counted", True):
            self.reads.append(1)
        if any(part in path for part in self.broken):
            raise PermissionError(path)
        data: bytes = super().cat_file(path, start, end, **more)
        return data

    def cat_ranges(self, paths: Any, starts: Any, ends: Any, *_: Any, **more: Any) -> list[Any]:
        self.reads.append(len(paths))
        found: list[Any] = super().cat_ranges(paths, starts, ends, counted=False)
        return found

    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        self.removals.append(len(path) if isinstance(path, list) else 1)
        super().rm(path, recursive=recursive, maxdepth=maxdepth)


@pytest.fixture(autouse=True)
def store():
    register_implementation("counted", Counted, clobber=True)
    for state in (Counted.store, Counted.reads, Counted.removals, Counted.broken):
        state.clear()
    Counted.pseudo_dirs[:] = [""]
    return Counted


def notes() -> StateFiles:
    return StateFiles(STAGING, "sqs/orders")


def recorded() -> Failures:
    return Failures(notes(), 14)


def noted_for_days(clock: ManualClock, place: StateFiles) -> None:
    """Records failures as runs do: the n-th message of a run has failed n times."""
    for day in range(DAYS):
        for run in range(RUNS_A_DAY):
            Failures(place, 14).note({f"m{day}-{run}": run % 4 + 1, "often": run + 1}, clock.now())
        if day < DAYS - 1:
            clock.advance(86_400.0)


def test_two_weeks_of_failures_need_few_reads(store):
    clock = ManualClock()
    noted_for_days(clock, notes())
    failures = recorded()

    failures.merge(clock.now())
    store.reads.clear()
    found = failures.of(["m0-3", "m15-59", "often", "never"], clock.now())

    assert found == {"m0-3": 4, "m15-59": 4, "often": 60}
    assert store.reads == [DAYS]  # one request, one file per day


def test_day_with_few_files_is_not_merged(store):
    clock = ManualClock()
    for run in range(7):
        recorded().note({"m": run}, clock.now())
    failures = recorded()

    failures.merge(clock.now())

    assert (store.reads, store.removals) == ([], [])
    assert failures.of(["m"], clock.now()) == {"m": 6}
    assert store.reads == [7]


def test_merge_makes_few_requests_per_day(store):
    clock = ManualClock()
    noted_for_days(clock, notes())

    recorded().merge(clock.now())

    assert store.reads == [RUNS_A_DAY] * DAYS
    assert store.removals == [RUNS_A_DAY] * DAYS


def test_run_merges_before_receiving(store):
    fake = FakeSqs(ManualClock())
    with halves(STAGING, fake=fake) as run:
        place = run.source._folder._files
        assert place is not None
        noted_for_days(run.clock, place)
    fake.put(["a"])
    fake.receive_message(QueueUrl=URL, MaxNumberOfMessages=1, VisibilityTimeout=1)
    fake.clock.sleep(2.0)

    with halves(STAGING, fake=fake) as run:
        store.reads.clear()
        [again] = run.take()

    assert again.redelivered
    assert store.reads == [DAYS]


def test_notes_beyond_message_retention_are_removed(store):
    clock = ManualClock()
    recorded().note({"m": 1}, clock.now())
    clock.advance(16 * 86_400.0)
    recorded().merge(clock.now())
    assert recorded().of(["m"], clock.now()) == {"m": 1}
    clock.advance(86_400.0)

    recorded().merge(clock.now())

    assert recorded().of(["m"], clock.now()) == {}
    assert notes().names("attempts") == []


def test_read_during_merge_misses_nothing(store, monkeypatch):
    clock = ManualClock()
    for run in range(20):
        recorded().note({f"m{run}": 2}, clock.now())
    failures = recorded()
    listed = StateFiles.names

    def then_merged(self: StateFiles, folder: str = "") -> list[str]:
        names = listed(self, folder)
        monkeypatch.setattr(StateFiles, "names", listed)
        recorded().merge(clock.now())
        return names

    monkeypatch.setattr(StateFiles, "names", then_merged)

    assert failures.of(["m0", "m19"], clock.now()) == {"m0": 2, "m19": 2}


def test_concurrent_merges_lose_nothing(store, monkeypatch):
    clock = ManualClock()
    for run in range(20):
        recorded().note({f"m{run}": run + 1}, clock.now())
    write = StateFiles.write

    def merged_before(self: StateFiles, name: str, value: Any) -> None:
        monkeypatch.setattr(StateFiles, "write", write)
        recorded().merge(clock.now())
        write(self, name, value)

    monkeypatch.setattr(StateFiles, "write", merged_before)

    recorded().merge(clock.now())

    assert recorded().of(["m0", "m19"], clock.now()) == {"m0": 1, "m19": 20}


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"m": "many"}', b"\xff"])
def test_damaged_file_is_skipped(data, caplog):
    clock = ManualClock()
    files, name = notes(), f"attempts/{clock.now().date()}.x.json"
    files.write(name, {})
    files._fs.pipe_file(f"{files._root}/{name}", data)
    for _ in range(8):
        recorded().note({"m": 3}, clock.now())

    assert recorded().of(["m"], clock.now()) == {"m": 3}
    recorded().merge(clock.now())

    assert recorded().of(["m"], clock.now()) == {"m": 3}
    assert "is damaged" in caplog.text


def test_unreadable_file_ends_run(store):
    clock = ManualClock()
    recorded().note({"m": 1}, clock.now())
    store.broken.append("attempts/")

    with pytest.raises(StagingError, match="cannot be read"):
        recorded().of(["m"], clock.now())


def test_foreign_notes_are_seen_after_30_s():
    clock = ManualClock()
    failures = recorded()

    assert failures.of(["m"], clock.now()) == {}
    recorded().note({"m": 1}, clock.now())
    clock.advance(29.0)
    assert failures.of(["m"], clock.now()) == {}
    clock.advance(1.0)
    assert failures.of(["m"], clock.now()) == {"m": 1}
    assert clock.now() - timedelta(seconds=30) == ManualClock().now()
