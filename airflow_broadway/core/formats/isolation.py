"""Decides how batches that killed processes are isolated: alone, in halves, then dead-lettered.

A pure function of what is recorded, so that every try of the task decides alike:

1. A batch that may have killed fewer than two processes runs among the others.
2. After two deaths it gets a process of its own.
3. If that dies too, the batch is split; its halves run one after another, in a process that runs
   nothing else, the larger ones first.
4. A half that killed a process is split again, down to single messages.
5. A single message runs in a process of its own, until it has killed ``max_crashes`` processes that
   handled nothing else: then it is dead-lettered.

The death of a whole task proves nothing, so it splits no batch of its run.  But a batch with
messages that were in hand when a task of an earlier run died runs after the others, and is split
before it runs.  A message that was alone in hand at more than ``max_crashes`` such deaths is
dead-lettered.

Other batches run first.  So before a message is dead-lettered, something else has been handled,
unless there is nothing else: a broken cluster must not count against a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from airflow_broadway.core.formats.deaths import Deaths
from airflow_broadway.core.formats.plan import PlannedBatch

#: The prefix of the reason of a message that is dead-lettered for killing processes.
CRASHED = "crashed: "

#: Deaths after which a batch gets a process of its own.
SUSPECT = 2

#: Processes that one task may start in one run, once one of them has died.
MOST_PROCESSES = 40

#: Parts of a batch that is split before it runs: 100,000 messages are reduced to one in three runs,
#: and a harmless batch costs no more than these.
MOST_PARTS = 100


class OnRecord(NamedTuple):
    """The recorded crashes of earlier runs for the messages of one batch.

    :param in_hand: The number of crashes with the most frequent of them in hand.
    :param portion: How many messages may be handled together with it.
    :param alone: For a single message: the number of crashes with it alone in hand.
    """

    in_hand: int = 0
    portion: int | None = None
    alone: int = 0


class Step(NamedTuple):
    """The next step; batches that it does not name wait.

    :param split: Batches to be split, with the number of parts; done before anything runs.
    :param aside: Single messages to be dead-lettered; done before anything runs.
    :param run: Ids of the batches for the next process, in order; ``None``: all.
    :param alone: Whether they run one after another, and nothing concurrently.
    :param marked: Whether each is marked before it begins.
    """

    split: Sequence[tuple[PlannedBatch, int]] = ()
    aside: Sequence[PlannedBatch] = ()
    run: Sequence[str] | None = None
    alone: bool = False
    marked: bool = False


def next_step(
    undecided: Sequence[PlannedBatch],
    deaths: Deaths,
    *,
    max_crashes: int,
    proven: bool,
    suspects: bool = False,
    on_record: Mapping[str, OnRecord] | None = None,
) -> Step:
    """Decides the next step.

    :param undecided: The batches without an outcome, in order of their plans; not empty.
    :param max_crashes: How many processes a single message may kill.
    :param proven: Whether some batch of the run has been handled, so that the environment works.
    :param suspects: Whether there are redelivered messages, of a pipeline with recorded crashes.
    :param on_record: Batch id → its messages' recorded crashes.
    """
    if not (deaths.count or deaths.interruptions or suspects):
        return Step()
    evidence = _Evidence(deaths, on_record or {})
    split = [(batch, parts) for batch in undecided if (parts := evidence.parts(batch)) > 1]
    proven = proven or sum(batch.size for batch in undecided) == 1
    aside = [batch for batch in undecided if evidence.is_poison(batch, max_crashes, proven)]
    if split or aside:
        return Step(split, aside)
    run, alone = list(evidence.unsuspected(undecided)), False
    if not run:
        alone = True
        # Batches least often in hand first: so that outside kills do not always hit the same one.
        run = sorted(
            (
                batch
                for batch in undecided
                if (batch.part or evidence.of_record(batch).in_hand) and not deaths.of(batch)
            ),
            key=lambda batch: (evidence.times_in_hand(batch), -batch.size),
        )
    run = run or [min(undecided, key=deaths.of)]
    return Step(run=[batch.batch_id for batch in run], alone=alone, marked=True)


class _Evidence(NamedTuple):
    """The recorded crashes of this run, and of earlier ones."""

    deaths: Deaths
    known: Mapping[str, OnRecord]

    def of_record(self, batch: PlannedBatch) -> OnRecord:
        return self.known.get(batch.batch_id, OnRecord())

    def times_in_hand(self, batch: PlannedBatch) -> int:
        return self.deaths.interrupted[batch.batch_id] + self.of_record(batch).in_hand

    def parts(self, batch: PlannedBatch) -> int:
        """Returns into how many parts a batch is to be split; 1: not at all."""
        if batch.size == 1:
            return 1
        enough = SUSPECT + 1 if batch.part is None else 1
        if self.deaths.of(batch) >= enough:
            return 2
        portion = self.of_record(batch).portion
        if batch.part is not None or portion is None:
            return 1
        return min(MOST_PARTS, -(-batch.size // portion))

    def is_poison(self, batch: PlannedBatch, max_crashes: int, proven: bool) -> bool:
        """Returns whether a batch is a single message that has killed often enough."""
        if batch.size > 1:
            return False
        before = self.of_record(batch).alone
        if before > max_crashes:  # in as many earlier runs
            return True
        here = self.deaths.interrupted_alone[batch.batch_id]
        alone = self.deaths.alone[batch.batch_id]
        return proven and (alone >= max_crashes or here + before > max_crashes)

    def unsuspected(self, undecided: Iterable[PlannedBatch]) -> Iterable[PlannedBatch]:
        """Yields the whole batches that need not wait for the others.

        A batch behind a suspect of its partition waits: with ``partition_by`` order matters.
        """
        blocked: set[int] = set()
        for batch in undecided:
            waits = self.deaths.of(batch) >= SUSPECT or self.of_record(batch).in_hand > 0
            if batch.part is not None or waits:
                if batch.partition is not None:
                    blocked.add(batch.partition)
            elif batch.partition is None or batch.partition not in blocked:
                yield batch
