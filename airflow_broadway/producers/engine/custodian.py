"""Extends and settles leases by their recorded receipts; usable from any process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from airflow_broadway.core.collector import rare_collections
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import pluralize
from airflow_broadway.producers.engine.port import Broker, Hidden
from airflow_broadway.producers.engine.receipts import Receipts, ReceiptsFolder
from airflow_broadway.producers.engine.requests import BatchRequests
from airflow_broadway.producers.engine.settlement import EngineSettlement, plan_for
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.kit.reports import beyond, report_of
from airflow_broadway.producers.kit.state_files import day_of, timestamp_of

log = logging.getLogger(__name__)

#: The remaining fraction of a lease below which a message is extended: about twice per lease, and
#: early enough for a second attempt after a failure.
RENEW_AT: Final = 0.6
#: Seconds before the broker's holding limit from which the limit is logged and reported.
_WARNING_SECONDS: Final = 3600.0


class EngineCustodian:
    """Extends and settles the generations of one queue; usable from any process."""

    def __init__(self, broker: Broker[Any]) -> None:
        self._broker, self._clock = broker, broker.clock
        self._folder = ReceiptsFolder(broker)
        self._requests = BatchRequests(broker)
        self._known: dict[str, Receipts] = {}
        self._warned: set[str] = set()

    # -- holding -------------------------------------------------------------------------------

    def renew(self, lease: Lease) -> Lease | None:
        now = self._now()
        horizon = now + RENEW_AT * lease.seconds
        if lease.deadline.timestamp() > horizon and not self._folder.is_open(lease.generation):
            # Not due: the receipts need not be read.  A sensor calls this far more often.
            return None if self._folder.ended(lease.generation) else lease
        receipts = self._receipts_of(lease)
        if receipts.ended():
            return None
        until = self._until(lease, receipts)
        if now >= until:
            return None
        if not receipts.handles:
            return lease
        seconds = self._broker.seconds
        last = self._last(receipts)
        if last is not None:
            seconds = min(seconds, int(last - now) - 1)
        due = receipts.due(horizon)
        if due and now + seconds > until + 1:
            self._warn_of_limit(lease, last)
            self._extend(receipts, due, seconds)
            after = self._now()
            if after >= until and after >= self._until_by_now(lease, receipts):
                return None  # an outage outlasted it; the broker may have accepted old receipts
            receipts.renewed(horizon, now + seconds)
            if not receipts.held() and not receipts.now:
                return None
        return replace(lease, deadline=timestamp_of(self._until(lease, receipts)))

    def _extend(self, receipts: Receipts, due: list[str], seconds: int) -> None:
        entries = ((key, Hidden(receipts.handles[key], seconds)) for key in due)
        refused = self._requests.send(self._broker.client.hide, entries)
        invalid = [key for key, refusal in refused.items() if refusal.invalid]
        if invalid:
            log.error(
                "%s holds %d of %s no longer for this run: they are delivered again, marked as"
                " redelivered",
                self._broker.service,
                len(invalid),
                pluralize(len(due), "message"),
            )
            self._note_delivered(invalid)
            receipts.lose(invalid)
        errors = {refusal.text for refusal in refused.values() if not refusal.invalid}
        if errors:
            raise ProducerError("; ".join(sorted(errors)))

    def holds(self, lease: Lease) -> bool:
        receipts = self._receipts_of(lease)
        return not receipts.ended() and self._now() < self._until(lease, receipts)

    def _note_delivered(self, ids: Iterable[str]) -> None:
        """Records deliveries of messages to be redelivered, if the broker does not count them."""
        if not self._broker.native_attempts:
            self._folder.failures.note(dict.fromkeys(ids, 0), self._clock.now())

    # -- the broker's limit --------------------------------------------------------------------

    def _last(self, receipts: Receipts) -> float | None:
        """Returns the timestamp of the first message's holding limit; ``None``: no limit."""
        limit = self._broker.max_hold
        return None if limit is None else (receipts.since or self._now()) + limit

    def _limit(self) -> str:
        return f"{(self._broker.max_hold or 0) / 3600:g} hours from receipt"

    def _warn_of_limit(self, lease: Lease, last: float | None) -> None:
        """Warns ahead of the broker's holding limit."""
        if last is None or lease.generation in self._warned:
            return
        left = last - self._now()
        if left < max(2 * lease.seconds, _WARNING_SECONDS):
            self._warned.add(lease.generation)
            log.warning(
                "%s holds a message for %g hours from its receipt at most: what generation %s"
                " holds lapses at %s, in %.0f minutes, and cannot be renewed beyond that",
                self._broker.service,
                (self._broker.max_hold or 0) / 3600,
                lease.generation,
                timestamp_of(last).isoformat(timespec="seconds"),
                left / 60,
            )

    def _nearly_lapsed(self, receipts: Receipts) -> tuple[str, ...]:
        """Returns a warning if the settlement was close to the broker's holding limit."""
        last = self._last(receipts)
        if last is None or last - self._now() >= _WARNING_SECONDS:
            return ()
        warning = (
            f"settled {(last - self._now()) / 60:.0f} minutes before {self._broker.service}'s limit"
            f" of {self._limit()}: what is held longer lapses; bound a run by max_messages or"
            " max_seconds"
        )
        return (warning,)

    def _why_lapsed(self, receipts: Receipts) -> tuple[str, ...]:
        last = self._last(receipts)
        if receipts.since is None or last is None or self._now() < last - 2:
            return ()
        return (f"the lease had reached {self._broker.service}'s limit of {self._limit()}",)

    # -- settling ------------------------------------------------------------------------------

    @rare_collections()
    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        receipts = self._receipts_of(lease, fresh=True)
        today = day_of(self._clock.now())
        if receipts.report is not None:
            receipts.keep_report(today)
            return receipts.report
        if receipts.handles:
            receipts.begin()
        report, done = self._settle(lease, receipts, settlement)
        report += beyond(report_of(receipts.now.values()), settlement)
        whole = not report.lapsed and not report.failed
        again = ComingAgain.of({**receipts.now, **done}, whole=whole)
        report = replace(report, again=again)
        if receipts.handles or settlement.expected != 0:
            return receipts.end(report, today)
        return report

    def _settle(
        self, lease: Lease, receipts: Receipts, settlement: Settlement
    ) -> tuple[SettleReport, Mapping[str, Action]]:
        """Returns the report, and the action of each message that was not settled immediately."""
        plan, lapsed = plan_for(receipts, lease, settlement)
        if not receipts.handles:
            # Nothing was received, or nothing was recorded.
            return lapsed, {}
        if self._now() >= self._until(lease, receipts):
            self._note_delivered(plan.verdicts)
            report = report_of(
                receipts.done.values(),
                lapsed=len(plan.verdicts) - len(receipts.done),
                errors=self._why_lapsed(receipts),
            )
            return lapsed + report, receipts.done
        settling = self._settling(lease, receipts)
        done = settling.carry_out(plan.verdicts, plan.entries, note=True)
        report = settling.report(done.values()) + lapsed
        return report + SettleReport(errors=self._nearly_lapsed(receipts)), done

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        receipts = self._receipts_of(lease)
        requested = {entry.message_id: entry for entry in entries}
        if not requested:
            return SettleReport()
        if receipts.ended() or self._now() >= self._until(lease, receipts):
            return SettleReport(lapsed=len(requested), undone=frozenset(requested))
        before = {key: receipts.now[key] for key in requested if key in receipts.now}
        # A redelivered message blocks later ones of its group, so the order of arrival counts.
        ordered = (
            [key for key in receipts.handles if key in requested]
            if receipts.groups
            else [*requested]
        )
        ended = receipts.now.keys() | receipts.lost
        verdicts = {
            key: requested[key].verdict
            for key in ordered
            if key in receipts.handles and key not in ended
        }
        lapsed = len(requested) - len(before) - len(verdicts)
        early = self._too_early(receipts, verdicts)
        for key in early:
            del verdicts[key]
        settling = self._settling(lease, receipts)
        try:
            settling.carry_out(verdicts, requested, note=False)
        finally:
            receipts.note_now(settling.done)
        done = settling.done | before
        undone = frozenset(requested.keys() - done.keys())
        rest = SettleReport(lapsed=lapsed, failed=len(early), undone=undone)
        return settling.report(done.values()) + rest

    def _too_early(self, receipts: Receipts, verdicts: Mapping[str, Verdict]) -> list[str]:
        """Returns messages to be removed before an earlier message of their group has a verdict."""
        if not self._broker.ordered_groups or not receipts.groups:
            return []
        early: list[str] = []
        open_groups: set[str] = set()
        for key in receipts.held():
            group = receipts.groups.get(key)
            if group is None:
                continue
            if key not in verdicts:
                open_groups.add(group)
            elif group in open_groups and verdicts[key].action not in COMES_AGAIN:
                early.append(key)
        return early

    def close(self) -> None:
        self._requests.close()
        self._broker.close()

    # -- receipts and deadlines ----------------------------------------------------------------

    def _now(self) -> float:
        return self._clock.now().timestamp()

    def _receipts_of(self, lease: Lease, *, fresh: bool = False) -> Receipts:
        check_lease(lease, self._broker.kind, self._broker.place)
        receipts = self._known.get(lease.generation)
        if receipts is None or fresh:
            receipts = self._known[lease.generation] = self._folder.of(lease.generation)
        return receipts

    @staticmethod
    def _until(lease: Lease, receipts: Receipts) -> float:
        """Returns the newest recorded deadline of the generation."""
        deadline, held = lease.deadline.timestamp(), receipts.until
        return deadline if held is None else max(deadline, held)

    def _until_by_now(self, lease: Lease, receipts: Receipts) -> float:
        receipts.refresh()
        return self._until(lease, receipts)

    def _settling(self, lease: Lease, receipts: Receipts) -> EngineSettlement:
        return EngineSettlement(
            self._broker,
            self._folder,
            self._requests,
            receipts,
            lambda: self._until_by_now(lease, receipts),
        )
