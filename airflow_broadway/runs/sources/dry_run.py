"""A run that only looks: it counts what a run like it would take, and takes nothing.

No message is received, no dead letter sent back, nothing of an earlier run is settled or removed.
What was found lies in the run's folder until the account of the run has it.
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
from airflow_broadway.runs.sources.archived import found_in
from airflow_broadway.runs.sources.dead_letters import choice_of, deletes
from airflow_broadway.runs.sources.past_run import chosen_batches
from airflow_broadway.runs.sources.pipelines import with_source
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)

#: Says in a reference that its task only looked.
DRY_RUN: Final = "dry_run"


class DryRun:
    """What a task that receives does in a dry run.

    :param pipeline: As it is loaded: with its own producer.
    :param index: Which of the pipeline's producers it is, from 0; ``None``: the only one.  The
        first looks for all.
    :raises RequestRefused: If nothing serves the source.
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
        """Look, log what was found, and keep it; returns the reference that later tasks get.

        :param report: Keep the run's report, too: no other task will.
        :raises RequestRefused: If a run like this one would be refused.
        :raises BroadwayError: If the broker or staging cannot be asked.
        """
        reference = {
            "generation": "",
            "received": 0,
            "failed": 0,
            "batchers": {},
            "stopped": DRY_RUN,
        }
        if self._index:
            log.info("Dry run: the first process task looks for all.")
            return reference
        found = self.look()
        for line in look_lines(found):
            log.info("%s", line)
        if report:
            at = self._env.clock.now()
            keep_report(self._run, [], batchers={}, reasons=[], failed_tasks=[], at=at, look=found)
        else:
            self._run.files.replace(LOOK, json.dumps(found, indent=1, sort_keys=True))
        return {**reference, "look": found}

    def look(self) -> dict[str, Any]:
        """What there is, and what a run would take of it, as a JSON value.

        ``messages`` is ``None`` where nobody knows, and ``at_most`` says that some of them may
        not be wanted.
        """
        kind = self._source.kind
        found = _LOOKS.get(kind, DryRun._at_queue)(self)
        bounds = {
            name: value
            for name, value in asdict(self._budget).items()
            if name.startswith("max_") and value is not None
        }
        return {
            **found,
            "source": {"kind": kind, **self._source.to_json()},
            "bounds": bounds,
            "producers": 1 if self._index is None else self._live.producer.concurrency,
            "at": self._env.clock.now().isoformat(),
        }

    # -- sources -------------------------------------------------------------------------------

    def _at_queue(self) -> dict[str, Any]:
        depth = self._live.producer.depth(self._env)
        return _counted(None if depth is None else depth.ready, depth=depth)

    def _among_dead_letters(self) -> dict[str, Any]:
        choice = choice_of(self._source.only)
        with closing(self._live.producer.dead_letters(self._env)) as letters:
            if choice == EVERY:
                dead = letters.count()
            else:
                with closing(cast(Any, letters.letters(choice))) as chosen:
                    dead = sum(1 for _ in chosen)
        if deletes(self._source):
            return {**_counted(0), "dead_letters": dead, "deletes": True}
        depth = self._live.producer.depth(self._env)
        waiting = None if depth is None else dead + depth.ready
        return {**_counted(waiting, depth=depth), "dead_letters": dead}

    def _in_archive(self) -> dict[str, Any]:
        archive, interval = self._pipeline.archive, self._source.interval
        assert archive is not None  # or the source would have been refused
        assert interval is not None
        found, gaps = found_in(self._env, interval, archive)
        return _counted(found.messages, at_most=True, notes=gaps)

    def _in_log(self) -> dict[str, Any]:
        return _counted(self._live.producer.count_interval(self._env), at_most=True)

    def _of_past_run(self) -> dict[str, Any]:
        _, chosen = chosen_batches(self._run, self._pipeline)
        return {
            **_counted(sum(each.planned.size for each in chosen)),
            "batches": len(chosen),
        }


_LOOKS: Final = {
    DEAD_LETTERS: DryRun._among_dead_letters,
    ARCHIVE: DryRun._in_archive,
    LOG: DryRun._in_log,
    RUN: DryRun._of_past_run,
}


def _counted(
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
