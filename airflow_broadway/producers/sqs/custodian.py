"""The half that renews and settles, from any process: knows the lease, and the book of receipts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from airflow_broadway.core.custody.protocol import Action, Entry, Lease, Settlement, SettleReport
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kit.state_files import day_of
from airflow_broadway.producers.sqs.batch_requests import BatchRequests
from airflow_broadway.producers.sqs.client import Queue, open_queue
from airflow_broadway.producers.sqs.limits import LONGEST_VISIBILITY
from airflow_broadway.producers.sqs.receipts import COUNTED, Receipts, ReceiptsFolder, report_of
from airflow_broadway.producers.sqs.settlement import Plan, QueueSettlement, plan

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.sqs.producer import SqsProducer

__all__ = ["SqsCustodian"]

log = logging.getLogger(__name__)

#: A message is renewed once no more than this part of its lease is left: twice a lease, and with
#: at least one more look to come should it fail.
RENEW_AT: Final = 0.6
#: Seconds before SQS holds no longer from which on that is told at the latest.
_LATE: Final = 3600.0


class SqsCustodian:
    """Renews and settles the generations of one queue."""

    def __init__(self, producer: SqsProducer, env: ProducerEnv) -> None:
        self._producer = producer
        self._env = env
        self._clock = env.clock
        self._shelf = ReceiptsFolder(env.staging, producer.place)
        self._bulk = BatchRequests(producer.receive_concurrency, env.clock)
        self._opened: Queue | None = None
        self._books: dict[str, Receipts] = {}
        self._told: set[str] = set()

    # -- holding -------------------------------------------------------------------------------

    def renew(self, lease: Lease) -> Lease | None:
        now = self._clock.now().timestamp()
        horizon = now + RENEW_AT * lease.seconds
        if lease.deadline.timestamp() > horizon and not self._shelf.is_open(lease.generation):
            # Not yet due, so its receipts need not be read: a sensor looks far more often.
            return None if self._shelf.ended(lease.generation) else lease
        book = self._book(lease)
        if book.ended():
            return None
        until = self._until(lease, book)
        if now >= until:
            return None
        if not book.receipts:
            return lease
        last = (book.since or now) + LONGEST_VISIBILITY
        seconds = min(self._producer.visibility, int(last - now) - 1)
        due = book.due(horizon)
        if due and now + seconds > until + 1:
            self._foretell(lease, last, now)
            self._renew(book, due, seconds)
            book.renewed(horizon, now + seconds)
            if not book.held() and not book.now:
                return None
        return replace(lease, deadline=_instant(self._until(lease, book)))

    def _renew(self, book: Receipts, due: list[str], seconds: int) -> None:
        refused = self._bulk.send(
            self._queue.change,
            (
                (each, {"ReceiptHandle": book.receipts[each], "VisibilityTimeout": seconds})
                for each in due
            ),
        )
        gone = [key for key, refusal in refused.items() if refusal.gone]
        if gone:
            log.error(
                "SQS holds %d of %d messages no longer for this run: they are delivered again,"
                " marked as redelivered",
                len(gone),
                len(due),
            )
            book.lose(gone)
        others = {refusal.text for refusal in refused.values() if not refusal.gone}
        if others:
            raise ProducerError("; ".join(sorted(others)))

    def _foretell(self, lease: Lease, last: float, now: float) -> None:
        """Say ahead of time when SQS will renew no more."""
        left = last - now
        if left < max(2 * lease.seconds, _LATE) and lease.generation not in self._told:
            self._told.add(lease.generation)
            log.warning(
                "SQS holds a message for 12 hours from its receipt at most: what generation %s"
                " holds lapses at %s, in %.0f minutes, and cannot be renewed beyond that",
                lease.generation,
                _instant(last).isoformat(timespec="seconds"),
                left / 60,
            )

    def holds(self, lease: Lease) -> bool:
        book = self._book(lease)
        return not book.ended() and self._clock.now().timestamp() < self._until(lease, book)

    # -- settling ------------------------------------------------------------------------------

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        book = self._book(lease, fresh=True)
        if book.report is not None:
            return book.report
        report = self._settle(lease, book, settlement) + _beyond(book, settlement)
        if book.receipts or settlement.expected != 0:
            return book.end(report, day_of(self._clock.now()))
        return report

    def _settle(self, lease: Lease, book: Receipts, settlement: Settlement) -> SettleReport:
        planned = plan(book, lease, settlement)
        lapsed = SettleReport(lapsed=planned.lapsed, errors=planned.errors)
        if not book.receipts:
            # It never received, or somebody else's process did and wrote nothing down.
            return lapsed
        if self._clock.now().timestamp() >= self._until(lease, book):
            return lapsed + report_of(
                Counter(book.done.values()),
                lapsed=len(planned.verdicts) - len(book.done),
                errors=self._why_lapsed(book),
            )
        settling = self._settling(lease, book)
        book.begin()
        done = settling.carry_out(planned, note=True)
        report = settling.report(done.values()) + lapsed
        return report + SettleReport(errors=self._nearly_lapsed(book))

    def _nearly_lapsed(self, book: Receipts) -> tuple[str, ...]:
        """Tell in the report too that there was little time left: the next run may have none."""
        now = self._clock.now().timestamp()
        left = (book.since or now) + LONGEST_VISIBILITY - now
        if left >= _LATE:
            return ()
        told = (
            f"settled {left / 60:.0f} minutes before SQS's limit of 12 hours from receipt: what is"
            " held longer lapses; bound a run by max_messages or max_seconds"
        )
        return (told,)

    def _why_lapsed(self, book: Receipts) -> tuple[str, ...]:
        now = self._clock.now().timestamp()
        if book.since is not None and now >= book.since + LONGEST_VISIBILITY - 2:
            return ("the lease had reached SQS's limit of 12 hours from receipt",)
        return ()

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        book = self._book(lease)
        given = {entry.message_id: entry for entry in entries}
        if not given:
            return SettleReport()
        if book.ended() or self._clock.now().timestamp() >= self._until(lease, book):
            return SettleReport(lapsed=len(given), undone=frozenset(given))
        before = {key: book.now[key] for key in given if key in book.now}
        verdicts = {
            key: entry.verdict
            for key, entry in given.items()
            if key not in book.now and key in book.receipts and key not in book.lost
        }
        lapsed = len(given) - len(before) - len(verdicts)
        settling = self._settling(lease, book)
        try:
            settling.carry_out(Plan(verdicts, given), note=False)
        finally:
            book.note_now(settling.done)
        done = settling.done | before
        undone = frozenset(given.keys() - done.keys())
        return settling.report(done.values()) + SettleReport(lapsed=lapsed, undone=undone)

    def close(self) -> None:
        self._bulk.close()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # -- what is known -------------------------------------------------------------------------

    def _book(self, lease: Lease, *, fresh: bool = False) -> Receipts:
        here = self._producer.place
        if lease.kind != self._producer.kind or lease.state.get("queue", here) != here:
            raise ProducerError(
                f"the lease of generation {lease.generation!r} is of {lease.kind} queue"
                f" {lease.state.get('queue')!r}, and this producer's is {self._producer.kind} queue"
                f" {here!r}: give both halves of the run the same options"
            )
        book = self._books.get(lease.generation)
        if book is None or fresh:
            book = self._books[lease.generation] = self._shelf.book(lease.generation)
        return book

    @staticmethod
    def _until(lease: Lease, book: Receipts) -> float:
        """Until when all of it is held, by whichever note is the latest."""
        deadline = lease.deadline.timestamp()
        held = book.until
        return deadline if held is None else max(deadline, held)

    def _until_by_now(self, lease: Lease, book: Receipts) -> float:
        book.refresh()
        return self._until(lease, book)

    def _settling(self, lease: Lease, book: Receipts) -> QueueSettlement:
        return QueueSettlement(
            self._producer,
            self._queue,
            self._shelf,
            self._bulk,
            book,
            self._clock,
            held_until=lambda: self._until_by_now(lease, book),
        )

    @property
    def _queue(self) -> Queue:
        if self._opened is None:
            self._opened = open_queue(self._producer, self._env)
        return self._opened


def _beyond(book: Receipts, settlement: Settlement) -> SettleReport:
    """What callbacks settled at once beyond what their caller could still say."""
    if settlement.settled_now is None or not book.now:
        return SettleReport()
    counted = Counter(book.now.values())
    more: dict[Action, int] = {
        action: count - getattr(settlement.settled_now, COUNTED[action])
        for action, count in counted.items()
    }
    return report_of({action: count for action, count in more.items() if count > 0})


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)
