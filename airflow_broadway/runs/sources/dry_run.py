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
from airflow_broadway.core.custody.run_summary import look_lines
from airflow_broadway.core.model.run_source import ARCHIVE, DEAD_LETTERS, LOG, RUN
from airflow_broadway.runs.account import LOOK, keep_report
from airflow_broadway.runs.sources.archived import find_range
from airflow_broadway.runs.sources.dead_letters import choice_of, deletes
from airflow_broadway.runs.sources.past_run import chosen_batches
from airflow_broadway.runs.tasks import PullTask

log = logging.getLogger(__name__)

#: The value of ``stopped`` in the reference of a dry run.
DRY_RUN: Final = "dry_run"


class DryRun(PullTask):
    """The dry run of a process task; the first of a run's producers counts for all."""

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
        if self.index:
            log.info("Dry run: the first process task counts for all.")
            return reference
        look = self.look()
        for line in look_lines(look):
            log.info("%s", line)
        if report:
            keep_report(self.staged, [], at=self.env.clock.now(), look=look)
        else:
            self.staged.files.replace(LOOK, json.dumps(look, indent=1, sort_keys=True))
        return {**reference, "look": look}

    def look(self) -> dict[str, Any]:
        """Counts the messages that a run would receive; returns a JSON value.

        ``messages`` is ``None`` if unknown.  ``at_most`` is true if the count is an upper bound.
        """
        kind = self.source.kind
        count = _COUNTERS.get(kind, DryRun._count_queue)(self)
        bounds = {
            name: value
            for name, value in asdict(self.budget).items()
            if name.startswith("max_") and value is not None
        }
        return {
            "at_most": False,
            "notes": [],
            **count,
            "source": {"kind": kind, **self.source.to_json()},
            "bounds": bounds,
            "producers": 1 if self.index is None else self.pipeline.producer.concurrency,
            "at": self.env.clock.now().isoformat(),
        }

    # -- sources -------------------------------------------------------------------------------

    def _count_queue(self, requeued: int = 0) -> dict[str, Any]:
        depth = self.pipeline.producer.depth(self.env)
        if depth is None:
            return {"messages": None}
        return {"messages": requeued + depth.ready, "depth": depth._asdict()}

    def _count_dead_letters(self) -> dict[str, Any]:
        choice = choice_of(self.source.only)
        with closing(self.pipeline.producer.dead_letters(self.env)) as dead_letters:
            if choice == EVERY:
                dead = dead_letters.count()
            else:
                with closing(cast(Any, dead_letters.letters(choice))) as chosen:
                    dead = sum(1 for _ in chosen)
        if deletes(self.source):
            return {"messages": 0, "dead_letters": dead, "deletes": True}
        return {**self._count_queue(dead), "dead_letters": dead}

    def _count_archive(self) -> dict[str, Any]:
        archive, interval = self.pipeline.archive, self.source.interval
        assert archive is not None  # otherwise the source would have been refused
        assert interval is not None
        contents, gaps = find_range(self.env, interval, archive)
        return {"messages": contents.messages, "at_most": True, "notes": gaps}

    def _count_log(self) -> dict[str, Any]:
        return {"messages": self.pipeline.producer.count_interval(self.env), "at_most": True}

    def _count_past_run(self) -> dict[str, Any]:
        _, chosen = chosen_batches(self.staged, self.served)
        return {"messages": sum(batch.planned.size for batch in chosen), "batches": len(chosen)}


_COUNTERS: Final = {
    DEAD_LETTERS: DryRun._count_dead_letters,
    ARCHIVE: DryRun._count_archive,
    LOG: DryRun._count_log,
    RUN: DryRun._count_past_run,
}
