"""Splits batches that processes died of, and sets single messages aside.

What is decided, :mod:`airflow_broadway.core.formats.isolation` says; here it is done.  Both may be
done again, by several at once: the first outcome of a batch stands.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict
from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats.entries import dump_entry
from airflow_broadway.core.formats.isolation import CRASHED
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import Ownership
from airflow_broadway.core.formats.parts import part_id, record_split
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.record_batch import BatchRecorder
from airflow_broadway.core.text import many
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.tables import ParquetFile, holds

__all__ = ["set_aside", "split"]

log = logging.getLogger(__name__)


def split(run: StagedRun, plan: BatchPlan, batch: PlannedBatch, *, by: str) -> None:
    """Split a batch into halves, by the order in which its messages arrived.

    :param by: Who does it, for people.
    :raises LeaseLapsed: If the run no longer holds its messages.
    :raises StagingDamaged: If its files are not as they were written.
    """
    Ownership(run.files, clock=run.clock).check(batch.sources)
    rows = sorted(_rows(run, plan, batch, _TO_SPLIT), key=_place)
    if len(rows) != batch.size or len({tuple(_place(row)) for row in rows}) != len(rows):
        raise StagingDamaged(
            f"batch {batch.batch_id} of {plan.path} holds {many(batch.size, 'message')}, and its"
            f" files {len(rows)} that can be told apart: it cannot be split"
        )
    middle = len(rows) // 2
    halves = [rows[:middle], rows[middle:]]
    parts = [_part(plan, batch, number, half) for number, half in enumerate(halves)]
    record_split(run.files, plan.path, plan.batcher, batch, parts, by)
    log.warning(
        "Batch %s of %r, of which processes died, is split: %s and %s.",
        batch.batch_id,
        plan.batcher,
        *(f"{part.batch_id} ({part.size:,})" for part in parts),
    )


#: What is to be known of each message to split a batch; and of one, to settle it.
_TO_SPLIT: Final = ("batch", "source", "position", "redelivered", "batch_key")
_TO_SETTLE: Final = (
    *("batch", "source", "position", "message_id", "attempt", "redelivered"),
    *("_receipt", "_payload", "_properties", "_on_failure", "_acked"),
)


def _rows(
    run: StagedRun, plan: BatchPlan, batch: PlannedBatch, columns: Sequence[str]
) -> list[dict[str, Any]]:
    """The messages of a batch, with those of the columns that there are."""
    found: list[dict[str, Any]] = []
    for index in batch.files:
        with ParquetFile(run.files, f"{plan.path}/{plan.data[index]}") as file:
            there = [name for name in columns if name in file.columns]
            for group in range(file.groups):
                if holds(batch.rows, *file.bounds(group, "batch")):
                    found += (
                        row
                        for row in file.read(group, there).to_pylist()
                        if holds(batch.rows, row["batch"], row["batch"])
                        and batch.has(row["source"], row["position"])
                    )
    return found


def _place(row: dict[str, Any]) -> list[int]:
    return [row["source"], row["position"]]


def _part(
    plan: BatchPlan, batch: PlannedBatch, number: int, rows: Sequence[dict[str, Any]]
) -> PlannedBatch:
    sources = Counter(plan.generations[row["source"]] for row in rows)
    return replace(
        batch,
        batch_id=part_id(batch.batch_id, number),
        keys=len({row["batch_key"] for row in rows}) if batch.keys > 1 else 1,
        size=len(rows),
        bytes=batch.bytes * len(rows) // batch.size,
        redelivered=sum(bool(row["redelivered"]) for row in rows),
        sources=dict(sources),
        part=[_place(rows[0]), _place(rows[-1])],
    )


def set_aside(
    run: StagedRun,
    plan: BatchPlan,
    batch: PlannedBatch,
    producer: Producer,
    *,
    deaths: int,
    ownership: Ownership,
    by: str,
) -> Outcome:
    """Record that the one message of a batch is a dead letter; no callback sees it.

    Where its producer's options keep no body for that, it is what fails otherwise.

    :param deaths: How many processes died of it.
    :param ownership: Of the try that does it.
    :returns: The outcome that stands.
    """
    recorder = BatchRecorder(
        run.files, plan, ownership, writer=by, try_number=ownership.try_number, clock=run.clock
    )
    opened = recorder.begin(batch, batch.batch_key)
    reason = f"{CRASHED}its process died {deaths} times, at last with nothing else to handle"
    [row] = _rows(run, plan, batch, _TO_SETTLE)
    # What a callback has settled at once is settled.
    lines = [] if row["_acked"] else [_line(row, batch, producer, reason)]
    log.error("Message %s of batch %s is set aside: %s.", row["message_id"], batch.batch_id, reason)
    return opened.record(
        successful=0,
        failed=1,
        missing=0,
        exceptions=opened.keep(lines),
        error=reason,
    )


def _line(row: Mapping[str, Any], batch: PlannedBatch, producer: Producer, reason: str) -> str:
    """The entry of a message that is set aside."""
    payload = row.get("_payload")
    name = row["_on_failure"] or producer.on_failure
    verdict = Verdict(Action.DEAD_LETTER, 0.0, reason, "batch")
    if payload is None and producer.keeps_payload:
        facts = Facts(name, row["attempt"], row["redelivered"], reason, "batch", row["message_id"])
        verdict = producer.judge(facts)
    entry = Entry(
        row["message_id"],
        row["_receipt"] or "",
        verdict,
        row["attempt"],
        payload,
        row.get("_properties"),
    )
    source = row["source"] if len(batch.sources) > 1 else None
    return dump_entry(entry, source=source)
