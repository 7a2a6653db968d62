"""A settled run of very many messages and batches: its files, without the messages."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.record_batch import GATHERED
from airflow_broadway.core.formats.sums import Summing
from airflow_broadway.runs.account import batchers_of, keep_report
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.settling.journal import Progress, record_settled
from airflow_broadway.staging.store import Store
from tests.unit.planned import planned_batch

BATCHER = "default"
_BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


def big_run(
    root: Path, *, batches: int = 10_000, size: int = 1000, settled: bool = True
) -> StagedRun:
    """A run with this number of batches and messages per batch; every hundredth has a failure.

    :param settled: Whether it is settled and has its report; else it has all its outcomes.
    """
    run = StagedRun(Store.open(root.as_uri()), pipeline="Sums", dag_id="sums", run_id="manual__1")
    messages = batches * size
    generation = "0" * 31 + "1"
    lease = Lease(
        kind="sqlite", generation=generation, seconds=900.0, deadline=_BEGUN + timedelta(hours=1)
    )
    record = run.open_generation(task_id="process", map_index=0, try_number=1, lease=lease)
    run.publish(_manifest(run, record, messages))
    _plan_and_outcomes(run, generation, batches, size)
    if settled:
        settle(run)
    return run


def settle(run: StagedRun) -> None:
    """Settle such a run, and keep its report, as its ack sensor does."""
    [record] = run.generations()
    recorded = Recorded(run)
    [plan] = recorded.standing(BATCHER)
    failed = -(-plan.batches // 100)
    settled = SettleReport(acked=plan.messages - failed, dead_lettered=failed)
    record_settled(run, record, settled, progress=Progress(received=plan.messages))
    reasons = [{"count": 100, "stage": "batch", "reason": "five"}]
    keep_report(
        run,
        run.generations(),
        batchers=batchers_of(recorded, [BATCHER]),
        reasons=reasons,
        failed_tasks=[],
        at=_BEGUN,
    )


def _manifest(run: StagedRun, record: GenerationRecord, messages: int) -> Manifest:
    return Manifest(
        generation=record.generation,
        root_id=record.root_id,
        host=record.host,
        lease=record.lease,
        received=messages,
        received_bytes=messages * 100,
        failed=0,
        settled_now=SettleReport().to_json(),
        batchers={BATCHER: messages},
        files={BATCHER: [f"{record.generation}/messages/{BATCHER}/part-0000.parquet"]},
        entries=[],
        configured=False,
        dropped={},
        stopped="empty",
        started_at=_BEGUN.isoformat(),
        ended_at=_BEGUN.isoformat(),
        seconds={"receive": 1.0, "total": 100.0},
    )


def _plan_and_outcomes(run: StagedRun, generation: str, batches: int, size: int) -> None:
    path = f"batches/{BATCHER}/{'a' * 16}/000001-b"
    planned = [_planned(number, size, generation) for number in range(batches)]
    lines = [batch.dumps() for batch in planned]
    summing = Summing()
    for _ in summing.through(lines):
        pass
    plan = BatchPlan(
        path=path,
        pipeline="Sums",
        batcher=BATCHER,
        generations=[generation],
        data=["data-0000.parquet"],
        schema=None,
        as_bytes=True,
        messages=batches * size,
        batches=batches,
        triggers={"size": batches},
        root_id=run.store.root_id(),
        host="here",
        lines=summing.to_json(),
    )
    run.files.write_lines(f"{path}/plan.jsonl", [plan.dumps(), *lines])
    # Not by the package: durable files would take a minute.
    folder = Path(run.files.full(paths.outcomes(path)))
    folder.mkdir(parents=True)
    texts = []
    for number, batch in enumerate(planned):
        texts.append(_outcome(number, batch, path).dumps())
        (folder / f"{batch.batch_id}.json").write_text(texts[-1])
    for number, at in enumerate(range(0, len(texts), GATHERED)):
        name = Path(run.files.full(paths.gathered(path, "000001-x", number)))
        name.write_text("".join(f"{text}\n" for text in texts[at : at + GATHERED]))


def _planned(number: int, size: int, generation: str) -> PlannedBatch:
    rows, sources = [[number, number]], {generation: size}
    key = f"key-{number % 7}"
    return planned_batch(f"{number:032x}", rows=rows, batch_key=key, size=size, sources=sources)


def _outcome(number: int, batch: PlannedBatch, plan: str) -> Outcome:
    failed = int(number % 100 == 0)
    line = {"id": f"m{number}", "action": "dead_letter", "attempt": 1, "reason": "five"}
    return Outcome(
        batch_id=batch.batch_id,
        batcher=BATCHER,
        plan=plan,
        successful=batch.size - failed,
        failed=failed,
        lines=[json.dumps({**line, "stage": "batch"})] if failed else None,
        writer="handle_batches try 1 on here",
        started_at=(_BEGUN + timedelta(seconds=number / 100)).isoformat(),
        seconds=number % 13 / 10,
        application_id="app-1",
    )
