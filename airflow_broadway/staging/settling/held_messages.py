"""Combines manifest, plans, outcomes and entries of one generation's messages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import DeadLettered, Entry
from airflow_broadway.core.custody.report import CLASS_OF, SettleReport
from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict
from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats.entries import EntryLine, entry_of_row
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.text import pluralize
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.settling.journal import Progress

log = logging.getLogger(__name__)


class _Exceptions(NamedTuple):
    """The exceptions of one batch.

    :param path: Their location: an entry file, or the outcome itself.
    :param source: The index of the generation in the plan.
    :param shared: Whether the batch also has messages of other generations.
    """

    outcome: Outcome
    path: str
    source: int
    shared: bool


class _Decided(NamedTuple):
    """The batches of one plan with messages of the generation and with an outcome.

    :param source: The index of the generation in the plan.
    """

    plan: BatchPlan
    source: int
    batches: list[PlannedBatch]


class HeldMessages:
    """The messages of one published generation with their recorded outcomes.

    Memory holds at most the ids of exceptions.

    :param plans: The plans that decide about the generation, at most one per batcher.
    :param batches: The batches whose outcomes count; default: all that have one.
    :raises StagingDamaged: If a file with verdicts is damaged, or counts do not agree.
    """

    def __init__(
        self,
        recorded: Recorded,
        manifest: Manifest,
        producer: Producer,
        plans: list[BatchPlan],
        batches: Collection[str] | None = None,
    ) -> None:
        self._recorded = recorded
        self._run = recorded.run
        self._manifest = manifest
        self._producer = producer
        self._counted = batches
        #: Whether every success without an entry is simply acked.
        self.plain = producer.actions[producer.on_success] is Action.ACK and not manifest.configured
        self._exceptions: list[_Exceptions] = []
        #: The batches with an outcome.
        self._decided: list[_Decided] = []
        by_batcher = {
            plan.batcher: plan for plan in plans if manifest.generation in plan.generations
        }
        self.progress = Progress(
            received=manifest.received,
            staged=sum(manifest.batchers.values()),
            unplanned=tuple(
                name
                for name, count in manifest.batchers.items()
                if count and name not in by_batcher
            ),
        )
        for plan in sorted(by_batcher.values(), key=lambda plan: plan.path):
            self._read(plan)
        self._verify()
        in_processors = SettleReport.from_json(manifest.settled_now)
        self.progress.settled_now = in_processors + self._settled_in_batches()

    def _verify(self) -> None:
        """Reads each entry file once before any verdict in it is executed.

        A lost line would turn a failure into an ack.

        :raises StagingDamaged: If a file is damaged, or the number of received messages is not the
            sum of staged messages and lines.
        """
        manifest, recorded = self._manifest, self._recorded
        sums = {path: manifest.sums.get(path) for path in manifest.entries}
        recorded.keep(
            {**sums, **{file.path: file.outcome.entries_sum for file in self._exceptions}}
        )
        lines = sum(recorded.verify(path, total) for path, total in sums.items())
        for file in self._exceptions:
            recorded.verify(file.path, file.outcome.entries_sum)
        staged = self.progress.staged
        if staged + lines != manifest.received:
            raise StagingDamaged(
                f"generation {manifest.generation} received"
                f" {pluralize(manifest.received, 'message')}, but has {staged} staged ones and"
                f" {pluralize(lines, 'line')} of entries"
            )

    def _read(self, plan: BatchPlan) -> None:
        """Collects the batches of a plan that have an outcome."""
        self._run.store.check_root(plan.root_id, plan.host)
        generation, progress = self._manifest.generation, self.progress
        source = plan.generations.index(generation)
        decided = _Decided(plan, source, [])
        for planned, outcome in self._recorded.outcomes(plan):
            if not planned.sources.get(generation, 0):
                continue
            progress.batches += 1
            if outcome is None:
                continue
            if self._counted is not None and planned.batch_id not in self._counted:
                continue
            decided.batches.append(planned)
            if outcome.exceptions is not None:
                shared = len(planned.sources) > 1
                self._exceptions.append(_Exceptions(outcome, outcome.exceptions, source, shared))
        progress.recorded += len(decided.batches)
        progress.decided += sum(batch.sources[generation] for batch in decided.batches)
        self._decided.append(decided)

    # -- exceptions ----------------------------------------------------------------------------

    def _process_entries(self) -> Iterator[EntryLine]:
        """Yields the entries of the process task."""
        for path in self._manifest.entries:
            yield from self._recorded.entries(path, self._manifest.sums.get(path))

    def _batch_entries(self, batchers: Collection[str] | None = None) -> Iterator[EntryLine]:
        """Yields the entries of batches, of this generation only; see :meth:`_batch_lines`."""
        return (line for _, line in self._batch_lines(batchers))

    def _batch_lines(
        self, batchers: Collection[str] | None = None
    ) -> Iterator[tuple[_Exceptions, EntryLine]]:
        """Yields the entries of batches with their location, of this generation only.

        :param batchers: Default: all.
        :raises StagingDamaged: If an entry of a batch of several generations does not name its own.
        """
        for exceptions in self._exceptions:
            outcome = exceptions.outcome
            if batchers is not None and outcome.batcher not in batchers:
                continue
            for line in self._recorded.entries(exceptions.path, outcome.entries_sum):
                if line.source is None and exceptions.shared:
                    raise StagingDamaged(
                        f"{exceptions.path} is damaged: the entry of message"
                        f" {line.entry.message_id!r} names no generation"
                    )
                if line.source in (None, exceptions.source):
                    yield exceptions, line

    def _settled_in_batches(self) -> SettleReport:
        counts: Counter[str] = Counter()
        for line in self._batch_entries():
            if line.settled:
                counts[CLASS_OF[line.entry.verdict.action]] += 1
        return SettleReport.from_json(dict(counts))

    # -- streams -------------------------------------------------------------------------------

    def entries(self, *, all_rows: bool) -> Iterator[Entry]:
        """Yields the messages with explicit verdicts.

        :param all_rows: Whether to include successes of batches with an outcome; the rest are then
            only messages without an outcome.
        """
        for line in self._process_entries():
            if not line.settled:
                yield line.entry
        yield from self.entries_of_batches(all_rows=all_rows)

    def entries_of_batches(
        self, batchers: Collection[str] | None = None, *, all_rows: bool = True
    ) -> Iterator[Entry]:
        """Yields the messages of batches with explicit verdicts; see :meth:`entries`.

        :param batchers: Default: all.
        """
        exceptions: set[str] = set()
        for line in self._batch_entries(batchers):
            if all_rows:
                exceptions.add(line.entry.message_id)
            if not line.settled:
                yield line.entry
        if all_rows:
            for decided in self._decided:
                if batchers is None or decided.plan.batcher in batchers:
                    yield from (entry for _, entry in self._successes(decided, exceptions))

    @property
    def batches(self) -> tuple[str, ...]:
        """The ids of the batches whose outcomes count."""
        return tuple(b.batch_id for decided in self._decided for b in decided.batches)

    def dead_letters(self, batchers: Collection[str] | None = None) -> Iterator[DeadLettered]:
        """Yields the messages that are dead-lettered.

        :param batchers: Only messages in their batches; default: all messages.
        """
        is_dead_letter = self._producer.is_dead_letter
        for line in self._process_entries() if batchers is None else ():
            if is_dead_letter(line.entry.verdict):
                yield line.entry, "", ""
        exceptions: set[str] = set()
        for file, line in self._batch_lines(batchers):
            exceptions.add(line.entry.message_id)
            if is_dead_letter(line.entry.verdict):
                yield line.entry, file.outcome.batcher, file.outcome.batch_id
        for decided in () if self.plain else self._decided:
            if batchers is None or decided.plan.batcher in batchers:
                for batch_id, entry in self._successes(decided, exceptions):
                    if is_dead_letter(entry.verdict):
                        yield entry, decided.plan.batcher, batch_id

    def everything(self, rest: Verdict) -> Iterator[Entry]:
        """Yields all messages that were not settled immediately.

        :param rest: The verdict for messages staged for batchers.
        """
        for line in self._process_entries():
            if not line.settled:
                yield line.entry
        settled = {line.entry.message_id for line in self._batch_entries() if line.settled}
        columns = ["message_id", "_receipt", "attempt", "_acked", *self._payload_columns()]
        for row in self._rows(columns):
            if not row["_acked"] and row["message_id"] not in settled:
                yield entry_of_row(row, rest)

    def _payload_columns(self) -> list[str]:
        return ["_payload", "_properties"] if self._producer.keeps_payload else []

    def _rows(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Yields the staged messages of the generation, in order of file.

        :raises StagingDamaged: If a file is missing, or their number differs from the manifest.
        """
        from airflow_broadway.staging.batch_reader import open_staged  # loads pyarrow

        for batcher, files in self._manifest.files.items():
            count = 0
            for path in files:
                with open_staged(self._run, path) as file:
                    for group in range(file.groups):
                        rows = file.read(group, columns).to_pylist()
                        count += len(rows)
                        yield from rows
            expected = self._manifest.batchers[batcher]
            if count != expected:
                raise StagingDamaged(
                    f"{pluralize(expected, 'message')} staged for the batcher {batcher!r}, but its"
                    f" files of generation {self._manifest.generation} hold {count}"
                )

    def _successes(self, decided: _Decided, exceptions: set[str]) -> Iterator[tuple[str, Entry]]:
        """Yields the messages of decided batches without an entry, each with its batch's id."""
        producer = self._producer
        columns = ["message_id", "attempt", "redelivered", "_receipt", "_on_success", "_acked"]
        for batch_id, row in self._rows_in(decided, [*columns, *self._payload_columns()]):
            if row["_acked"] or row["message_id"] in exceptions:
                continue
            facts = Facts(
                row["_on_success"] or producer.on_success,
                row["attempt"],
                row["redelivered"],
                stage="batch",
                message_id=row["message_id"],
            )
            yield batch_id, entry_of_row(row, producer.judge(facts))

    def _rows_in(
        self, decided: _Decided, columns: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the rows of the generation in batches, each with its batch's id.

        :raises StagingDamaged: At the end, if their number differs from the plan.
        """
        from airflow_broadway.staging.batch_reader import rows_of  # loads pyarrow

        plan, generation = decided.plan, self._manifest.generation
        columns = ["batch", "source", "position", *columns]
        count = 0
        for batch, row in rows_of(self._run, plan, decided.batches, columns):
            if row["source"] == decided.source:
                count += 1
                yield batch.batch_id, row
        expected = sum(batch.sources[generation] for batch in decided.batches)
        if count != expected:
            raise StagingDamaged(
                f"batches of {plan.path} hold {pluralize(expected, 'message')} of generation"
                f" {generation}, but its files hold {count}"
            )
