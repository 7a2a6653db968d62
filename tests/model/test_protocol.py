"""Every interleaving of runs, zombies and sweeps, for each custody: no promise is ever broken."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.model.bundles import Bundles
from tests.model.checker import explore
from tests.model.protocol import Custody, Run
from tests.model.receipts import Receipts
from tests.model.recovery import Recovery
from tests.model.rows import Rows

#: One message, and one fault: a kill, clear or time-out at any step, and its zombie.
PROCESS = {"batchers": False, "results": ("ok",), "lapses": 0}
BATCHES = {"batchers": True, "results": ("ok",), "lapses": 0}
#: The message becomes a dead letter.
DEAD = {"batchers": False, "results": ("dead",), "lapses": 0}
#: A deadline passes, too, at any time.
LATE = {"lapses": 1}
#: The next run settles next to a zombie; or the sensor, for the last time, next to the task.
OVER = {"kinds": ("over",)}
LAST_LOOK = {"kinds": ("last look",), "second_run": False}
#: Two messages, the second sent at any time, and two concurrent runs, one of which may lose its
#: lease.
OVERLAP = {"batchers": False, "trouble": 0, "overlap": True, "later": 1}


def check(custody: Callable[[Run], Custody], options: dict[str, Any], *, max_states: int) -> None:
    run = Run(custody, **options)
    began = time.process_time()
    result = explore(run, max_states=max_states, then=Recovery(run))
    seconds = time.process_time() - began
    print(
        f"{custody.__name__} {options}: {result.states:,} states, {result.steps:,} steps,"
        f" {result.depth} deep, in {seconds:.1f} s"
    )
    assert result.broken is None, str(result.broken)
    assert result.states > 1000


Case = tuple[Callable[[Run], Custody], dict[str, Any]]

QUICK: dict[str, Case] = {
    "rows": (Rows, {**PROCESS, **LATE, "retention": True}),
    "rows, batches": (Rows, {**BATCHES, **LATE}),
    "rows, dead letters": (Rows, DEAD),
    "rows, two runs": (Rows, {**OVERLAP, "results": ("ok", "retry")}),
    "receipts": (Receipts, PROCESS),
    "receipts, batches": (Receipts, BATCHES),
    "receipts, dead letters": (Receipts, DEAD),
    "receipts, two runs": (Receipts, {**OVERLAP, "results": ("ok",)}),
    "bundles, next run": (Bundles, {**DEAD, **OVER}),
    "bundles, batches": (Bundles, {**BATCHES, **OVER}),
    "bundles, last look": (Bundles, {**DEAD, **LAST_LOOK}),
}
DEEP: dict[str, Case] = {
    "rows, all results": (Rows, {"batchers": True, "results": ("ok", "dead")}),
    "rows, two runs with batches": (Rows, {**OVERLAP, "batchers": True}),
    "receipts, late": (Receipts, {**PROCESS, **LATE}),
    "receipts, late batches": (Receipts, {**BATCHES, **LATE}),
    "receipts, two runs with batches": (Receipts, {**OVERLAP, "batchers": True}),
    "bundles, two runs": (Bundles, {**OVERLAP, "results": ("ok",)}),
}


@pytest.mark.parametrize("case", QUICK.values(), ids=QUICK)
def test_no_invariant_is_violated(case):
    check(*case, max_states=150_000)


@pytest.mark.slow
@pytest.mark.parametrize("case", DEEP.values(), ids=DEEP)
def test_no_invariant_is_violated_under_more_faults(case):
    check(*case, max_states=1_500_000)
