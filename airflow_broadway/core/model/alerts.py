"""What people are told of a run besides its colour, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.options import Options, is_template, option, options
from airflow_broadway.core.model.rules import FRACTION, FUNCTION, POSITIVE, SECONDS, Rule

__all__ = ["Alerts"]

_NOTIFIERS = Rule(
    "a list of functions of one argument, such as notifiers of Airflow",
    lambda v: isinstance(v, Sequence) and not isinstance(v, str) and all(map(FUNCTION.admits, v)),
)


@options
class Alerts(Options):
    """When an alert is raised, and who is called then.  A run that does not balance always is."""

    notifiers: Sequence[Any] = option(
        default=(),
        rule=_NOTIFIERS,
        doc="Airflow's notifiers, or functions: each is called with the task's context, in which"
        " `broadway_alert` is the alert.",
    )
    dead_letters: int | None = option(
        default=1,
        rule=POSITIVE.or_none(),
        doc="From so many messages of a run on that became dead letters; ``None``: never.",
    )
    lease: float | None = option(
        default=0.25,
        rule=FRACTION.or_none(),
        doc="When less than this share of a lease is left that waits to be settled, and when"
        " messages had lapsed; ``None``: never.",
    )
    backlog_age: float | None = option(
        default=None,
        rule=SECONDS.or_none(),
        doc="When the oldest message that a run could receive now has waited for so many seconds;"
        " ``None``: nobody looks.",
    )

    def __repr__(self) -> str:
        # A notifier's own may hold its address in memory, or what nobody is to read in a log.
        names = ", ".join(getattr(each, "__name__", type(each).__name__) for each in self.notifiers)
        return (
            f"Alerts(notifiers=[{names}], dead_letters={self.dead_letters}, lease={self.lease},"
            f" backlog_age={self.backlog_age})"
        )

    def _resolve(self) -> None:
        for name in ("dead_letters", "lease", "backlog_age"):
            value = getattr(self, name)
            if is_template(value):
                raise OptionsError(f"Alerts.{name}", "no template: nobody renders it", value)
