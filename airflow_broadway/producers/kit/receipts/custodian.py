"""The half that renews and settles, from any process: knows the lease, reads the receipts."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.collector import rare_collections
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.kit.receipts.batch_requests import BatchRequests, Call
from airflow_broadway.producers.kit.receipts.receipts import Receipts, ReceiptsFolder
from airflow_broadway.producers.kit.receipts.settlement import (
    ReceiptSettlement,
    Work,
    work_of,
)
from airflow_broadway.producers.kit.reports import beyond, report_of
from airflow_broadway.producers.kit.state_files import day_of, instant_of

__all__ = ["ReceiptCustodian"]

log = logging.getLogger(__name__)

#: A message is renewed when so much of its lease is left: about twice a lease, and early enough
#: for another look, should one fail.
RENEW_AT: Final = 0.6
#: Seconds before the broker holds no longer: from then on, at the latest, that is logged and
#: reported.
_WARNING_SECONDS: Final = 3600.0


class ReceiptCustodian(ABC):
    """Renews and settles the generations of one queue.

    :param place: The queue as the producer's options name it.
    """

    #: The broker's name, for people.
    service: ClassVar[str]
    #: Seconds for which the broker holds a message in all, from its receipt; ``None``: for ever.
    limit: ClassVar[int | None] = None
    #: Whether the broker ends a group's messages in order only: an acknowledgement counts once all
    #: before it are acknowledged, and otherwise the message comes again.
    ends_in_order: ClassVar[bool] = False

    def __init__(
        self,
        producer: Producer,
        place: str,
        folder: ReceiptsFolder,
        requests: BatchRequests,
        clock: Clock,
    ) -> None:
        self._kind, self._place = producer.kind, place
        self._seconds = math.ceil(producer.lease)
        self._folder = folder
        self._requests = requests
        self._clock = clock
        self._known: dict[str, Receipts] = {}
        self._warned: set[str] = set()

    # -- what each broker does -----------------------------------------------------------------

    @abstractmethod
    def _renew_call(self) -> Call:
        """One request that renews; its entries are those of `_renewed`."""

    @abstractmethod
    def _renewed(self, receipt: str, seconds: int) -> Any:
        """An entry that holds a message for so long from now on."""

    @abstractmethod
    def _settlement(
        self, receipts: Receipts, *, held_until: Callable[[], float]
    ) -> ReceiptSettlement:
        """Carries verdicts out."""

    def _note_again(self, ids: Iterable[str]) -> None:  # noqa: B027 (most brokers tell it)
        """Write down that these messages were handed out, and come again."""

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
        seconds = self._seconds
        last = self._last(receipts, now)
        if last is not None:
            seconds = min(seconds, int(last - now) - 1)
        due = receipts.due(horizon)
        if due and now + seconds > until + 1:
            self._warn_of_limit(lease, last, now)
            self._renew(receipts, due, seconds)
            after = self._clock.now().timestamp()
            if after >= until and after >= self._until_by_now(lease, receipts):
                return None  # an outage outlasted it: the broker may take that without a word
            receipts.renewed(horizon, now + seconds)
            if not receipts.held() and not receipts.now:
                return None
        return replace(lease, deadline=instant_of(self._until(lease, receipts)))

    def _renew(self, receipts: Receipts, due: list[str], seconds: int) -> None:
        refused = self._requests.send(
            self._renew_call(),
            ((key, self._renewed(receipts.handles[key], seconds)) for key in due),
        )
        gone = [key for key, refusal in refused.items() if refusal.gone]
        if gone:
            log.error(
                "%s holds %d of %s no longer for this run: they are delivered again, marked as"
                " redelivered",
                self.service,
                len(gone),
                many(len(due), "message"),
            )
            self._note_again(gone)
            receipts.lose(gone)
        others = {refusal.text for refusal in refused.values() if not refusal.gone}
        if others:
            raise ProducerError("; ".join(sorted(others)))

    def holds(self, lease: Lease) -> bool:
        receipts = self._receipts_of(lease)
        return not receipts.ended() and self._clock.now().timestamp() < self._until(lease, receipts)

    # -- the broker's limit --------------------------------------------------------------------

    def _last(self, receipts: Receipts, now: float) -> float | None:
        """When the broker holds no longer what was received first; ``None``: never."""
        return None if self.limit is None else (receipts.since or now) + self.limit

    def _warn_of_limit(self, lease: Lease, last: float | None, now: float) -> None:
        """Say ahead of time when the broker will renew no more."""
        if last is None or self.limit is None or lease.generation in self._warned:
            return
        if last - now < max(2 * lease.seconds, _WARNING_SECONDS):
            self._warned.add(lease.generation)
            log.warning(
                "%s holds a message for %g hours from its receipt at most: what generation %s"
                " holds lapses at %s, in %.0f minutes, and cannot be renewed beyond that",
                self.service,
                self.limit / 3600,
                lease.generation,
                instant_of(last).isoformat(timespec="seconds"),
                (last - now) / 60,
            )

    def _nearly_lapsed(self, receipts: Receipts) -> tuple[str, ...]:
        """Report, too, that there was little time left: the next run may have none."""
        now = self._clock.now().timestamp()
        last = self._last(receipts, now)
        if last is None or self.limit is None or last - now >= _WARNING_SECONDS:
            return ()
        warning = (
            f"settled {(last - now) / 60:.0f} minutes before {self.service}'s limit of"
            f" {self.limit / 3600:g} hours from receipt: what is held longer lapses; bound a run by"
            " max_messages or max_seconds"
        )
        return (warning,)

    def _why_lapsed(self, receipts: Receipts) -> tuple[str, ...]:
        if receipts.since is None or self.limit is None:
            return ()
        if self._clock.now().timestamp() < receipts.since + self.limit - 2:
            return ()
        limit = f"{self.service}'s limit of {self.limit / 3600:g} hours from receipt"
        return (f"the lease had reached {limit}",)

    # -- settling ------------------------------------------------------------------------------

    @rare_collections()
    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        receipts = self._receipts_of(lease, fresh=True)
        if receipts.report is not None:
            receipts.keep_report(day_of(self._clock.now()))
            return receipts.report
        if receipts.handles:
            receipts.begin()
        report, done = self._settle(lease, receipts, settlement)
        report += beyond(report_of(receipts.now.values()), settlement)
        whole = not report.lapsed and not report.failed
        again = ComingAgain.of({**receipts.now, **done}, whole=whole)
        report = replace(report, again=again)
        if receipts.handles or settlement.expected != 0:
            return receipts.end(report, day_of(self._clock.now()))
        return report

    def _settle(
        self, lease: Lease, receipts: Receipts, settlement: Settlement
    ) -> tuple[SettleReport, Mapping[str, Action]]:
        """The report, and what was done with each message that was not settled at once."""
        work = work_of(receipts, lease, settlement)
        lapsed = SettleReport(lapsed=work.lapsed, errors=work.errors)
        if not receipts.handles:
            # It never received, or somebody else's process did and wrote nothing down.
            return lapsed, {}
        if self._clock.now().timestamp() >= self._until(lease, receipts):
            self._note_again(work.verdicts)
            report = report_of(
                receipts.done.values(),
                lapsed=len(work.verdicts) - len(receipts.done),
                errors=self._why_lapsed(receipts),
            )
            return lapsed + report, receipts.done
        settling = self._settling(lease, receipts)
        done = settling.carry_out(work, note=True)
        report = settling.report(done.values()) + lapsed
        return report + SettleReport(errors=self._nearly_lapsed(receipts)), done

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        receipts = self._receipts_of(lease)
        given = {entry.message_id: entry for entry in entries}
        if not given:
            return SettleReport()
        if receipts.ended() or self._clock.now().timestamp() >= self._until(lease, receipts):
            return SettleReport(lapsed=len(given), undone=frozenset(given))
        before = {key: receipts.now[key] for key in given if key in receipts.now}
        # Of a group what comes again holds back those behind it, so by arrival.
        ordered = (key for key in receipts.handles if key in given) if receipts.groups else given
        gone = receipts.now.keys() | receipts.lost
        verdicts = {
            key: given[key].verdict
            for key in ordered
            if key in receipts.handles and key not in gone
        }
        lapsed = len(given) - len(before) - len(verdicts)
        early = self._too_early(receipts, verdicts)
        for key in early:
            del verdicts[key]
        settling = self._settling(lease, receipts)
        try:
            settling.carry_out(Work(verdicts, given), note=False)
        finally:
            receipts.note_now(settling.done)
        done = settling.done | before
        undone = frozenset(given.keys() - done.keys())
        rest = SettleReport(lapsed=lapsed, failed=len(early), undone=undone)
        return settling.report(done.values()) + rest

    def _too_early(self, receipts: Receipts, verdicts: Mapping[str, Verdict]) -> list[str]:
        """Those that are done with before an earlier one of their group has a verdict."""
        if not self.ends_in_order or not receipts.groups:
            return []
        early: list[str] = []
        open_ones: set[str] = set()
        for key in receipts.held():
            group = receipts.groups.get(key)
            if group is None:
                continue
            if key not in verdicts:
                open_ones.add(group)
            elif group in open_ones and verdicts[key].action not in COMES_AGAIN:
                early.append(key)
        return early

    def close(self) -> None:
        self._requests.close()

    # -- what is known -------------------------------------------------------------------------

    def _receipts_of(self, lease: Lease, *, fresh: bool = False) -> Receipts:
        check_lease(lease, self._kind, self._place)
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

    def _settling(self, lease: Lease, receipts: Receipts) -> ReceiptSettlement:
        return self._settlement(receipts, held_until=lambda: self._until_by_now(lease, receipts))
