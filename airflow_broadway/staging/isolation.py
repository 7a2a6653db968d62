"""Splits batches that processes died of, and sets single messages aside.

:mod:`airflow_broadway.core.formats.isolation` decides; this module carries out.  Both may be done
again, by several at once: the first outcome of a batch stands.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict
from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats.deaths import interruptions_of
from airflow_broadway.core.formats.entries import dump_entry
from airflow_broadway.core.formats.isolation import CRASHED, OnRecord
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import Ownership
from airflow_broadway.core.formats.parts import part_id, record_split
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.record_batch import BatchRecorder
from airflow_broadway.core.text import many
from airflow_broadway.staging.crash_records import CrashHistory, forget_crashes, portion_size
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.tables import ParquetFile, holds

log = logging.getLogger(__name__)


def split(run: StagedRun, plan: BatchPlan, batch: PlannedBatch, parts: int, *, by: str) -> None:
    """Split a batch into equal parts, by the order in which its messages arrived.

    :param parts: How many; at most its messages.
    :param by: The task that does it, for people.
    :raises LeaseLapsed: If the run no longer holds its messages.
    :raises StagingDamaged: If its files are not as they were written.
    """
    Ownership(run.files, clock=run.clock).check(batch.sources)
    rows = sorted((row for _, row in _rows(run, plan, [batch], _TO_SPLIT)), key=_place)
    if len(rows) != batch.size or len({tuple(_place(row)) for row in rows}) != len(rows):
        raise StagingDamaged(
            f"batch {batch.batch_id} of {plan.path} holds {many(batch.size, 'message')}, and its"
            f" files {len(rows)} that can be told apart: it cannot be split"
        )
    bounds = [len(rows) * number // parts for number in range(parts + 1)]
    made = [
        _part(plan, batch, number, rows[first:last])
        for number, (first, last) in enumerate(pairwise(bounds))
    ]
    record_split(run.files, plan.path, plan.batcher, batch, made, by)
    log.warning(
        "Batch %s of %r (%s), at which processes died, is split into %s of %s to %s.",
        batch.batch_id,
        plan.batcher,
        many(batch.size, "message"),
        many(parts, "part"),
        min(part.size for part in made),
        many(max(part.size for part in made), "message"),
    )


def on_record(
    run: StagedRun, plan: BatchPlan, batches: Sequence[PlannedBatch], history: CrashHistory
) -> dict[str, OnRecord]:
    """Return what is on record of the messages of some batches of one plan, by batch id."""
    found = {batch.batch_id: OnRecord() for batch in batches}
    for batch, row in _rows(run, plan, batches, ("batch", "source", "position", "message_id")):
        in_hand = history.in_hand.get(row["message_id"], 0)
        known = found[batch.batch_id]
        if in_hand > known.in_hand:
            alone = history.alone.get(row["message_id"], 0) if batch.size == 1 else 0
            found[batch.batch_id] = OnRecord(in_hand, portion_size(in_hand), alone)
    return found


class InHand(NamedTuple):
    """The messages that were in hand when the whole task died; both are ids.

    :param messages: Of one generation, without those that have an outcome by now.
    :param alone: Those of them that had nothing else in hand beside them.
    """

    messages: set[str]
    alone: set[str]


def in_hand_at_interruptions(
    recorded: Recorded, generation: str, plans: Sequence[BatchPlan]
) -> InHand | None:
    """Return the messages of a generation without an outcome that were in hand when a whole task
    died at their batches; ``None`` if none died.

    Call it once no process of the run is at work.

    :param plans: Those that decide about the generation.
    :raises StagingError: If a file cannot be read.
    """
    found = None
    for plan in plans:
        undecided = [
            batch
            for batch, outcome in recorded.outcomes(plan)
            if outcome is None and batch.sources.get(generation)
        ]
        interruptions = interruptions_of(recorded.run.files, plan.path) if undecided else []
        if not interruptions:
            continue
        found = found or InHand(set(), set())
        begun = {batch_id for batch_ids in interruptions for batch_id in batch_ids}
        batches = [batch for batch in undecided if batch.batch_id in begun]
        source = plan.generations.index(generation)
        for batch, row in _rows(recorded.run, plan, batches, _IN_HAND):
            if row["source"] != source or row["_acked"]:
                continue
            found.messages.add(row["message_id"])
            if batch.size == 1 and [batch.batch_id] in interruptions:
                found.alone.add(row["message_id"])
    return found


#: What is to be known of each message to split a batch; and of one, to settle it.
_TO_SPLIT: Final = ("batch", "source", "position", "redelivered", "batch_key")
_TO_SETTLE: Final = (
    *("batch", "source", "position", "message_id", "attempt", "redelivered"),
    *("_receipt", "_payload", "_properties", "_on_failure", "_acked"),
)


_IN_HAND: Final = ("batch", "source", "position", "message_id", "_acked")


def _rows(
    run: StagedRun, plan: BatchPlan, batches: Sequence[PlannedBatch], columns: Sequence[str]
) -> Iterator[tuple[PlannedBatch, dict[str, Any]]]:
    """The messages of some batches of one plan, with those of the columns that there are."""
    by_number: dict[int, list[PlannedBatch]] = {}
    for batch in batches:
        for first, last in batch.rows:
            for number in range(first, last + 1):
                by_number.setdefault(number, []).append(batch)
    wanted = [[number, number] for number in sorted(by_number)]
    for index in sorted({index for batch in batches for index in batch.files}):
        with ParquetFile(run.files, f"{plan.path}/{plan.data[index]}") as file:
            there = [name for name in columns if name in file.columns]
            for group in range(file.groups):
                if not holds(wanted, *file.bounds(group, "batch")):
                    continue
                for row in file.read(group, there).to_pylist():
                    for batch in by_number.get(row["batch"], ()):
                        if batch.has(row["source"], row["position"]):
                            yield batch, row


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
    why: str,
    ownership: Ownership,
    by: str,
    history: CrashHistory | None = None,
) -> Outcome:
    """Record that the one message of a batch is a dead letter; no callback sees it.

    Once it is one, its crashes on record are forgotten.

    Where its producer's options keep no body for that, it is what fails otherwise.

    :param why: How often processes died of it.
    :param ownership: Of the try that does it.
    :param history: The crashes on record.
    :returns: The outcome that stands.
    """
    recorder = BatchRecorder(
        run.files, plan, ownership, writer=by, try_number=ownership.try_number, clock=run.clock
    )
    opened = recorder.begin(batch, batch.batch_key)
    reason = f"{CRASHED}{why}"
    [(_, row)] = _rows(run, plan, [batch], _TO_SETTLE)
    # What a callback has settled at once is settled.
    lines = [] if row["_acked"] else [_line(row, batch, producer, reason)]
    log.error("Message %s of batch %s is set aside: %s.", row["message_id"], batch.batch_id, reason)
    outcome = opened.record(
        successful=0,
        failed=1,
        missing=0,
        exceptions=opened.keep(lines),
        error=reason,
    )
    if history is not None and row["message_id"] in history.in_hand:
        forget_crashes(
            run.store, run.pipeline, batch.batch_id, [row["message_id"]], run.clock.now()
        )
    return outcome


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
