"""Decides what happens to batches that processes died of: alone, in halves, then dead-lettered.

A pure function of what is recorded, so that every try of the task comes to the same:

1. A batch that fewer than two processes may have died of runs among the others.
2. After two deaths it has a process of its own.
3. If that dies too, the batch is split; its halves run one after another, in a process that runs
   nothing else, the larger ones first.
4. A half that a process died of is split again, down to single messages.
5. A single message runs in a process of its own, until ``max_crashes`` processes that handled
   nothing else have died of it: then it is set aside.

The death of a whole task proves nothing, so it splits no batch of its run.  But a batch with
messages that were in hand when a task of an earlier run died waits for the others, and is split
before it runs.  A message that was alone in hand in more than ``max_crashes`` such deaths is set
aside.

Others go first.  So when a message is about to be set aside, something else has been handled since,
unless there is nothing else: a cluster that is broken is no reason to blame a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from airflow_broadway.core.formats.deaths import Deaths
from airflow_broadway.core.formats.plan import PlannedBatch

#: What the reason of a message begins with that is set aside since processes died of it.
CRASHED = "crashed: "

#: Deaths after which a batch has a process of its own.
SUSPECT = 2

#: Processes that one task may begin in one run, once one of them has died.
MOST_PROCESSES = 40

#: Parts of a batch that is split before it runs: 100,000 messages are down to one in three runs,
#: and an innocent batch costs no more than these.
MOST_PARTS = 100


class OnRecord(NamedTuple):
    """What the crashes of earlier runs tell of the messages of one batch.

    :param in_hand: In how many crashes the most frequent of them was in hand.
    :param portion: How many messages may be handled together with it.
    :param alone: Of a single message: in how many crashes it was alone in hand.
    """

    in_hand: int = 0
    portion: int | None = None
    alone: int = 0


class Step(NamedTuple):
    """What is to be done next; what is not named waits.

    :param split: Batches to be split, and into how many parts; nothing runs before that is done.
    :param aside: Single messages to be set aside; the same.
    :param run: Ids of the batches for the next process, in order; ``None``: all.
    :param alone: Whether they run one after another, and nothing beside them.
    :param marked: Whether each is marked before it begins.
    :param deaths: How many tries of the task have died, with their parent or without.
    """

    split: Sequence[tuple[PlannedBatch, int]] = ()
    aside: Sequence[PlannedBatch] = ()
    run: Sequence[str] | None = None
    alone: bool = False
    marked: bool = False
    deaths: int = 0


def next_step(
    undecided: Sequence[PlannedBatch],
    deaths: Deaths,
    *,
    max_crashes: int,
    proven: bool,
    suspects: bool = False,
    on_record: Mapping[str, OnRecord] | None = None,
) -> Step:
    """Decide the next step.

    :param undecided: The batches without an outcome, in order of their plans; not empty.
    :param max_crashes: How many processes may die of a single message.
    :param proven: Whether some batch of the run has been handled, so that processes need not die.
    :param suspects: Whether there are messages that came again, of a pipeline with crashes on
        record.
    :param on_record: Batch id → what is on record of its messages.
    """
    died = deaths.count + deaths.interruptions
    if not died and not suspects:
        return Step()
    known = on_record or {}
    split = [(batch, parts) for batch in undecided if (parts := _parts(batch, deaths, known)) > 1]
    proven = proven or sum(each.size for each in undecided) == 1
    aside = [each for each in undecided if _is_poison(each, deaths, known, max_crashes, proven)]
    if split or aside:
        return Step(split, aside)
    plain = list(_plain(undecided, deaths, known))
    if plain:
        return Step(run=_ids(plain), marked=True, deaths=died)
    fresh = [
        each
        for each in undecided
        if (each.part or _record(each, known).in_hand) and not deaths.of(each)
    ]
    if fresh:
        # What was in hand least goes first: so kills from outside hit now one and now another.
        fresh.sort(key=lambda each: (_in_hand(each, deaths, known), -each.size))
        return Step(run=_ids(fresh), alone=True, marked=True, deaths=died)
    least = min(undecided, key=deaths.of)
    return Step(run=[least.batch_id], alone=True, marked=True, deaths=died)


def _parts(batch: PlannedBatch, deaths: Deaths, known: Mapping[str, OnRecord]) -> int:
    """How many parts a batch is to be split into; 1: it stays as it is."""
    if batch.size == 1:
        return 1
    enough = SUSPECT + 1 if batch.part is None else 1
    if deaths.of(batch) >= enough:
        return 2
    portion = _record(batch, known).portion
    if batch.part is not None or portion is None:
        return 1
    return min(MOST_PARTS, -(-batch.size // portion))


def _is_poison(
    batch: PlannedBatch,
    deaths: Deaths,
    known: Mapping[str, OnRecord],
    max_crashes: int,
    proven: bool,
) -> bool:
    """Whether a batch is a single message that has killed often enough."""
    if batch.size > 1:
        return False
    before = _record(batch, known).alone
    if before > max_crashes:  # in so many runs
        return True
    here = deaths.interrupted_alone(batch)
    return proven and (deaths.alone(batch) >= max_crashes or here + before > max_crashes)


def _record(batch: PlannedBatch, known: Mapping[str, OnRecord]) -> OnRecord:
    return known.get(batch.batch_id, OnRecord())


def _in_hand(batch: PlannedBatch, deaths: Deaths, known: Mapping[str, OnRecord]) -> int:
    return deaths.interrupted(batch) + _record(batch, known).in_hand


def _plain(
    undecided: Iterable[PlannedBatch], deaths: Deaths, known: Mapping[str, OnRecord]
) -> Iterable[PlannedBatch]:
    """The whole batches that need not wait for the others.

    One behind a suspect of its partition waits: where a pipeline partitions, order counts.
    """
    held: set[int] = set()
    for batch in undecided:
        waits = deaths.of(batch) >= SUSPECT or _record(batch, known).in_hand > 0
        if batch.part is not None or waits:
            if batch.partition is not None:
                held.add(batch.partition)
        elif batch.partition is None or batch.partition not in held:
            yield batch


def _ids(batches: Iterable[PlannedBatch]) -> list[str]:
    return [batch.batch_id for batch in batches]
