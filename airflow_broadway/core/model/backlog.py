"""Backlog thresholds that start a run: a number of messages, or the age of the oldest."""

from __future__ import annotations

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.options import Options, is_template, option, options
from airflow_broadway.core.model.rules import POSITIVE, SECONDS


@options
class Backlog(Options):
    """The thresholds of a backlog, reached when either is reached."""

    min_messages: int | None = option(
        default=None,
        rule=POSITIVE.or_none(),
        doc="Messages ready to be received; ``None`` disables this threshold.",
    )
    max_age: float | None = option(
        default=None,
        rule=SECONDS.or_none(),
        doc="Age of the oldest ready message, in seconds; ``None`` disables this threshold.",
    )
    poke_interval: float = option(
        default=30.0, rule=SECONDS, doc="Seconds between two checks of the queue."
    )

    def _resolve(self) -> None:
        for name in ("min_messages", "max_age", "poke_interval"):
            value = getattr(self, name)
            if is_template(value):
                raise OptionsError(
                    f"Backlog.{name}", "no template: a trigger has no run to render it in", value
                )
        if self.min_messages is None and self.max_age is None:
            raise OptionsError.missing(
                "Backlog.min_messages", "backlog(min_messages=1_000), or max_age=300, or both"
            )


def backlog(
    *,
    min_messages: int | None = None,
    max_age: float | None = None,
    poke_interval: float = 30.0,
) -> Backlog:
    """Returns the schedule of a Dag that runs when its queue's backlog reaches a threshold:
    ``Flights.dag("flights", schedule=backlog(min_messages=10_000, max_age=300))``.

    :param min_messages: Messages ready to be received.
    :param max_age: Age of the oldest ready message, in seconds.
    :param poke_interval: Seconds between two checks.
    :raises OptionsError: Naming the option, the rule and the value; also without any threshold.
    """
    return Backlog(min_messages=min_messages, max_age=max_age, poke_interval=poke_interval)
