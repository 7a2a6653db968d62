"""The interceptor counts calls, and makes one of them fail."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from airflow_broadway.testing.crashes.points import Fault
from tests.unit.testing.crashes.struck import Died, calls, striking


def test_equal_calls_are_counted():
    interceptor = striking()
    for target in ("a", "b", "a"):
        interceptor.call("create", target, lambda: None)

    assert calls(interceptor) == ["create a #1", "create b #1", "create a #2"]


def test_nested_calls_count_only_in_callbacks():
    interceptor = striking()

    def inner():
        return interceptor.call("write", "", lambda: "done")

    assert interceptor.call("create", "", inner) == "done"
    interceptor.call("handle_batch", "default", inner, nested=True)
    interceptor.call("return", "", lambda: None)

    assert calls(interceptor) == ["create #1", "handle_batch default #1", "write #1", "return #1"]
    assert [point.traits.own for point in interceptor.seen] == [False, True, True, False]


@pytest.mark.parametrize(
    ("fault", "done"), [("killed before", []), ("killed halfway", [5]), ("killed after", [10])]
)
def test_kill_leaves_none_half_or_all_of_the_work(fault, done):
    interceptor = striking(f"write #1: {fault}")
    did: list[int] = []

    with pytest.raises(Died):
        interceptor.call("write", "", lambda: did.append(10), half=lambda: did.append(5))
    assert did == done
    assert interceptor.struck


@pytest.mark.parametrize(("fault", "done"), [("error", 0), ("answer lost", 1)])
def test_call_fails_once_before_or_after_its_work(fault, done):
    interceptor = striking(f"write #2: {fault}")
    did: list[Any] = []

    def write():
        interceptor.call("write", "", lambda: did.append(1), error=lambda: ValueError("struck"))

    write()
    with pytest.raises(ValueError, match="struck"):
        write()
    assert len(did) == 1 + done
    write()
    assert len(did) == 2 + done


def test_full_disk_fails_all_calls_that_need_space():
    interceptor = striking("create #1: disk full")

    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            interceptor.call("create", "", lambda: None, full=lambda: OSError("full"))
    assert interceptor.call("remove", "", lambda: "removed") == "removed"


def test_clock_jumps_at_the_call():
    interceptor = striking("list #1: clock behind")
    assert interceptor.call("list", "", lambda: interceptor.ahead, changes=False) == -3600.0


@pytest.mark.parametrize(("late", "done"), [(True, [2, 1]), (False, [2])])
def test_timed_out_call_may_take_effect_later(late, done):
    interceptor = striking("send #1: timed out")
    did: list[int] = []

    with pytest.raises(TimeoutError):
        interceptor.call("send", "", lambda: did.append(1), hangs=TimeoutError, late=late)
    assert (did, interceptor.ahead) == ([], 60.0)
    interceptor.call("send", "", lambda: did.append(2), hangs=TimeoutError, late=late)
    assert did == done
    assert [point.traits.faults for point in interceptor.seen] == ["timed out"] * 2


def test_call_can_have_faults_of_its_own():
    interceptor = striking("PutObject #1: sent twice")
    twice = mock.Mock(return_value="refused")
    others = {Fault.SENT_TWICE: twice}

    assert interceptor.call("PutObject", "", lambda: "written", others=others) == "refused"
    twice.assert_called_once_with()
    assert [point.traits.others for point in interceptor.seen] == ["sent twice"]
