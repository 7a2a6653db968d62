"""Stores the rate limiter's windows in staging, shared by all hosts and runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.stages.rate_limiter import State
from airflow_broadway.staging.run_folder import StagedRun

_FOLDER = "_rate"
#: Maximum tries of one update.  A try fails only if another update was first, so that many
#: consecutive failures indicate a defect.
_TRIES = 1000
_DIGITS = 12
_STATE = re.compile(rf"\d{{{_DIGITS}}}\.json")
#: Old states that are kept, so that a slow writer finds its number taken.
_KEPT = 100


class StagedRateState:
    """The rate limiter's state: the last of a series of numbered files.

    An update creates the next file.  Of two concurrent updates one fails and is retried.
    """

    def __init__(self, run: StagedRun) -> None:
        self._files = run.dag

    def update(self, change: Callable[[State | None], State]) -> State:
        """Replaces the state by ``change(state)``.

        :raises StagingError: If it cannot be written.
        """
        for _ in range(_TRIES):
            names = [name for name in self._files.list(_FOLDER) if _STATE.fullmatch(name)]
            number = int(names[-1].partition(".")[0]) if names else 0
            try:
                last = json.loads(self._files.read(f"{_FOLDER}/{names[-1]}")) if names else None
            except FileNotFoundError:  # removed since the listing
                continue
            state = change(last)
            if self._files.create(f"{_FOLDER}/{number + 1:0{_DIGITS}d}.json", json.dumps(state)):
                for name in names[:-_KEPT]:
                    self._files.remove(f"{_FOLDER}/{name}")
                return state
        raise StagingError(f"the rate limit's state under {_FOLDER} changes faster than it is read")
