"""The ways in which a run can end, and delays during the run."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Budget of a run that waits for more messages until something ends it.
_HUNGRY = {"wait_seconds": 60.0, "idle_seconds": 60.0, "max_seconds": 8.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A way in which a run ends.

    :param budget: The run's budget.
    :param producer: Additional options of the producer.
    :param context: Additional values of the pipeline's context.
    :param faults: See :func:`tests.traffic.fault_injection.inject_faults`.
    :param signal_number: The signal that ends the run.
    :param timeout: Whether the run is ended like a task that exceeds its timeout.
    :param raises: The error that the run raises; any other error is a mistake.
    :param flows: ``local``: ``run_local``; ``staged``: the tasks of a group.
    """

    name: str
    budget: Mapping[str, Any] = field(default_factory=lambda: _HUNGRY)
    producer: Mapping[str, Any] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, Any] = field(default_factory=dict)
    signal_number: signal.Signals | None = None
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
    Ending(name="stopped", signal_number=signal.SIGUSR1),
    Ending(name="sigterm", signal_number=signal.SIGTERM),
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
    Ending(
        name="staging_error", faults={"fail_write": 4}, raises="StagingError", flows=("staged",)
    ),
    Ending(
        name="late_staging_error",
        faults={"fail_write": 7},
        raises="StagingError",
        flows=("staged",),
    ),
)

#: Delays by name, see :func:`tests.traffic.fault_injection.inject_faults`.
DELAYS: Mapping[str, Mapping[str, Any]] = {
    "quick": {},
    "slow_staging": {"slow_staging": 0.05},
    "slow_journal": {"slow_journal": 0.1},
}
