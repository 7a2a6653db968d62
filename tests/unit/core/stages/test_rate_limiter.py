from __future__ import annotations

import pytest

from airflow_broadway import RateLimiting
from airflow_broadway.core.errors import OptionsError, PipelineError
from airflow_broadway.core.stages.rate_limiter import MemoryRateState, RateLimiter
from airflow_broadway.testing import ManualClock

OPTIONS = RateLimiting(allowed_messages=10, interval=60.0)


def test_window_grants_its_messages_once():
    clock = ManualClock()
    limiter = RateLimiter(OPTIONS, clock)
    assert (limiter.take(7), limiter.take(7), limiter.take(7)) == (7, 3, 0)
    assert limiter.wait_seconds() == 60.0
    clock.advance(59.0)
    assert limiter.take(1) == 0
    clock.advance(1.0)
    assert limiter.take(4) == 4
    clock.advance(180.0)
    assert limiter.take(100) == 10


def test_windows_keep_their_phase_over_idle_time():
    clock = ManualClock()
    limiter = RateLimiter(OPTIONS, clock)
    limiter.take(10)
    clock.advance(130.0)  # ten seconds into the third window
    limiter.take(10)
    assert limiter.wait_seconds() == pytest.approx(50.0)


def test_refund_is_bounded_by_the_window():
    limiter = RateLimiter(OPTIONS, ManualClock())
    limiter.take(8)
    limiter.refund(5)
    assert limiter.take(100) == 7
    limiter.refund(1000)
    assert limiter.take(100) == 10  # never more than is allowed


def test_producers_and_runs_share_a_window():
    clock, state = ManualClock(), MemoryRateState()

    def limiter():
        return RateLimiter(OPTIONS, clock, state)

    assert limiter().take(6) == 6
    assert limiter().take(6) == 4
    assert limiter().take(6) == 0


def test_update_waits_for_the_end_of_the_window_unless_reset():
    clock = ManualClock()
    limiter = RateLimiter(OPTIONS, clock)
    limiter.take(10)
    limiter.update_rate_limiting(allowed_messages=3)
    assert limiter.take(1) == 0
    clock.advance(60.0)
    assert limiter.take(100) == 3
    limiter.update_rate_limiting(interval=5.0, reset=True)
    assert limiter.take(100) == 3
    assert limiter.wait_seconds() == 5.0
    assert limiter.get_rate_limiting() == {"allowed_messages": 3, "interval": 5.0}
    limiter.update_rate_limiting(interval=20.0)
    clock.advance(11.0)  # the window ended six seconds ago, and a longer one began
    assert limiter.take(100) == 3
    assert limiter.wait_seconds() == 14.0


def test_changed_options_start_a_new_window():
    clock, state = ManualClock(), MemoryRateState()
    RateLimiter(OPTIONS, clock, state).take(10)
    other = RateLimiter(RateLimiting(allowed_messages=2, interval=60.0), clock, state)
    assert other.take(100) == 2


def test_unlimited_rate_grants_everything():
    limiter = RateLimiter(None)
    assert limiter.take(1_000_000) == 1_000_000
    with pytest.raises(PipelineError, match="not enabled"):
        limiter.get_rate_limiting()
    with pytest.raises(OptionsError, match=r"unknown option 'rate_limiting\.alowed_messages'"):
        limiter.update_rate_limiting(alowed_messages=3)
