"""The interceptor counts calls, and strikes at one of them."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.testing.crashes.points import Fault
from tests.unit.testing.crashes.struck import Died, calls, striking


def test_equal_calls_are_counted() -> None:
    interceptor = striking()
    for target in ("a", "b", "a"):
        interceptor.call("create", target, lambda: None)

    assert calls(interceptor) == ["create a #1", "create b #1", "create a #2"]


def test_calls_within_a_call_are_part_of_it_but_those_of_a_callback_are_its_own() -> None:
    interceptor = striking()

    def inner() -> str:
        return interceptor.call("write", "", lambda: "done")

    assert interceptor.call("create", "", inner) == "done"
    interceptor.call("handle_batch", "default", inner, nested=True)
    interceptor.call("return", "", lambda: None)

    assert calls(interceptor) == ["create #1", "handle_batch default #1", "write #1", "return #1"]
    assert [point.traits.own for point in interceptor.seen] == [False, True, True, False]


@pytest.mark.parametrize(
    ("what", "done"), [("killed before", []), ("killed halfway", [5]), ("killed after", [10])]
)
def test_who_is_killed_has_done_nothing_half_or_all(what: str, done: list[int]) -> None:
    interceptor = striking(f"write #1: {what}")
    did: list[int] = []

    with pytest.raises(Died):
        interceptor.call("write", "", lambda: did.append(10), half=lambda: did.append(5))
    assert did == done
    assert interceptor.struck


@pytest.mark.parametrize(("what", "done"), [("error", 0), ("answer lost", 1)])
def test_a_call_fails_before_or_after_its_work_and_only_once(what: str, done: int) -> None:
    interceptor = striking(f"write #2: {what}")
    did: list[Any] = []

    def write() -> None:
        interceptor.call("write", "", lambda: did.append(1), error=lambda: ValueError("struck"))

    write()
    with pytest.raises(ValueError, match="struck"):
        write()
    assert len(did) == 1 + done
    write()
    assert len(did) == 2 + done


def test_on_a_full_disk_nothing_finds_room_any_more_but_what_needs_none_goes_on() -> None:
    interceptor = striking("create #1: disk full")

    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            interceptor.call("create", "", lambda: None, full=lambda: OSError("full"))
    assert interceptor.call("remove", "", lambda: "removed") == "removed"


def test_the_clock_jumps_at_the_call() -> None:
    interceptor = striking("list #1: clock behind")
    assert interceptor.call("list", "", lambda: interceptor.ahead, changes=False) == -3600.0


@pytest.mark.parametrize(("late", "done"), [(True, [2, 1]), (False, [2])])
def test_a_call_hangs_past_its_time_out_and_what_it_asked_for_may_be_done_when_others_go_on(
    late: bool, done: list[int]
) -> None:
    interceptor = striking("send #1: timed out")
    did: list[int] = []

    with pytest.raises(TimeoutError):
        interceptor.call("send", "", lambda: did.append(1), hangs=TimeoutError, late=late)
    assert (did, interceptor.ahead) == ([], 60.0)
    interceptor.call("send", "", lambda: did.append(2), hangs=TimeoutError, late=late)
    assert did == done
    assert [point.traits.faults for point in interceptor.seen] == ["timed out"] * 2


def test_what_else_can_happen_to_a_call_is_its_own() -> None:
    interceptor = striking("PutObject #1: sent twice")
    did: list[int] = []

    def twice() -> str:
        did.extend((1, 1))
        return "refused"

    came = interceptor.call("PutObject", "", lambda: "made", others={Fault.SENT_TWICE: twice})
    assert (came, did) == ("refused", [1, 1])
    assert [point.traits.faults for point in interceptor.seen] == ["sent twice"]
