"""Give back what dead executions hold, before a new one receives."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from airflow_broadway.core.custody.protocol import Custodian, Settlement
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import BroadwayError, StagingDamaged
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import many
from airflow_broadway.operators._common import AirflowConnections, producer_env
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import (
    SETTLING,
    GenerationRecord,
    StagedRun,
    iter_unsettled,
)
from airflow_broadway.staging.settlement import build_settlement, settle_generation
from airflow_broadway.staging.settlement_journal import Progress

if TYPE_CHECKING:
    from airflow.sdk import Context

log = logging.getLogger(__name__)


def give_back(
    run: StagedRun, pipeline: Pipeline, context: Context, connections: AirflowConnections
) -> None:
    """Release what earlier executions of this task hold, and settle what runs hold that Airflow no
    longer knows, or shows finished.

    The latter because on ``dagrun_timeout``, a marked sensor or a deleted run no code of ours runs:
    what has an outcome there is settled by it, and the rest is released.
    """
    ti = context["ti"]
    custodian: Custodian | None = None
    finished: dict[str, bool] = {ti.run_id: False}
    for other, record in iter_unsettled(run.store, pipeline.name, ti.dag_id):
        own = other.run_id == ti.run_id
        if own and (record.task_id, record.map_index) != (ti.task_id, ti.map_index):
            continue
        if other.run_id not in finished:
            finished[other.run_id] = not ti.get_dr_count(
                dag_id=ti.dag_id, run_ids=[other.run_id], states=["queued", "running"]
            )
        if not own and not finished[other.run_id]:
            continue
        if custodian is None:
            custodian = pipeline.producer.custodian(
                producer_env(
                    pipeline,
                    generation=record.generation,
                    owner=record.lease["owner"],
                    store=run.store,
                    connections=connections,
                )
            )
        # An execution that is tried again, or cleared, is void, whatever became of its batches;
        # but what somebody began to settle is finished.
        void = own and bool(pipeline.batchers) and record.state != SETTLING
        _settle(other, record, custodian, pipeline, void=void)
    if custodian is not None:
        custodian.close()


def _settle(
    run: StagedRun,
    record: GenerationRecord,
    custodian: Custodian,
    pipeline: Pipeline,
    *,
    void: bool,
) -> None:
    """Settle a generation by its outcomes; a void one is released but for what callbacks settled
    at once.
    """
    try:
        settlement, progress = _settlement(run, record, pipeline, void=void)
        report = settle_generation(run, record, custodian, settlement, progress=progress)
    except Exception as error:
        # Not in the way of this run: the lease lapses by itself.
        unexpected = None if isinstance(error, BroadwayError) else error
        log.warning(
            "Could not give back generation %s: %s", record.generation, error, exc_info=unexpected
        )
        return
    log.info(
        "Settled the dead generation %s (run %s, %s, try %d): gave back %s, %d had an"
        " outcome, %d had lapsed.",
        record.generation,
        run.run_id,
        record.task_id,
        record.try_number,
        many(report.released, "message"),
        report.total - report.released - report.lapsed,
        report.lapsed,
    )


def _settlement(
    run: StagedRun, record: GenerationRecord, pipeline: Pipeline, *, void: bool
) -> tuple[Settlement, Progress]:
    recorded = Recorded(run)
    try:
        plans = recorded.deciding(pipeline.batchers, record.generation)
        settlement, _, progress = build_settlement(
            run, record.generation, pipeline, plans, final=not void, recorded=recorded
        )
    except StagingDamaged as error:
        # Nobody can say any more which of its messages failed: all of them come again.
        log.error("Generation %s is given back whole: %s", record.generation, error)
        return Settlement(rest=RELEASE), Progress()
    if void:
        settlement = Settlement(
            rest=RELEASE, expected=settlement.expected, settled_now=settlement.settled_now
        )
    return settlement, progress
