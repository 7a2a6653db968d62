"""Settles messages in the process that handles them: verdicts are carried out in bulk.

A :class:`Settler` is the sink of a :class:`RunAcknowledger`.  It has one custodian, used from one
thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from airflow_broadway.core.custody.acknowledger import Judged
from airflow_broadway.core.custody.protocol import Custodian, Delivery, Entry, Lease, Settlement
from airflow_broadway.core.custody.report import CLASS_OF, SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Verdict
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerError
from airflow_broadway.core.log_context import keep_ids
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.text import pluralize

log = logging.getLogger(__name__)

#: Verdicts that are carried out together, and the seconds for which a verdict waits for others.
_BULK_SIZE: Final = 1000
_BULK_INTERVAL: Final = 1.0


def entry_of(message: Message, verdict: Verdict) -> Entry:
    """Returns the entry that settles ``message`` by ``verdict``."""
    data = message.acknowledger.data
    delivery = data if isinstance(data, Delivery) else Delivery()
    fields = (
        message.message_id,
        delivery.receipt,
        verdict,
        message.attempt,
        delivery.payload,
        delivery.properties,
    )
    return tuple.__new__(Entry, fields)  # half the cost of calling the class


def check_settled(report: SettleReport) -> SettleReport:
    """Returns ``settle_now``'s report if it is complete; raises in the calling callback otherwise.

    :raises ProducerError: If the broker refused.
    :raises LeaseLapsed: If the lease has lapsed.
    """
    if report.failed:
        raise ProducerError("; ".join(report.errors) or "the broker refused to settle")
    if report.lapsed:
        total = pluralize(report.total, "message")
        raise LeaseLapsed(f"the run no longer holds {report.lapsed} of {total}")
    return report


def settle_at_once(
    custodian: Custodian, lease: Lease, entries: Iterable[Entry]
) -> tuple[SettleReport, list[Entry], list[Entry]]:
    """Carries out verdicts immediately; returns the report, the settled and the unsettled entries.

    Of several verdicts on one message the last counts.

    :raises ProducerError: If the broker refuses all, or the report omits the unsettled ids.
    """
    by_id = {entry.message_id: entry for entry in entries}
    report = custodian.settle_now(lease, list(by_id.values()))
    undone = [entry for key, entry in by_id.items() if key in report.undone]
    if len(undone) != report.failed + report.lapsed:
        raise ProducerError(
            f"{type(custodian).__name__}.settle_now reports {report.failed + report.lapsed} of"
            f" {pluralize(len(by_id), 'message')} as not settled, and names {len(undone)} of them"
            " in 'undone'"
        )
    return report, [entry for key, entry in by_id.items() if key not in report.undone], undone


def done_of(report: SettleReport) -> SettleReport:
    """Returns the settled part of a report; the other messages are accounted for later."""
    return replace(report, failed=0, lapsed=0, undone=frozenset())


class Tally:
    """The sink of messages that no broker holds; counts the verdicts."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(CLASS_OF.values(), 0)
        self.closed = False

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Counts the verdicts of one stage result."""
        if not self.closed:
            for _, verdict in (*successful, *failed):
                self.counts[CLASS_OF[verdict.action]] += 1

    settle_now = record


class Settler:
    """Carries verdicts out in bulk, and releases the rest at the end.

    :param custodian: Opens the custodian; called in the thread that uses it.
    :param lease: Returns the source's current lease.
    :param threaded: Whether verdicts come from several threads; the custodian then gets its own.
    """

    def __init__(
        self,
        custodian: Callable[[], Custodian],
        lease: Callable[[], Lease],
        *,
        threaded: bool,
    ) -> None:
        self._open = custodian
        self._lease = lease
        self._custodian: Custodian | None = None
        self._thread = ThreadPoolExecutor(1, "broadway-settler") if threaded else None
        self._lock = threading.Lock()
        self._held: dict[str, Message] = {}
        self._entries: list[Entry] = []
        #: Entries that the broker refused or whose lease had lapsed; retried once at the end.
        self._undone: list[Entry] = []
        #: Ids settled by a ``settle_now`` that failed for other messages: the calling callback got
        #: an exception, so it does not know that these are settled.
        self._done: set[str] = set()
        self._since = 0.0
        self._report = SettleReport()
        #: The number of messages held so far, settled or not.
        self.received = 0
        self._closed = False
        #: Seconds spent in settling.
        self.seconds = 0.0

    def hold(self, messages: Sequence[Message]) -> None:
        """Registers received messages; each is held until it has a verdict."""
        with self._lock:
            self.received += len(messages)
            for message in messages:
                self._held[message.message_id] = message

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Queues verdicts, to be carried out in bulk."""
        with self._lock:
            if self._closed:
                return  # the run has ended and released these messages
            if not self._entries:
                self._since = time.monotonic()
            entries = self._unsettled_entries([*successful, *failed])
            for entry in entries:
                self._held.pop(entry.message_id, None)
            self._entries += entries
            full = len(self._entries) >= _BULK_SIZE
        if full:
            self.tick(force=True)

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Carries these verdicts out before returning.

        :raises ProducerError: If the broker refuses, or the lease has lapsed.
        """
        with self._lock:
            if self._closed:
                raise LeaseLapsed("the run has ended and released its messages")
            entries = self._unsettled_entries([*successful, *failed])
        report, done, undone = self._in_thread(lambda: self._settle(entries))
        with self._lock:
            self._report += done_of(report)
            for entry in done:
                self._held.pop(entry.message_id, None)
            if undone:
                self._done.update(entry.message_id for entry in done)
        check_settled(report)

    def tick(self, *, force: bool = False) -> None:
        """Carries out queued verdicts after :data:`_BULK_INTERVAL` seconds."""
        with self._lock:
            if not self._entries or (not force and time.monotonic() - self._since < _BULK_INTERVAL):
                return
            entries, self._entries = self._entries, []
        try:
            report, _, undone = self._in_thread(lambda: self._settle(entries))
        except BroadwayError as error:
            log.warning("could not settle %s yet: %s", pluralize(len(entries), "message"), error)
            with self._lock:
                self._entries, self._since = entries + self._entries, time.monotonic()
            return
        with self._lock:
            self._report += done_of(report)
            self._undone += undone

    def finish(self, *, unheard: bool = False) -> SettleReport:
        """Settles what has a verdict, releases the rest, ends the lease; returns the whole report.

        :param unheard: Whether the lease may hold messages though none was received.
        """
        with self._lock:
            self._closed = True
            entries, self._entries, self._undone = self._undone + self._entries, [], []
        all_entries = [*entries, *(entry_of(message, RELEASE) for message in self._held.values())]
        settlement = Settlement(
            rest=RELEASE,
            entries=lambda: iter(entries),
            everything=lambda: iter(all_entries),
            expected=self.received,
        )
        try:
            if self.received or unheard:
                self._report += self._in_thread(
                    lambda: self._get_custodian().settle(self._lease(), settlement)
                )
        finally:
            if self._custodian is not None:
                self._in_thread(self._custodian.close)
            if self._thread is not None:
                self._thread.shutdown(wait=True)
        return self._report

    def _unsettled_entries(self, judged: list[Judged]) -> list[Entry]:
        entries = [entry_of(*pair) for pair in judged]
        if not self._done:
            return entries
        return [entry for entry in entries if entry.message_id not in self._done]

    def _get_custodian(self) -> Custodian:
        if self._custodian is None:
            self._custodian = self._open()
        return self._custodian

    def _settle(self, entries: list[Entry]) -> tuple[SettleReport, list[Entry], list[Entry]]:
        return settle_at_once(self._get_custodian(), self._lease(), entries)

    def _in_thread(self, call: Callable[[], Any]) -> Any:
        started = time.monotonic()
        try:
            return call() if self._thread is None else self._thread.submit(keep_ids(call)).result()
        finally:
            self.seconds += time.monotonic() - started
