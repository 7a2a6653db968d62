"""Which source a run has: by what is asked of it, by its type, or else the live queue."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.model.run_source import (
    ARCHIVE,
    DEAD_LETTERS,
    KINDS,
    LIVE,
    LOG,
    RUN,
    Interval,
    RunSource,
)
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.runs.sources.dead_letters import PARAM as LETTERS
from airflow_broadway.runs.sources.dead_letters import check_choice

#: The params of a run that choose its source, in the order of :class:`Asked`.
PARAMS: Final = (
    "source",
    "interval_start",
    "interval_end",
    "source_run",
    "source_batches",
    LETTERS,
)

_GET_ONE: Final = (
    "give the pipeline an archive (archive = Archive()), and whatever its runs receive from then on"
    " can be run again; `airflow-broadway archive import` puts there what you have in files"
)


class Asked(NamedTuple):
    """What is asked of a run.

    :param run_id: Of this run.
    :param kind: The source by name; empty: by the run's type.
    :param start: The start of an interval, where one is given; so is ``end``.
    :param past_run: The id of the run whose batches are run again.
    :param batches: The ids of those batches; empty: all that were handled.
    :param letters: Which dead letters are moved, and how, as the run's param says.
    :param backfill: Whether Airflow runs it as a backfill.
    :param interval: The run's data interval.
    """

    run_id: str
    kind: str = ""
    start: datetime | None = None
    end: datetime | None = None
    past_run: str = ""
    batches: Sequence[str] = ()
    letters: Any = None
    backfill: bool = False
    interval: tuple[datetime | None, datetime | None] = (None, None)


def choose_source(pipeline: Pipeline, asked: Asked) -> RunSource:
    """The source of a run; nothing is connected to.

    A backfill takes the archive, or else the broker's own log; never the live queue.

    :raises RequestRefused: If the pipeline cannot serve what is asked, or it is not complete.
    """
    letters = check_choice(asked.letters)
    if asked.kind == DEAD_LETTERS and letters.get("pipeline", pipeline.name) != pipeline.name:
        # Another pipeline of this Dag has them: this one works as in any run.
        asked = asked._replace(kind="", letters=None)
        letters = {}
    kind = asked.kind or _by_type(pipeline, asked)
    if kind not in KINDS:
        raise RequestRefused(f"the source {kind!r} is not one of {sorted(KINDS)}")
    if kind == LIVE and asked.backfill:
        raise RequestRefused(
            f"run {asked.run_id!r} is a backfill, and its source is to be the live queue, which"
            " knows nothing of the past interval: nothing was received"
        )
    _check_given(kind, asked)
    if kind == ARCHIVE and pipeline.archive is None:
        raise RequestRefused(
            f"the pipeline {pipeline.name!r} has no archive to read: nothing was received; "
            + _GET_ONE
        )
    if kind == LOG and not pipeline.producer.backfills:
        raise RequestRefused(
            f"the producer {pipeline.producer.kind!r} has no log to read an interval of: nothing"
            f" was received; {_GET_ONE}"
        )
    if kind in (ARCHIVE, LOG):
        return RunSource(kind=kind, interval=_interval(asked))
    if kind == RUN:
        only = {"batches": list(asked.batches)} if asked.batches else {}
        return RunSource(kind=kind, run_id=_past_run(asked), only=only)
    if kind == DEAD_LETTERS:
        return RunSource(kind=kind, only=letters)
    return RunSource(kind=kind)


def _by_type(pipeline: Pipeline, asked: Asked) -> str:
    if not asked.backfill:
        return LIVE
    if pipeline.archive is not None:
        return ARCHIVE
    if pipeline.producer.backfills:
        return LOG
    raise RequestRefused(
        f"run {asked.run_id!r} is a backfill, and the producer {pipeline.producer.kind!r} reads a"
        f" live queue, which knows nothing of the past interval: nothing was received.  {_GET_ONE}."
        "  To handle the batches of a past run again, trigger a run with the params source='run'"
        " and source_run."
    )


def _check_given(kind: str, asked: Asked) -> None:
    """Refuse what would be passed over in silence."""
    given: dict[str, Any] = {
        "interval_start": (asked.start, (ARCHIVE, LOG)),
        "interval_end": (asked.end, (ARCHIVE, LOG)),
        "source_run": (asked.past_run or None, (RUN,)),
        "source_batches": (asked.batches or None, (RUN,)),
        LETTERS: (asked.letters or None, (DEAD_LETTERS,)),
    }
    for name, (value, kinds) in given.items():
        if value is not None and kind not in kinds:
            wanted = " or ".join(map(repr, kinds))
            raise RequestRefused(
                f"{name} is given, and the source of run {asked.run_id!r} is {kind!r}: set source"
                f" to {wanted}, or leave {name} out; nothing was received"
            )


def _interval(asked: Asked) -> Interval:
    start, end = asked.start or asked.interval[0], asked.end or asked.interval[1]
    if start is None or end is None or start >= end:
        what = "a backfill without a data interval" if asked.backfill else "without an interval"
        raise RequestRefused(
            f"run {asked.run_id!r} is {what}: give the Dag a schedule with intervals, such as"
            " CronDataIntervalTimetable, or give interval_start and interval_end; nothing was"
            " received"
        )
    return Interval(start, end)


def _past_run(asked: Asked) -> str:
    if not asked.past_run:
        raise RequestRefused(
            "source_run is missing: the id of the past run whose batches are to be run again;"
            " `airflow-broadway runs` lists them"
        )
    if asked.past_run == asked.run_id:
        raise RequestRefused(
            f"run {asked.run_id!r} cannot run its own batches again: clear its tasks for that"
        )
    return asked.past_run
