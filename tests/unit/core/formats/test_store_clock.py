"""The clock by which leases are judged: the staging folder's, where the host's is wrong."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.store_clock import StoreClock
from airflow_broadway.staging.store import Store


class Slow(StoreClock):
    """A host's clock on which some seconds pass between two looks."""

    def __init__(self, offset: float, seconds: float) -> None:
        super().__init__(SystemClock(), offset)
        self._passed = timedelta()
        self._seconds = timedelta(seconds=seconds)

    def now(self) -> datetime:
        self._passed += self._seconds
        return super().now() + self._passed


@pytest.fixture
def store(tmp_path):
    return Store.open(f"file://{tmp_path}/staging")


def off(clock: Clock) -> float:
    """Seconds by which a clock is ahead."""
    return (clock.now() - SystemClock().now()).total_seconds()


def test_correct_host_clock_is_kept(store, caplog):
    assert off(store.clock(1.0, SystemClock())) < 0.001
    assert not caplog.records


@pytest.mark.parametrize(("offset", "words"), [(300.0, "ahead of"), (-300.0, "behind")])
def test_skewed_host_uses_the_folder_clock_and_logs_both(store, caplog, offset, words):
    host = StoreClock(SystemClock(), offset)

    judged = store.clock(300.0, host)

    assert isinstance(judged, StoreClock)
    assert abs(off(judged)) < 1.0
    assert abs(judged.monotonic() - host.monotonic()) < 1.0
    [record] = caplog.records
    assert record.levelname == "WARNING"
    line = record.getMessage()
    assert f"is 300 s {words} that of the staging folder {store.uri}: " in line
    there, here = judged.now(), host.now()
    assert f"{here:%Y-%m-%dT%H:%M}" in line
    assert f"{there:%Y-%m-%dT%H:%M}" in line


@pytest.mark.parametrize(("lease", "reported"), [(40.0, 1), (60.0, 0)])
def test_skew_above_a_tenth_of_the_lease_is_reported(store, caplog, lease, reported):
    judged = store.clock(lease, StoreClock(SystemClock(), 5.0))
    assert isinstance(judged, StoreClock)
    assert abs(off(judged)) < 1.0
    assert len(caplog.records) == reported


def test_repeated_look_reports_nothing(store, caplog):
    store.clock(300.0, StoreClock(SystemClock(), 300.0), report=False)
    assert not caplog.records


def test_lease_shorter_than_the_uncertainty_is_refused(store):
    # Writing a file takes ten seconds here, by a clock that is five minutes ahead
    rule = r"300 s ahead of .* known to 10\.1 s only, .* a lease of 15 s cannot be judged; .* 20 s"
    with pytest.raises(StagingError, match=rule):
        store.clock(15.0, Slow(285.0, 10.0))
    assert isinstance(store.clock(30.0, Slow(285.0, 10.0)), StoreClock)


class Jumping(SystemClock):
    """A host whose wall clock is set while it runs; its monotonic clock goes on."""

    jump = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.jump)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_wall_clock_jump_is_remeasured_with_one_warning(store, caplog, jump):
    host = Jumping()
    judged = store.clock(300.0, host)
    for moved in (jump, 0.0):  # it jumps, and is set right again
        host.jump = moved
        assert abs(off(judged)) < 1.0
        assert abs(off(judged)) < 1.0
    lines = [record.getMessage() for record in caplog.records]
    for line, way in zip(lines, (jump, -jump), strict=True):
        assert f"jumped by {way:+.0f} s" in line
    assert store.uri in lines[0]


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_jump_with_unwritable_folder_falls_back_to_monotonic_clock(tmp_path, caplog, jump):
    store, host = Store.open(f"file://{tmp_path}/staging"), Jumping()
    judged = store.clock(300.0, host)
    moved = (tmp_path / "staging").rename(tmp_path / "away")
    (tmp_path / "staging").write_bytes(b"")

    host.jump = jump

    assert abs(off(judged)) < 1.0
    assert abs(off(judged)) < 1.0
    [record] = caplog.records
    assert f"jumped by {jump:+.0f} s" in record.getMessage()
    assert "time is kept by the monotonic clock: " in record.getMessage()
    assert moved.is_dir()


def test_subsecond_adjustment_is_not_remeasured(store, caplog):
    host = Jumping()
    judged = store.clock(300.0, host)
    host.jump = 0.9
    assert 0.8 < off(judged) < 1.0
    assert not caplog.records


def test_unwritable_folder_is_refused_at_task_start(tmp_path):
    (tmp_path / "staging").write_bytes(b"")
    with pytest.raises(StagingError, match=r"staging"):
        Store.open(f"file://{tmp_path}/staging").clock(300.0, SystemClock())
