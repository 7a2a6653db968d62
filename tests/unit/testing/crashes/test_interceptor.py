"""The interceptor counts calls and injects a fault into one of them."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.testing.crashes.points import Fault
from tests.unit.testing.crashes.injection import Died, inject, observed_calls


def test_equal_calls_are_counted() -> None:
    interceptor = inject()
    for target in ("a", "b", "a"):
        interceptor.call("create", target, lambda: None)

    assert observed_calls(interceptor) == ["create a #1", "create b #1", "create a #2"]


def test_nested_calls_count_only_within_callbacks() -> None:
    interceptor = inject()

    def inner() -> str:
        return interceptor.call("write", "", lambda: "done")

    assert interceptor.call("create", "", inner) == "done"
    interceptor.call("handle_batch", "default", inner, nested=True)
    interceptor.call("return", "", lambda: None)

    assert observed_calls(interceptor) == [
        "create #1",
        "handle_batch default #1",
        "write #1",
        "return #1",
    ]
    assert [point.traits.in_callback for point in interceptor.points] == [False, True, True, False]


@pytest.mark.parametrize(
    ("what", "done"), [("killed before", []), ("killed halfway", [5]), ("killed after", [10])]
)
def test_a_kill_happens_before_halfway_or_after_the_call(what: str, done: list[int]) -> None:
    interceptor = inject(f"write #1: {what}")
    effects: list[int] = []

    with pytest.raises(Died):
        interceptor.call("write", "", lambda: effects.append(10), half=lambda: effects.append(5))
    assert effects == done
    assert interceptor.injected


@pytest.mark.parametrize(("what", "done"), [("error", 0), ("response lost", 1)])
def test_an_injected_error_is_raised_once_before_or_after_the_call(what: str, done: int) -> None:
    interceptor = inject(f"write #2: {what}")
    effects: list[Any] = []

    def write() -> None:
        interceptor.call(
            "write", "", lambda: effects.append(1), error=lambda: ValueError("injected")
        )

    write()
    with pytest.raises(ValueError, match="injected"):
        write()
    assert len(effects) == 1 + done
    write()
    assert len(effects) == 2 + done


def test_a_full_disk_fails_every_call_that_needs_space() -> None:
    interceptor = inject("create #1: disk full")

    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            interceptor.call("create", "", lambda: None, disk_full=lambda: OSError("full"))
    assert interceptor.call("remove", "", lambda: "removed") == "removed"


def test_the_clock_jumps_at_the_call() -> None:
    interceptor = inject("list #1: clock behind")
    assert interceptor.call("list", "", lambda: interceptor.clock_offset, changes=False) == -3600.0


@pytest.mark.parametrize(("late", "done"), [(True, [2, 1]), (False, [2])])
def test_a_timed_out_call_may_take_effect_after_the_next_call(late: bool, done: list[int]) -> None:
    interceptor = inject("send #1: timed out")
    effects: list[int] = []

    with pytest.raises(TimeoutError):
        interceptor.call("send", "", lambda: effects.append(1), timeout=TimeoutError, late=late)
    assert (effects, interceptor.clock_offset) == ([], 60.0)
    interceptor.call("send", "", lambda: effects.append(2), timeout=TimeoutError, late=late)
    assert effects == done
    assert [point.traits.faults for point in interceptor.points] == ["timed out"] * 2


def test_a_call_may_have_extra_faults() -> None:
    interceptor = inject("PutObject #1: sent twice")
    effects: list[int] = []

    def twice() -> str:
        effects.extend((1, 1))
        return "refused"

    result = interceptor.call("PutObject", "", lambda: "made", extra={Fault.SENT_TWICE: twice})
    assert (result, effects) == ("refused", [1, 1])
    assert [point.traits.faults for point in interceptor.points] == ["sent twice"]
