"""Every interleaving of runs, zombies and sweeps, for each custody: no promise is ever broken."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.model.checker import explore
from tests.model.protocol import Custody, Run
from tests.model.recovery import Recovery
from tests.model.rows import Rows

#: One message; a kill, clear or time-out at every step, a zombie of it, and a deadline that passes.
PROCESS = {"batchers": False, "results": ("ok",)}
BATCHES = {"batchers": True, "results": ("ok",)}
#: Two messages, the second sent at any time, and two runs at once.
BESIDE = {"trouble": 0, "beside": True, "later": 1}
#: The same twice over.
DEEP = {"trouble": 2}


def check(custody: Callable[[Run], Custody], options: dict[str, Any], *, most: int) -> None:
    run = Run(custody, **options)
    began = time.process_time()
    found = explore(run, most=most, then=Recovery(run))
    seconds = time.process_time() - began
    print(
        f"{custody.__name__} {options}: {found.states:,} states, {found.steps:,} steps,"
        f" {found.depth} deep, in {seconds:.1f} s"
    )
    assert found.broken is None, str(found.broken)
    assert found.states > 1000


@pytest.mark.parametrize("custody", [Rows])
@pytest.mark.parametrize(
    "options",
    [PROCESS, BATCHES, {**BESIDE, "batchers": False}, {**BESIDE, "batchers": True}],
    ids=["process", "batches", "beside", "batches beside"],
)
def test_no_promise_is_broken(custody: Callable[[Run], Custody], options: dict[str, Any]) -> None:
    check(custody, options, most=400_000)
