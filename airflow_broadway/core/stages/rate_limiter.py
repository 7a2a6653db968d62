"""Rate limiting: messages per interval, for all producers of a pipeline together.

A fixed window, as in Broadway: the count is reset at each interval's end, and an unused rest is not
carried over.  The windows are kept in a :class:`RateState` that every mapped process task of a run
shares and that outlives the run, so the next run continues in the last run's window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import OptionsError, PipelineError
from airflow_broadway.core.model.pipeline_options import RateLimiting
from airflow_broadway.core.model.rules import BOOL, POSITIVE, SECONDS

#: ``{"allowed_messages", "interval", "start", "left"}``, and ``"next"`` for options that take
#: effect at the end of the window; ``start`` in Unix seconds.
State = dict[str, Any]

_RULES = {"allowed_messages": POSITIVE, "interval": SECONDS, "reset": BOOL}


class RateState(Protocol):
    """Stores one pipeline's windows: shared by its producers, kept between its runs."""

    def update(self, change: Callable[[State | None], State]) -> State:
        """Replaces the state by ``change(state)`` atomically; returns the new one.

        ``change`` gets ``None`` the first time, and may be called again after a conflict.
        """


class MemoryRateState:
    """A state for one process."""

    def __init__(self) -> None:
        self._state: State | None = None
        self._lock = threading.Lock()

    def update(self, change: Callable[[State | None], State]) -> State:
        """Replaces the state by ``change(state)``."""
        with self._lock:
            self._state = change(None if self._state is None else dict(self._state))
            return dict(self._state)


class RateLimiter:
    """Grants messages to producers.

    :param options: ``None``: disabled; everything is granted.
    :param clock: Provides wall-clock time, since windows are shared between processes.
    """

    def __init__(
        self,
        options: RateLimiting | None,
        clock: Clock | None = None,
        state: RateState | None = None,
    ) -> None:
        self._declared: State = {}
        if options is not None:
            allowed, interval = options.allowed_messages, options.interval
            self._declared = {"allowed_messages": allowed, "interval": interval}
        self._clock = clock or SystemClock()
        self._state = state or MemoryRateState()

    def take(self, wanted: int) -> int:
        """Grants up to ``wanted`` messages of the current window, and counts them as taken."""
        if not self._declared or wanted <= 0:
            return max(wanted, 0)
        granted = 0

        def change(current: State) -> State:
            nonlocal granted
            granted = min(wanted, max(current["left"], 0))
            return {**current, "left": current["left"] - granted}

        self._update(change)
        return granted

    def refund(self, unused: int) -> None:
        """Returns the unused part of a grant of :meth:`take`."""
        if not self._declared or unused <= 0:
            return

        def change(current: State) -> State:
            return {**current, "left": min(current["left"] + unused, current["allowed_messages"])}

        self._update(change)

    def wait_seconds(self) -> float:
        """Returns the seconds until messages are granted; 0 if they would be now."""
        if not self._declared:
            return 0.0
        state = self._update()
        if state["left"] > 0:
            return 0.0
        return max(0.0, float(state["start"] + state["interval"]) - self._now())

    def reset(self) -> None:
        """Ends the current window now."""
        if self._declared:
            self._update(self._next_window)

    def get_rate_limiting(self) -> dict[str, Any]:
        """Returns the current ``{"allowed_messages", "interval"}``.

        :raises PipelineError: If rate limiting is not enabled.
        """
        self._check_enabled()
        state = self._update()
        return {name: state[name] for name in ("allowed_messages", "interval")}

    def update_rate_limiting(self, **options: Any) -> None:
        """Changes ``allowed_messages`` or ``interval`` from the end of the current window on.

        With ``reset=True`` a new window starts now.

        :raises OptionsError: If an option is unknown or breaks its rule, enabled or not.
        :raises PipelineError: If rate limiting is not enabled.
        """
        for name, value in options.items():
            if name not in _RULES:
                raise OptionsError.unknown(f"rate_limiting.{name}", value, _RULES)
            if not _RULES[name].holds(value):
                raise OptionsError(f"rate_limiting.{name}", _RULES[name].text, value)
        self._check_enabled()
        reset = options.pop("reset", False)

        def change(current: State) -> State:
            current["next"] = {**current.get("next", {}), **options}
            return self._next_window(current) if reset else current

        self._update(change)

    def _update(self, change: Callable[[State], State] = lambda state: state) -> State:
        """Replaces the state of the current window by ``change(state)``; returns the new one."""
        return self._state.update(lambda state: change(self._current_window(state)))

    def _check_enabled(self) -> None:
        if not self._declared:
            raise PipelineError(
                "rate limiting is not enabled for this pipeline", code="rate_limiting_not_enabled"
            )

    def _now(self) -> float:
        return self._clock.now().timestamp()

    def _current_window(self, state: State | None) -> State:
        """Returns the state of the current window."""
        now, declared = self._now(), self._declared
        if state is None or state.get("declared") != declared:
            # The first run, or the pipeline's own options have changed since the last run.
            state = {**declared, "declared": declared, "start": now}
            return {**state, "left": declared["allowed_messages"]}
        if (now - state["start"]) // state["interval"] < 1:
            state["start"] = min(state["start"], now)  # do not wait for a clock that was set back
            return state
        end = state["start"] + state["interval"]
        state = self._next_window(state)
        # Options that took effect at the window's end may have changed the interval.
        state["start"] = end + int((now - end) // state["interval"]) * state["interval"]
        return state

    def _next_window(self, state: State) -> State:
        """Starts a new window now, with the options that were to take effect with it."""
        state |= state.pop("next", {})
        return state | {"start": self._now(), "left": state["allowed_messages"]}
