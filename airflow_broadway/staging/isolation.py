"""Splits batches that crashed processes, and dead-letters single messages.

:mod:`airflow_broadway.core.formats.isolation` decides; this module executes.  Both are idempotent,
also concurrently: the first outcome of a batch is final.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict
from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats.deaths import interruptions_of
from airflow_broadway.core.formats.entries import dump_entry, entry_of_row
from airflow_broadway.core.formats.isolation import CRASHED, OnRecord
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import Ownership
from airflow_broadway.core.formats.parts import part_id, record_split
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.record_batch import BatchRecorder
from airflow_broadway.core.text import pluralize
from airflow_broadway.staging.batch_reader import rows_of
from airflow_broadway.staging.crash_records import CrashHistory, forget_crashes, portion_size
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)


def split(run: StagedRun, plan: BatchPlan, batch: PlannedBatch, parts: int, *, by: str) -> None:
    """Splits a batch into equal parts, in order of arrival.

    :param parts: Number of parts; at most the number of its messages.
    :param by: The calling task, for display.
    :raises LeaseLapsed: If the run no longer holds its messages.
    :raises StagingDamaged: If its files are damaged.
    """
    Ownership(run.files, clock=run.clock).check(batch.sources)
    rows = sorted((row for _, row in rows_of(run, plan, [batch], _SPLIT_COLUMNS)), key=_place)
    if len(rows) != batch.size or len({tuple(_place(row)) for row in rows}) != len(rows):
        raise StagingDamaged(
            f"batch {batch.batch_id} of {plan.path} holds {pluralize(batch.size, 'message')}, and"
            f" its files {len(rows)} distinct ones: it cannot be split"
        )
    bounds = [len(rows) * number // parts for number in range(parts + 1)]
    split_parts = [
        _part(plan, batch, number, rows[first:last])
        for number, (first, last) in enumerate(pairwise(bounds))
    ]
    record_split(run.files, plan.path, plan.batcher, batch, split_parts, by)
    log.warning(
        "Batch %s of %r (%s), which crashed processes, is split into %s of %s to %s.",
        batch.batch_id,
        plan.batcher,
        pluralize(batch.size, "message"),
        pluralize(parts, "part"),
        min(part.size for part in split_parts),
        pluralize(max(part.size for part in split_parts), "message"),
    )


def on_record(
    run: StagedRun, plan: BatchPlan, batches: Sequence[PlannedBatch], history: CrashHistory
) -> dict[str, OnRecord]:
    """Returns the crash records of the messages of some batches of one plan, by batch id."""
    records = {batch.batch_id: OnRecord() for batch in batches}
    for batch, row in rows_of(run, plan, batches, ("batch", "source", "position", "message_id")):
        in_hand = history.in_hand.get(row["message_id"], 0)
        record = records[batch.batch_id]
        if in_hand > record.in_hand:
            alone = history.alone.get(row["message_id"], 0) if batch.size == 1 else 0
            records[batch.batch_id] = OnRecord(in_hand, portion_size(in_hand), alone)
    return records


class InHand(NamedTuple):
    """The ids of messages that were in hand when the whole task died.

    :param messages: Messages of one generation without an outcome.
    :param alone: Those that were the only message in hand.
    """

    messages: set[str]
    alone: set[str]


def in_hand_at_interruptions(
    recorded: Recorded, generation: str, plans: Sequence[BatchPlan]
) -> InHand | None:
    """Returns the messages of a generation without an outcome that were in hand when a whole task
    died at their batches; ``None`` if none died.

    Call it once no process of the run is running.

    :param plans: The plans that decide about the generation.
    :raises StagingError: If a file cannot be read.
    """
    hand = None
    for plan in plans:
        undecided = [
            batch
            for batch, outcome in recorded.outcomes(plan)
            if outcome is None and batch.sources.get(generation)
        ]
        interruptions = interruptions_of(recorded.run.files, plan.path) if undecided else []
        if not interruptions:
            continue
        hand = hand or InHand(set(), set())
        begun = {batch_id for batch_ids in interruptions for batch_id in batch_ids}
        batches = [batch for batch in undecided if batch.batch_id in begun]
        source = plan.generations.index(generation)
        for batch, row in rows_of(recorded.run, plan, batches, _IN_HAND_COLUMNS):
            if row["source"] != source or row["_acked"]:
                continue
            hand.messages.add(row["message_id"])
            if batch.size == 1 and [batch.batch_id] in interruptions:
                hand.alone.add(row["message_id"])
    return hand


#: The columns needed to split a batch, and to settle a message.
_SPLIT_COLUMNS: Final = ("batch", "source", "position", "redelivered", "batch_key")
_SETTLE_COLUMNS: Final = (
    *("batch", "source", "position", "message_id", "attempt", "redelivered"),
    *("_receipt", "_payload", "_properties", "_on_failure", "_acked"),
)


_IN_HAND_COLUMNS: Final = ("batch", "source", "position", "message_id", "_acked")


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


def dead_letter(
    run: StagedRun,
    plan: BatchPlan,
    batch: PlannedBatch,
    producer: Producer,
    *,
    crashes: str,
    ownership: Ownership,
    by: str,
    history: CrashHistory | None = None,
) -> Outcome:
    """Dead-letters the only message of a batch; no callback receives it.

    Its crash records are then cleared.

    If its producer's options keep no payload for dead letters, it fails by ``on_failure`` instead.

    :param crashes: The number of crashes, as text.
    :param ownership: The ownership of the calling try.
    :param history: The crashes on record.
    :returns: The final outcome.
    """
    recorder = BatchRecorder(
        run.files, plan, ownership, writer=by, try_number=ownership.try_number, clock=run.clock
    )
    opened = recorder.begin(batch, batch.batch_key)
    reason = f"{CRASHED}{crashes}"
    [(_, row)] = rows_of(run, plan, [batch], _SETTLE_COLUMNS)
    # A message that a callback settled immediately needs no entry.
    lines = [] if row["_acked"] else [_line(row, batch, producer, reason)]
    log.error(
        "Dead-lettering message %s (batch %s): %s.", row["message_id"], batch.batch_id, reason
    )
    outcome = opened.record(
        successful=0, failed=1, missing=0, exceptions=opened.keep(lines), error=reason
    )
    if history is not None and row["message_id"] in history.in_hand:
        forget_crashes(
            run.store, run.pipeline, batch.batch_id, [row["message_id"]], run.clock.now()
        )
    return outcome


def _line(row: Mapping[str, Any], batch: PlannedBatch, producer: Producer, reason: str) -> str:
    """Builds the entry of a message that is dead-lettered."""
    name = row["_on_failure"] or producer.on_failure
    verdict = Verdict(Action.DEAD_LETTER, 0.0, reason, "batch")
    if row.get("_payload") is None and producer.keeps_payload:
        facts = Facts(name, row["attempt"], row["redelivered"], reason, "batch", row["message_id"])
        verdict = producer.judge(facts)
    source = row["source"] if len(batch.sources) > 1 else None
    return dump_entry(entry_of_row(row, verdict), source=source)
