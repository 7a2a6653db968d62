"""A dry run counts the messages that an equal run would receive, without side effects.

It receives no message, requeues no dead letter, and settles or removes nothing of earlier runs.
Its result is kept in the run's folder until the run's report includes it.
"""

from __future__ import annotations

import json
import logging
from contextlib import closing
from dataclasses import asdict
from typing import Any, Final, cast

from airflow_broadway.core.custody.dead_letters import EVERY
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.custody.run_summary import look_lines
from airflow_broadway.core.model.run_source import ARCHIVE, DEAD_LETTERS, LOG, RUN, RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.runs.account import LOOK, keep_report
from airflow_broadway.runs.ports import Ports, Task, producer_env
from airflow_broadway.runs.sources.archived import find_range
from airflow_broadway.runs.sources.dead_letters import choice_of, deletes
from airflow_broadway.runs.sources.past_run import chosen_batches
from airflow_broadway.runs.sources.pipelines import with_source
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)

#: The value of ``stopped`` in the reference of a dry run.
DRY_RUN: Final = "dry_run"


class DryRun:
    """The dry run of a process task.

    :param pipeline: The pipeline as loaded, with its own producer.
    :param index: Index of the pipeline's producer, from 0; ``None`` if it is the only one.  The
        first counts for all.
    :raises RequestRefused: If no producer serves the source.
    """

    def __init__(
        self,
        run: StagedRun,
        pipeline: Pipeline,
        task: Task,
        ports: Ports,
        *,
        index: int | None = None,
        budget: Budget,
        source: RunSource,
    ) -> None:
        self._run = run
        self._pipeline = with_source(pipeline, source)
        self._live = pipeline
        self._source = source
        self._index = index
        self._budget = budget
        self._env = producer_env(
            self._pipeline, ports, owner=task.owner(), index=index, store=run.store, clock=run.clock
        )

    def run(self, *, report: bool = False) -> dict[str, Any]:
        """Counts, logs and stores the result; returns the reference for later tasks.

        :param report: Whether to write the run's report too, because no other task will.
        :raises RequestRefused: If an equal run would be refused.
        :raises BroadwayError: If the broker or staging cannot be reached.
        """
        reference = {
            "generation": "",
            "received": 0,
            "failed": 0,
            "batchers": {},
            "stopped": DRY_RUN,
        }
        if self._index:
            log.info("Dry run: the first process task counts for all.")
            return reference
        look = self.look()
        for line in look_lines(look):
            log.info("%s", line)
        if report:
            at = self._env.clock.now()
            keep_report(self._run, [], batchers={}, reasons=[], failed_tasks=[], at=at, look=look)
        else:
            self._run.files.replace(LOOK, json.dumps(look, indent=1, sort_keys=True))
        return {**reference, "look": look}

    def look(self) -> dict[str, Any]:
        """Counts the messages that a run would receive; returns a JSON value.

        ``messages`` is ``None`` if unknown.  ``at_most`` is true if the count is an upper bound.
        """
        kind = self._source.kind
        count = _COUNTERS.get(kind, DryRun._count_queue)(self)
        bounds = {
            name: value
            for name, value in asdict(self._budget).items()
            if name.startswith("max_") and value is not None
        }
        return {
            **count,
            "source": {"kind": kind, **self._source.to_json()},
            "bounds": bounds,
            "producers": 1 if self._index is None else self._live.producer.concurrency,
            "at": self._env.clock.now().isoformat(),
        }

    # -- sources -------------------------------------------------------------------------------

    def _count_queue(self) -> dict[str, Any]:
        depth = self._live.producer.depth(self._env)
        return _count_fields(None if depth is None else depth.ready, depth=depth)

    def _count_dead_letters(self) -> dict[str, Any]:
        choice = choice_of(self._source.only)
        with closing(self._live.producer.dead_letters(self._env)) as dead_letters:
            if choice == EVERY:
                dead = dead_letters.count()
            else:
                with closing(cast(Any, dead_letters.letters(choice))) as chosen:
                    dead = sum(1 for _ in chosen)
        if deletes(self._source):
            return {**_count_fields(0), "dead_letters": dead, "deletes": True}
        depth = self._live.producer.depth(self._env)
        waiting = None if depth is None else dead + depth.ready
        return {**_count_fields(waiting, depth=depth), "dead_letters": dead}

    def _count_archive(self) -> dict[str, Any]:
        archive, interval = self._pipeline.archive, self._source.interval
        assert archive is not None  # otherwise the source would have been refused
        assert interval is not None
        contents, gaps = find_range(self._env, interval, archive)
        return _count_fields(contents.messages, at_most=True, notes=gaps)

    def _count_log(self) -> dict[str, Any]:
        return _count_fields(self._live.producer.count_interval(self._env), at_most=True)

    def _count_past_run(self) -> dict[str, Any]:
        _, chosen = chosen_batches(self._run, self._pipeline)
        return {
            **_count_fields(sum(batch.planned.size for batch in chosen)),
            "batches": len(chosen),
        }


_COUNTERS: Final = {
    DEAD_LETTERS: DryRun._count_dead_letters,
    ARCHIVE: DryRun._count_archive,
    LOG: DryRun._count_log,
    RUN: DryRun._count_past_run,
}


def _count_fields(
    messages: int | None,
    *,
    depth: QueueDepth | None = None,
    at_most: bool = False,
    notes: list[str] | None = None,
) -> dict[str, Any]:
    return {
        "messages": messages,
        "at_most": at_most,
        "notes": notes or [],
        **({} if depth is None else {"depth": depth._asdict()}),
    }
