"""The half that renews and settles, from any process: knows the lease, reads the receipts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.kit.reports import beyond, report_of
from airflow_broadway.producers.kit.state_files import day_of
from airflow_broadway.producers.sqs.batch_requests import BatchRequests
from airflow_broadway.producers.sqs.client import Queue, open_queue
from airflow_broadway.producers.sqs.limits import LONGEST_VISIBILITY
from airflow_broadway.producers.sqs.receipts import Receipts, ReceiptsFolder
from airflow_broadway.producers.sqs.settlement import QueueSettlement, Work, work_of

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.sqs.options import SqsOptions

__all__ = ["SqsCustodian"]

log = logging.getLogger(__name__)

#: A message is renewed when so much of its lease is left: about twice a lease, and early enough
#: for another look, should one fail.
RENEW_AT: Final = 0.6
#: Seconds before SQS holds no longer: from then on, at the latest, that is logged and reported.
_WARNING_SECONDS: Final = 3600.0


class SqsCustodian:
    """Renews and settles the generations of one queue."""

    def __init__(self, producer: SqsOptions, env: ProducerEnv) -> None:
        self._producer = producer
        self._env = env
        self._clock = env.clock
        self._folder = ReceiptsFolder(env.staging, producer.place)
        self._requests = BatchRequests(producer.receive_concurrency, env.clock)
        self._opened: Queue | None = None
        self._known: dict[str, Receipts] = {}
        self._warned: set[str] = set()

    # -- holding -------------------------------------------------------------------------------

    def renew(self, lease: Lease) -> Lease | None:
        now = self._clock.now().timestamp()
        horizon = now + RENEW_AT * lease.seconds
        if lease.deadline.timestamp() > horizon and not self._folder.is_open(lease.generation):
            # Not yet due, so its receipts need not be read: a sensor looks far more often.
            return None if self._folder.ended(lease.generation) else lease
        receipts = self._receipts_of(lease)
        if receipts.ended():
            return None
        until = self._until(lease, receipts)
        if now >= until:
            return None
        if not receipts.handles:
            return lease
        last = (receipts.since or now) + LONGEST_VISIBILITY
        seconds = min(self._producer.visibility, int(last - now) - 1)
        due = receipts.due(horizon)
        if due and now + seconds > until + 1:
            self._warn_of_limit(lease, last, now)
            self._renew(receipts, due, seconds)
            receipts.renewed(horizon, now + seconds)
            if not receipts.held() and not receipts.now:
                return None
        return replace(lease, deadline=_instant(self._until(lease, receipts)))

    def _renew(self, receipts: Receipts, due: list[str], seconds: int) -> None:
        refused = self._requests.send(
            self._queue.change,
            (
                (each, {"ReceiptHandle": receipts.handles[each], "VisibilityTimeout": seconds})
                for each in due
            ),
        )
        gone = [key for key, refusal in refused.items() if refusal.gone]
        if gone:
            log.error(
                "SQS holds %d of %s no longer for this run: they are delivered again, marked as"
                " redelivered",
                len(gone),
                many(len(due), "message"),
            )
            receipts.lose(gone)
        others = {refusal.text for refusal in refused.values() if not refusal.gone}
        if others:
            raise ProducerError("; ".join(sorted(others)))

    def _warn_of_limit(self, lease: Lease, last: float, now: float) -> None:
        """Say ahead of time when SQS will renew no more."""
        left = last - now
        if left < max(2 * lease.seconds, _WARNING_SECONDS) and lease.generation not in self._warned:
            self._warned.add(lease.generation)
            log.warning(
                "SQS holds a message for 12 hours from its receipt at most: what generation %s"
                " holds lapses at %s, in %.0f minutes, and cannot be renewed beyond that",
                lease.generation,
                _instant(last).isoformat(timespec="seconds"),
                left / 60,
            )

    def holds(self, lease: Lease) -> bool:
        receipts = self._receipts_of(lease)
        return not receipts.ended() and self._clock.now().timestamp() < self._until(lease, receipts)

    # -- settling ------------------------------------------------------------------------------

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        receipts = self._receipts_of(lease, fresh=True)
        if receipts.report is not None:
            receipts.keep_report(day_of(self._clock.now()))
            return receipts.report
        report = self._settle(lease, receipts, settlement)
        report += beyond(report_of(receipts.now.values()), settlement)
        if receipts.handles or settlement.expected != 0:
            return receipts.end(report, day_of(self._clock.now()))
        return report

    def _settle(self, lease: Lease, receipts: Receipts, settlement: Settlement) -> SettleReport:
        work = work_of(receipts, lease, settlement)
        lapsed = SettleReport(lapsed=work.lapsed, errors=work.errors)
        if not receipts.handles:
            # It never received, or somebody else's process did and wrote nothing down.
            return lapsed
        if self._clock.now().timestamp() >= self._until(lease, receipts):
            return lapsed + report_of(
                receipts.done.values(),
                lapsed=len(work.verdicts) - len(receipts.done),
                errors=self._why_lapsed(receipts),
            )
        settling = self._settling(lease, receipts)
        receipts.begin()
        done = settling.carry_out(work, note=True)
        report = settling.report(done.values()) + lapsed
        return report + SettleReport(errors=self._nearly_lapsed(receipts))

    def _nearly_lapsed(self, receipts: Receipts) -> tuple[str, ...]:
        """Report, too, that there was little time left: the next run may have none."""
        now = self._clock.now().timestamp()
        left = (receipts.since or now) + LONGEST_VISIBILITY - now
        if left >= _WARNING_SECONDS:
            return ()
        warning = (
            f"settled {left / 60:.0f} minutes before SQS's limit of 12 hours from receipt: what is"
            " held longer lapses; bound a run by max_messages or max_seconds"
        )
        return (warning,)

    def _why_lapsed(self, receipts: Receipts) -> tuple[str, ...]:
        now = self._clock.now().timestamp()
        if receipts.since is not None and now >= receipts.since + LONGEST_VISIBILITY - 2:
            return ("the lease had reached SQS's limit of 12 hours from receipt",)
        return ()

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        receipts = self._receipts_of(lease)
        given = {entry.message_id: entry for entry in entries}
        if not given:
            return SettleReport()
        if receipts.ended() or self._clock.now().timestamp() >= self._until(lease, receipts):
            return SettleReport(lapsed=len(given), undone=frozenset(given))
        before = {key: receipts.now[key] for key in given if key in receipts.now}
        verdicts = {
            key: entry.verdict
            for key, entry in given.items()
            if key not in receipts.now and key in receipts.handles and key not in receipts.lost
        }
        lapsed = len(given) - len(before) - len(verdicts)
        settling = self._settling(lease, receipts)
        try:
            settling.carry_out(Work(verdicts, given), note=False)
        finally:
            receipts.note_now(settling.done)
        done = settling.done | before
        undone = frozenset(given.keys() - done.keys())
        return settling.report(done.values()) + SettleReport(lapsed=lapsed, undone=undone)

    def close(self) -> None:
        self._requests.close()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # -- what is known -------------------------------------------------------------------------

    def _receipts_of(self, lease: Lease, *, fresh: bool = False) -> Receipts:
        check_lease(lease, self._producer.kind, self._producer.place)
        receipts = self._known.get(lease.generation)
        if receipts is None or fresh:
            receipts = self._known[lease.generation] = self._folder.of(lease.generation)
        return receipts

    @staticmethod
    def _until(lease: Lease, receipts: Receipts) -> float:
        """Until when all of it is held, by whichever note is the latest."""
        deadline = lease.deadline.timestamp()
        held = receipts.until
        return deadline if held is None else max(deadline, held)

    def _until_by_now(self, lease: Lease, receipts: Receipts) -> float:
        receipts.refresh()
        return self._until(lease, receipts)

    def _settling(self, lease: Lease, receipts: Receipts) -> QueueSettlement:
        return QueueSettlement(
            self._producer,
            self._queue,
            self._folder,
            self._requests,
            receipts,
            self._clock,
            held_until=lambda: self._until_by_now(lease, receipts),
        )

    @property
    def _queue(self) -> Queue:
        if self._opened is None:
            self._opened = open_queue(self._producer, self._env)
        return self._opened


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)
