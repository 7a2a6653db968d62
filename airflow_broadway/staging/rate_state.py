"""The rate limiter's windows in staging: shared by all hosts, kept between runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.stages.rate_limiter import State
from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["StagedRateState"]

_FOLDER = "_rate"
#: Each try is beaten by somebody else's update at most; so many in a row means something is broken.
_TRIES = 1000
_DIGITS = 12
_STATE = re.compile(rf"\d{{{_DIGITS}}}\.json")
#: Old states that stay, so that one who is late finds the number taken that he would create.
_KEPT = 100


class StagedRateState:
    """A series of numbered files, each created exclusively: who comes second tries again."""

    def __init__(self, run: StagedRun) -> None:
        self._files = run.dag

    def update(self, change: Callable[[State | None], State]) -> State:
        """Replace the state by ``change(state)``.

        :raises StagingError: If it cannot be written.
        """
        for _ in range(_TRIES):
            names = [name for name in self._files.list(_FOLDER) if _STATE.fullmatch(name)]
            number = int(names[-1].partition(".")[0]) if names else 0
            try:
                last = json.loads(self._files.read(f"{_FOLDER}/{names[-1]}")) if names else None
            except FileNotFoundError:  # replaced since it was listed
                continue
            state = change(last)
            if self._files.create(f"{_FOLDER}/{number + 1:0{_DIGITS}d}.json", json.dumps(state)):
                for name in names[:-_KEPT]:
                    self._files.remove(f"{_FOLDER}/{name}")
                return state
        raise StagingError(f"the rate limit's state under {_FOLDER} changes faster than it is read")
