"""Backlog thresholds that start a run: a number of messages, or the age of the oldest."""

from __future__ import annotations

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.options import Options, option, options
from airflow_broadway.core.model.rules import POSITIVE, SECONDS

_NO_TEMPLATE = "a trigger has no run to render it in"


@options
class Backlog(Options):
    """The thresholds of a backlog, reached when either is reached: the schedule of a Dag that runs
    when its queue's backlog reaches a threshold, as in
    ``Flights.dag("flights", schedule=backlog(min_messages=10_000, max_age=300))``.
    """

    min_messages: int | None = option(
        default=None,
        rule=POSITIVE.or_none(),
        doc="Messages ready to be received; ``None``: no threshold.",
        no_template=_NO_TEMPLATE,
    )
    max_age: float | None = option(
        default=None,
        rule=SECONDS.or_none(),
        doc="Age of the oldest ready message; ``None``: no threshold.",
        no_template=_NO_TEMPLATE,
    )
    poke_interval: float = option(
        default=30.0,
        rule=SECONDS,
        doc="Time between two checks of the queue.",
        no_template=_NO_TEMPLATE,
    )

    def _resolve(self) -> None:
        if self.min_messages is None and self.max_age is None:
            raise OptionsError.missing(
                "Backlog.min_messages", "backlog(min_messages=1_000), or max_age=300, or both"
            )


#: The name under which Dags use it.
backlog = Backlog
