"""A replay's own folder beside the run's, so that it can neither change nor be mistaken for it.

It holds the chosen batches: plans with only their lines, and the same data files (hard links where
the disk has them, copies else).  It has leases without an end and no journal, so that batches may
run; and no generation, so that no sweep and no account counts it.  It is marked as balanced from
the start: retention removes it as it does any run.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.formats.layout import VERSION, paths
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.sums import Summing
from airflow_broadway.runs.inspect import REPLAY_MARK, StagedBatch
from airflow_broadway.staging.retention import mark_balanced
from airflow_broadway.staging.run_folder import StagedRun

_FOR_EVER: Final = datetime(9999, 1, 1, tzinfo=UTC)


def make_replay_folder(
    run: StagedRun, chosen: Sequence[StagedBatch]
) -> tuple[StagedRun, list[BatchPlan]]:
    """Make the folder; returns it, and the plans in it.

    :raises RequestRefused: If data of a chosen batch is gone.
    """
    plans: dict[str, tuple[BatchPlan, list[PlannedBatch]]] = {}
    for plan, planned, _ in chosen:
        plans.setdefault(plan.path, (plan, []))[1].append(planned)
    for plan, batches in plans.values():
        check_data(run, plan, batches)
    now = run.clock.now()
    stamp = now.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    target = StagedRun(
        run.store,
        pipeline=run.pipeline,
        dag_id=run.dag_id,
        run_id=f"replay__{stamp}__{run.run_id}",
        clock=run.clock,
    )
    # First, so that retention finds the folder whatever happens to this process.
    mark_balanced(target)
    _put_mark(target, run, now)
    generations = {name for plan, _ in plans.values() for name in plan.generations}
    for generation in sorted(generations):
        lease = Lease(kind="replay", generation=generation, seconds=0.0, deadline=_FOR_EVER)
        target.files.replace(paths.lease(generation), json.dumps(lease.to_json()))
    return target, [_copy(run, target, *each) for each in plans.values()]


def _put_mark(target: StagedRun, run: StagedRun, now: datetime) -> None:
    mark = {
        "version": VERSION,
        "pipeline": run.pipeline,
        "dag_id": run.dag_id,
        "run_id": target.run_id,
        "of": run.run_id,
        "started_at": now.isoformat(),
    }
    target.files.replace(REPLAY_MARK, json.dumps(mark))


def add_result(target: StagedRun, result: dict[str, Any]) -> None:
    """Keep what came of a replay in its folder."""
    mark = json.loads(target.files.read(REPLAY_MARK))
    mark |= {"ended_at": target.clock.now().isoformat(), "result": result}
    target.files.replace(REPLAY_MARK, json.dumps(mark))


def _used(batches: Sequence[PlannedBatch]) -> list[int]:
    return sorted({file for batch in batches for file in batch.files})


def check_data(run: StagedRun, plan: BatchPlan, batches: Sequence[PlannedBatch]) -> None:
    """Return if the data of batches is there.

    :raises RequestRefused: Otherwise.
    """
    run.store.check_root(plan.root_id, plan.host)
    for index in _used(batches):
        path = f"{plan.path}/{plan.data[index]}"
        if not run.files.exists(path):
            raise RequestRefused(
                f"the staged data of run {run.run_id!r} is gone:"
                f" {run.store.uri}/{run.path}/{path} is not there, so its batches cannot run again"
                " (retention, or somebody, removed it)"
            )


def _copy(
    run: StagedRun, target: StagedRun, plan: BatchPlan, batches: Sequence[PlannedBatch]
) -> BatchPlan:
    """Put a plan with some of its batches, and the data they need, into the replay's folder."""
    used = _used(batches)
    places = {index: place for place, index in enumerate(used)}
    for index in used:
        path = f"{plan.path}/{plan.data[index]}"
        run.files.copy(path, target.files, path)
    lines = [
        dataclasses.replace(batch, files=[places[index] for index in batch.files], error="").dumps()
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
    target.files.write_lines(f"{plan.path}/plan.jsonl", [made.dumps(), *lines])
    return made
