"""Batches that were split because they killed processes: their parts replace them.

A split is the batch's outcome, created exclusively like any other: either the batch's result
counts, or its parts do.  A name in the folder of outcomes marks a split, so that no other outcome
needs to be read for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping

from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import PlannedBatch

#: Id of a batch that was split → its parts.
Splits = Mapping[str, list[PlannedBatch]]

_HINT = ".split"


def part_id(batch_id: str, number: int) -> str:
    """Returns the id of a part, stable whenever the batch is split."""
    return hashlib.sha256(f"{batch_id}/{number}".encode()).hexdigest()[:32]


def splits_of(files: Files, plan: str, names: Collection[str]) -> Splits:
    """Returns the batches of a plan that were split.

    :param plan: The plan's path.
    :param names: The names in its folder of outcomes.
    :raises StagingDamaged: If an outcome is corrupt.
    """
    splits: dict[str, list[PlannedBatch]] = {}
    for name in names:
        batch_id = name.removesuffix(_HINT)
        if batch_id == name or f"{batch_id}.json" not in names:
            continue
        path = paths.outcome(plan, batch_id)
        outcome = Outcome.loads(files.read(path), path)
        if outcome.parts:
            try:
                splits[batch_id] = [PlannedBatch.from_json(part) for part in outcome.parts]
            except TypeError as error:
                raise StagingDamaged(f"{path} is damaged ({error})") from error
    return splits


def with_parts(batches: Iterable[PlannedBatch], splits: Splits) -> Iterator[PlannedBatch]:
    """Yields the batches in order, with the parts in place of each that was split."""
    for batch in batches:
        parts = splits.get(batch.batch_id)
        if parts is None:
            yield batch
        else:
            yield from with_parts(parts, splits)


def record_split(
    files: Files,
    plan: str,
    batcher: str,
    batch: PlannedBatch,
    parts: Iterable[PlannedBatch],
    by: str,
) -> None:
    """Records that a batch was split, unless it has an outcome.  Safe to repeat.

    :param by: The process that split it, for display.
    """
    # The hint first: an outcome without it would be taken for that of the batch itself.
    files.create(paths.split(plan, batch.batch_id), "{}")
    outcome = Outcome(
        batch_id=batch.batch_id,
        batcher=batcher,
        plan=plan,
        successful=0,
        failed=0,
        writer=by,
        parts=[part.to_json() for part in parts],
    )
    files.create(paths.outcome(plan, batch.batch_id), outcome.dumps())
