"""A replay's own folder beside the run's, so that it can neither change nor be mistaken for it.

It holds the chosen batches: plans with only their lines, and the same data files (hard links where
the disk has them, copies else).  It has leases without an end and no journal, so that batches may
run; and no generation, so that no sweep and no account counts it.  It is marked as balanced from
the start: retention removes it as it does any run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from airflow_broadway.cli.output import CommandError
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.formats.files import make_folders, new_file
from airflow_broadway.core.formats.layout import VERSION, paths
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.sums import Summing
from airflow_broadway.core.text import many
from airflow_broadway.staging.errors import translated
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.retention import mark_balanced
from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["MARK", "StagedBatch", "choose", "make_shadow", "staged_batches"]

#: What makes a folder that of a replay; in it: what was replayed, and what came of it.
MARK = "replay.json"

_FOR_EVER = datetime(9999, 1, 1, tzinfo=UTC)


class StagedBatch(NamedTuple):
    """A batch of a run; without an outcome it was never handled, or not to its end."""

    plan: BatchPlan
    planned: PlannedBatch
    outcome: Outcome | None


def staged_batches(run: StagedRun) -> Iterator[StagedBatch]:
    """The batches of a run, by batcher, in the order of their plans."""
    recorded = Recorded(run)
    for batcher in run.files.list("batches"):
        seen: set[str] = set()
        for plan in recorded.standing(batcher):
            for planned, outcome in recorded.outcomes(plan):
                if planned.batch_id not in seen:
                    seen.add(planned.batch_id)
                    yield StagedBatch(plan, planned, outcome)


def choose(
    run: StagedRun, *, batcher: str | None = None, batch_ids: Collection[str] = ()
) -> list[StagedBatch]:
    """The batches to replay: those with an outcome, or those that are named.

    What has no outcome went back to its broker, or will, and another run handles it: it is replayed
    only by name.

    :raises CommandError: If nothing is left, or something named is not there.
    """
    found = list(staged_batches(run))
    if not found:
        raise CommandError(f"run {run.run_id!r} has no staged batches: no batcher task of it ended")
    if batcher is not None:
        known = sorted({each.plan.batcher for each in found})
        if batcher not in known:
            raise CommandError(
                f"run {run.run_id!r} has no batches of the batcher {batcher!r}; it has some of"
                f" {known}"
            )
        found = [each for each in found if each.plan.batcher == batcher]
    if batch_ids:
        wanted = set(batch_ids)
        chosen = [each for each in found if each.planned.batch_id in wanted]
        unknown = sorted(wanted - {each.planned.batch_id for each in chosen})
        if unknown:
            raise CommandError(
                f"run {run.run_id!r} has no batch {', '.join(unknown)}: `airflow-broadway show`"
                " lists those it has"
            )
        return chosen
    chosen = [each for each in found if each.outcome is not None]
    if not chosen:
        raise CommandError(
            f"none of {many(len(found), 'batch')} of run {run.run_id!r} was handled: their"
            " messages go back to the queue, and the next run handles them; to run some here all"
            " the same, name them with --batch-id"
        )
    return chosen


def make_shadow(run: StagedRun, chosen: Sequence[StagedBatch]) -> tuple[StagedRun, list[BatchPlan]]:
    """Make the folder; returns it, and the plans in it.

    :raises CommandError: If data of a chosen batch is gone.
    """
    plans: dict[str, tuple[BatchPlan, list[PlannedBatch]]] = {}
    for plan, planned, _ in chosen:
        plans.setdefault(plan.path, (plan, []))[1].append(planned)
    for plan, batches in plans.values():
        _check_data(run, plan, batches)
    now = run.clock.now()
    stamp = now.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    shadow = StagedRun(
        run.store,
        pipeline=run.pipeline,
        dag_id=run.dag_id,
        run_id=f"replay__{stamp}__{run.run_id}",
        clock=run.clock,
    )
    # First, so that retention finds the folder whatever happens to this process.
    mark_balanced(shadow)
    _put_mark(shadow, run, now)
    generations = {name for plan, _ in plans.values() for name in plan.generations}
    for generation in sorted(generations):
        lease = Lease(kind="replay", generation=generation, seconds=0.0, deadline=_FOR_EVER)
        shadow.files.replace(paths.lease(generation), json.dumps(lease.to_json()))
    return shadow, [_copy(run, shadow, *each) for each in plans.values()]


def _put_mark(shadow: StagedRun, run: StagedRun, now: datetime) -> None:
    mark = {
        "version": VERSION,
        "pipeline": run.pipeline,
        "dag_id": run.dag_id,
        "run_id": shadow.run_id,
        "of": run.run_id,
        "started_at": now.isoformat(),
    }
    shadow.files.replace(MARK, json.dumps(mark))


def add_result(shadow: StagedRun, result: dict[str, Any]) -> None:
    """Keep what came of a replay in its folder."""
    mark = json.loads(shadow.files.read(MARK))
    mark |= {"ended_at": shadow.clock.now().isoformat(), "result": result}
    shadow.files.replace(MARK, json.dumps(mark))


def _used(batches: Sequence[PlannedBatch]) -> list[int]:
    return sorted({file for batch in batches for file in batch.files})


def _check_data(run: StagedRun, plan: BatchPlan, batches: Sequence[PlannedBatch]) -> None:
    run.store.check_root(plan.root_id, plan.host)
    for index in _used(batches):
        path = f"{plan.path}/{plan.data[index]}"
        if not run.files.exists(path):
            raise CommandError(
                f"the staged data of run {run.run_id!r} is gone:"
                f" {run.store.uri}/{run.path}/{path} is not there, so its batches cannot run again"
                " (retention, or somebody, removed it)"
            )


def _copy(
    run: StagedRun, shadow: StagedRun, plan: BatchPlan, batches: Sequence[PlannedBatch]
) -> BatchPlan:
    """Put a plan with some of its batches, and the data they need, into the shadow."""
    used = _used(batches)
    places = {index: place for place, index in enumerate(used)}
    for index in used:
        _link(run, shadow, f"{plan.path}/{plan.data[index]}")
    lines = [
        dataclasses.replace(batch, files=[places[index] for index in batch.files]).dumps()
        for batch in batches
    ]
    summing = Summing()
    for _ in summing.through(lines):
        pass
    made = dataclasses.replace(
        plan,
        data=[plan.data[index] for index in used],
        messages=sum(batch.size for batch in batches),
        batches=len(batches),
        triggers=dict(Counter(batch.trigger for batch in batches)),
        notes=[],
        lines=summing.to_json(),
    )
    shadow.files.write_lines(f"{plan.path}/plan.jsonl", [made.dumps(), *lines])
    return made


def _link(run: StagedRun, shadow: StagedRun, path: str) -> None:
    source, target = run.files.full(path), shadow.files.full(path)
    with translated(f"copy {path}", run.store.uri):
        if not run.store.local:
            run.store.fs.cp_file(source, target)
            return
        make_folders(os.path.dirname(target))
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            with open(source, "rb") as old, new_file(target) as new:
                shutil.copyfileobj(old, new)
