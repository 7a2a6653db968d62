"""What to do about batches that processes died of: alone, then in halves, then set aside.

A pure function of what is recorded, so that every try of the task comes to the same:

1. A batch that fewer than two processes may have died of runs among the others.
2. After two it has a process of its own.
3. If that dies too, the batch is split; its halves run one after another, in a process that runs
   nothing else, the larger ones first.
4. A half that a process died of is split again, down to single messages.
5. A single message runs in a process of its own, until so many have died of it as ``max_crashes``
   says: then it is set aside.

Others go first.  So when a message is about to be set aside, something else has been handled since,
unless there is nothing else: a cluster that is broken is no reason to blame a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from airflow_broadway.core.formats.deaths import Deaths
from airflow_broadway.core.formats.plan import PlannedBatch

__all__ = ["CRASHED", "MOST_PROCESSES", "SUSPECT", "Step", "next_step"]

#: What the reason of a message begins with that is set aside since processes died of it.
CRASHED = "crashed: "

#: Deaths after which a batch has a process of its own.
SUSPECT = 2

#: Processes that one task may begin in one run, once one of them has died.
MOST_PROCESSES = 40


class Step(NamedTuple):
    """What is to be done next; what is not named waits.

    :param split: Batches to be split; nothing runs before that is done.
    :param aside: Single messages to be set aside; the same.
    :param run: Ids of the batches for the next process, in order; ``None``: all.
    :param alone: Whether they run one after another, and nothing beside them.
    :param marked: Whether each is marked before it begins.
    :param deaths: How many processes of the task have died.
    """

    split: Sequence[PlannedBatch] = ()
    aside: Sequence[PlannedBatch] = ()
    run: Sequence[str] | None = None
    alone: bool = False
    marked: bool = False
    deaths: int = 0


def next_step(
    undecided: Sequence[PlannedBatch], deaths: Deaths, *, max_crashes: int, proven: bool
) -> Step:
    """The next step.

    :param undecided: The batches without an outcome, in order of their plans; not empty.
    :param max_crashes: How many processes may die of a single message.
    :param proven: Whether some batch of the run has been handled, so that processes need not die.
    """
    if not deaths.count:
        return Step()
    split = [each for each in undecided if _is_to_be_split(each, deaths)]
    proven = proven or sum(each.size for each in undecided) == 1
    aside = [
        each
        for each in undecided
        if proven and each.size == 1 and deaths.of(each) >= max_crashes
        if deaths.alone(each)
    ]
    if split or aside:
        return Step(split, aside)
    plain = list(_plain(undecided, deaths))
    if plain:
        return Step(run=_ids(plain), marked=True, deaths=deaths.count)
    fresh = [each for each in undecided if each.part and not deaths.of(each)]
    if fresh:
        fresh.sort(key=lambda each: -each.size)
        return Step(run=_ids(fresh), alone=True, marked=True, deaths=deaths.count)
    least = min(undecided, key=deaths.of)
    return Step(run=[least.batch_id], alone=True, marked=True, deaths=deaths.count)


def _is_to_be_split(batch: PlannedBatch, deaths: Deaths) -> bool:
    enough = SUSPECT + 1 if batch.part is None else 1
    return batch.size > 1 and deaths.of(batch) >= enough


def _plain(undecided: Iterable[PlannedBatch], deaths: Deaths) -> Iterable[PlannedBatch]:
    """The whole batches that no process of their own is for.

    One behind a suspect of its partition waits: where a pipeline partitions, order counts.
    """
    held: set[int] = set()
    for batch in undecided:
        if batch.part is not None or deaths.of(batch) >= SUSPECT:
            if batch.partition is not None:
                held.add(batch.partition)
        elif batch.partition is None or batch.partition not in held:
            yield batch


def _ids(batches: Iterable[PlannedBatch]) -> list[str]:
    return [batch.batch_id for batch in batches]
