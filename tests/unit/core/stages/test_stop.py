"""A run begins no message from its bound on, and waits for handled ones a second longer."""

from __future__ import annotations

from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.testing import ManualClock


def test_no_message_is_begun_from_the_bound_on():
    clock = ManualClock()
    stop = Stop(clock)
    stop.bound(5.0)
    clock.advance(4.5)
    assert (stop.enough(), stop.left()) == (False, 0.5)
    clock.advance(0.5)
    assert (stop.enough(), stop.late()) == (True, False)


def test_messages_that_are_handled_have_one_second_after_the_shutdown():
    clock = ManualClock()
    stop = Stop(clock, shutdown=2.0)
    stop.request("stopped")
    clock.advance(2.0)
    assert (stop.late(), stop.over()) == (True, False)
    clock.advance(1.0)
    assert stop.over()
