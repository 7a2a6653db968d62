"""The ways in which a run can end, and what is harder for it than usual meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Runs that wait for more messages until something ends them.
_HUNGRY = {"wait_seconds": 60.0, "idle_seconds": 60.0, "max_seconds": 8.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One way.

    :param budget: The run's.
    :param producer: More of the producer's options.
    :param context: More of the pipeline's context.
    :param harm: See :func:`tests.living.harm.harmed`.
    :param number: The signal that ends it, some time after its start.
    :param timeout: Whether it is ended like a task whose time is over.
    :param raises: What the run then raises; any other error is a mistake.
    :param flows: ``local``: ``run_local``; ``staged``: the tasks of a group.
    """

    name: str
    budget: Mapping[str, Any] = field(default_factory=lambda: _HUNGRY)
    producer: Mapping[str, Any] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)
    harm: Mapping[str, Any] = field(default_factory=dict)
    number: signal.Signals | None = None
    timeout: bool = False
    raises: str = ""
    flows: tuple[str, ...] = ("local", "staged")


ENDINGS = (
    Ending(name="max_seconds", budget={**_HUNGRY, "max_seconds": 0.5}),
    Ending(name="empty", budget={"max_seconds": 2.0}),
    Ending(name="max_messages", budget={**_HUNGRY, "max_messages": 37, "max_seconds": 2.0}),
    Ending(name="max_bytes", budget={**_HUNGRY, "max_bytes": 3_000, "max_seconds": 2.0}),
    Ending(
        name="rate_limiting",
        budget={**_HUNGRY, "max_seconds": 2.0},
        producer={"rate_limiting": {"allowed_messages": 40, "interval": 60.0}},
    ),
    Ending(name="stopped", number=signal.SIGUSR1),
    Ending(name="sigterm", number=signal.SIGTERM),
    Ending(name="timeout", timeout=True, raises="TimedOut"),
    Ending(
        name="callback_error",
        context={"poison": 60},
        raises="KeyboardInterrupt",
        budget={**_HUNGRY, "max_seconds": 2.0},
    ),
    Ending(
        name="batch_error",
        context={"late_poison": 3},
        raises="KeyboardInterrupt",
        budget={**_HUNGRY, "max_seconds": 2.0},
    ),
    Ending(
        name="transformer_error",
        producer={"broken_transformer": True},
        raises="KeyboardInterrupt",
        budget={**_HUNGRY, "max_seconds": 2.0},
    ),
    Ending(name="staging_error", harm={"fail_write": 4}, raises="StagingError", flows=("staged",)),
    Ending(
        name="late_staging_error", harm={"fail_write": 7}, raises="StagingError", flows=("staged",)
    ),
)

#: What is harder than usual, by name, as :func:`tests.living.harm.harmed` takes it.
HARMS: Mapping[str, Mapping[str, Any]] = {
    "quick": {},
    "slow_staging": {"slow_staging": 0.05},
    "slow_journal": {"slow_journal": 0.1},
}
