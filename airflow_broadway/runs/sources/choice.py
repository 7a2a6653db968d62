"""Chooses the source of a run: by its params, by its type, or else the live queue."""

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

#: The params of a run that choose its source, in the order of :class:`SourceRequest`.
PARAMS: Final = (
    "source",
    "interval_start",
    "interval_end",
    "source_run",
    "source_batches",
    LETTERS,
)

_ADD_ARCHIVE: Final = (
    "set archive = Archive() on the pipeline, so that messages received from then on can be"
    " replayed; docs/backfills.md shows how to add messages from files"
)


class SourceRequest(NamedTuple):
    """The params of a run that choose its source.

    :param run_id: The id of this run.
    :param kind: The name of the source; empty for the default of the run's type.
    :param start: The start of the interval, if one was passed; ``end`` likewise.
    :param past_run: The id of the run whose batches are replayed.
    :param batches: The ids of those batches; empty for all handled ones.
    :param letters: The run's param that selects dead letters and the action on them.
    :param backfill: Whether the run is an Airflow backfill.
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


def choose_source(pipeline: Pipeline, request: SourceRequest) -> RunSource:
    """Chooses the source of a run, without any connection.

    A backfill reads the archive or else the broker's own log, never the live queue.

    :raises RequestRefused: If the pipeline cannot serve the request, or it is incomplete.
    """
    letters = check_choice(request.letters)
    if request.kind == DEAD_LETTERS and letters.get("pipeline", pipeline.name) != pipeline.name:
        # They belong to another pipeline of this Dag: this one runs as usual.
        request = request._replace(kind="", letters=None)
        letters = {}
    kind = request.kind or _default_kind(pipeline, request)
    if kind not in KINDS:
        raise RequestRefused(f"the source {kind!r} is not one of {sorted(KINDS)}")
    if kind == LIVE and request.backfill:
        raise RequestRefused(
            f"run {request.run_id!r} is a backfill, and its source is set to the live queue, which"
            " has no messages of the past interval: nothing was received"
        )
    _check_params(kind, request)
    if kind == ARCHIVE and pipeline.archive is None:
        raise RequestRefused(
            f"the pipeline {pipeline.name!r} has no archive to read: nothing was received; "
            + _ADD_ARCHIVE
        )
    if kind == LOG and not pipeline.producer.backfills:
        raise RequestRefused(
            f"the producer {pipeline.producer.kind!r} has no log to read an interval of: nothing"
            f" was received; {_ADD_ARCHIVE}"
        )
    sinks = [options.sink for options in pipeline.batchers.values()]
    if kind == LOG and any(sink is not None and sink.time_column for sink in sinks):
        raise RequestRefused(
            "a sink has a time_column, and the broker's log may lack messages whose rows would be"
            " deleted: nothing was received; read an archive, or remove the time_column"
        )
    if kind in (ARCHIVE, LOG):
        return RunSource(kind=kind, interval=_interval(request))
    if kind == RUN:
        only = {"batches": list(request.batches)} if request.batches else {}
        return RunSource(kind=kind, run_id=_past_run(request), only=only)
    if kind == DEAD_LETTERS:
        return RunSource(kind=kind, only=letters)
    return RunSource(kind=kind)


def _default_kind(pipeline: Pipeline, request: SourceRequest) -> str:
    if not request.backfill:
        return LIVE
    if pipeline.archive is not None:
        return ARCHIVE
    if pipeline.producer.backfills:
        return LOG
    raise RequestRefused(
        f"run {request.run_id!r} is a backfill, and the producer {pipeline.producer.kind!r} reads a"
        f" live queue, which has no messages of the past interval: nothing was received. "
        f" {_ADD_ARCHIVE}.  To replay the batches of a past run, trigger a run with the params"
        " source='run' and source_run."
    )


def _check_params(kind: str, request: SourceRequest) -> None:
    """Rejects params that the source would ignore."""
    params: dict[str, Any] = {
        "interval_start": (request.start, (ARCHIVE, LOG)),
        "interval_end": (request.end, (ARCHIVE, LOG)),
        "source_run": (request.past_run or None, (RUN,)),
        "source_batches": (request.batches or None, (RUN,)),
        LETTERS: (request.letters or None, (DEAD_LETTERS,)),
    }
    for name, (value, kinds) in params.items():
        if value is not None and kind not in kinds:
            suitable = " or ".join(map(repr, kinds))
            raise RequestRefused(
                f"{name} is given, and the source of run {request.run_id!r} is {kind!r}: set source"
                f" to {suitable}, or leave {name} out; nothing was received"
            )


def _interval(request: SourceRequest) -> Interval:
    start, end = request.start or request.interval[0], request.end or request.interval[1]
    if start is None or end is None or start >= end:
        lack = "a backfill without a data interval" if request.backfill else "without an interval"
        raise RequestRefused(
            f"run {request.run_id!r} is {lack}: set a schedule with intervals, such as"
            " CronDataIntervalTimetable, on the Dag, or pass interval_start and interval_end;"
            " nothing was received"
        )
    return Interval(start, end)


def _past_run(request: SourceRequest) -> str:
    if not request.past_run:
        raise RequestRefused(
            "source_run is missing: the id of the past run whose batches are to be run again;"
            " `airflow-broadway runs` lists them"
        )
    if request.past_run == request.run_id:
        raise RequestRefused(
            f"run {request.run_id!r} cannot run its own batches again: clear its tasks for that"
        )
    return request.past_run
