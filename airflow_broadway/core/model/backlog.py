"""When a backlog is to start a run: so many messages, or one that has waited so long."""

from __future__ import annotations

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.options import Options, is_template, option, options
from airflow_broadway.core.model.rules import POSITIVE, SECONDS


@options
class Backlog(Options):
    """The bounds of a backlog: it has reached them when it has reached either."""

    min_messages: int | None = option(
        default=None,
        rule=POSITIVE.or_none(),
        doc="So many messages wait that a run could receive now; ``None``: their number is no"
        " reason.",
    )
    max_age: float | None = option(
        default=None,
        rule=SECONDS.or_none(),
        doc="The oldest of them has waited for so many seconds; ``None``: its age is no reason.",
    )
    poke_interval: float = option(
        default=30.0, rule=SECONDS, doc="Seconds between two looks at the queue."
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
    """The schedule of a Dag that runs when its queue's backlog has reached one of these bounds:
    ``Flights.dag("flights", schedule=backlog(min_messages=10_000, max_age=300))``.

    :param min_messages: So many messages wait.
    :param max_age: The oldest has waited for so many seconds.
    :param poke_interval: Seconds between two looks.
    :raises OptionsError: Naming the option, the rule and the value; if neither bound is given, too.
    """
    return Backlog(min_messages=min_messages, max_age=max_age, poke_interval=poke_interval)
