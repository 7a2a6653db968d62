"""From verdicts to requests: what one settlement does at SQS.

The order is such that whoever dies in the middle loses nothing: dead letters are sent before their
originals are deleted, attempts are noted before a message may come again, and what has been carried
out is noted in waves, so that settling again goes on from there.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody import (
    RELEASE,
    Action,
    Entry,
    Lease,
    Settlement,
    SettleReport,
    Verdict,
)
from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.producers.sqs import dead
from airflow_broadway.producers.sqs.book import Book, Shelf, day_of, report_of
from airflow_broadway.producers.sqs.bulk import Bulk, Refusal
from airflow_broadway.producers.sqs.client import Queue
from airflow_broadway.producers.sqs.limits import LONGEST_VISIBILITY, MAX_BODY
from airflow_broadway.producers.sqs.looking import dead_letter_queue

if TYPE_CHECKING:
    from airflow_broadway.producers.sqs.producer import SqsProducer

__all__ = ["Settling", "plan"]

log = logging.getLogger(__name__)

#: Messages after which a settlement notes how far it has come.
WAVE: Final = 2000
#: What comes again holds back the later messages of its FIFO group.
_COMES_AGAIN: Final = frozenset({Action.RETRY, Action.LEAVE, Action.RELEASE})


def plan(book: Book, lease: Lease, settlement: Settlement) -> tuple[dict[str, Entry], int]:
    """The verdict on each message that the book holds, in order of arrival; and how many messages
    the settlement names that it does not hold.

    :raises ProducerError: If all others are to be acknowledged and nobody says which they are.
    """
    named = {entry.message_id: entry for entry in settlement.entries()}
    held = book.held()
    rest: set[str] | None = None  # who gets the rest's verdict; None: all that are not named
    action = settlement.rest.action
    known = len(held) + sum(each in book.lost for each in book.receipts)
    if action is not Action.RELEASE and settlement.expected != known:
        # What was received and never staged must not be settled as if it had been handled.
        if settlement.everything is None:
            raise ProducerError(
                f"generation {lease.generation!r} holds {known} messages and its manifest"
                f" names {settlement.expected}: none was settled, and all come back when the lease"
                " lapses"
            )
        rest = {entry.message_id for entry in settlement.everything()}
    verdicts: dict[str, Entry] = {}
    for each in held:
        entry = named.pop(each, None)
        if entry is None:
            verdict = settlement.rest if rest is None or each in rest else RELEASE
            entry = Entry(each, "", verdict)
        verdicts[each] = entry
    strangers = sum(each not in book.now for each in named)
    strangers += sum(each in book.lost and each not in named for each in book.receipts)
    return verdicts, strangers


class Settling:
    """Carries verdicts out on what one book holds; used from one thread."""

    def __init__(
        self,
        producer: SqsProducer,
        queue: Queue,
        shelf: Shelf,
        bulk: Bulk,
        book: Book,
        clock: Clock,
    ) -> None:
        self._producer = producer
        self._queue = queue
        self._shelf = shelf
        self._bulk = bulk
        self._book = book
        self._clock = clock
        #: Whether a settlement before this one was killed on its way.
        self._resumed = book.begun
        self._errors: list[str] = []
        self._lapsed = 0
        self._failed = 0

    def carry_out(self, verdicts: dict[str, Entry], *, note: bool) -> dict[str, Action]:
        """Do it; returns what was done.

        :param note: Whether to note on the way how far it has come.
        :raises ProducerUnavailable: If SQS cannot be reached: calling again goes on.
        """
        book = self._book
        done: dict[str, Action] = {}
        ordered = self._held_back(verdicts) if book.groups else verdicts
        for wave in _waves(ordered, WAVE):
            fresh: dict[str, Action] = {}
            by_action: dict[Action, list[Entry]] = {}
            for key, entry in wave:
                if key in book.done:
                    done[key] = book.done[key]
                else:
                    by_action.setdefault(entry.verdict.action, []).append(entry)
            for action, entries in by_action.items():
                refused = self._do(action, entries)
                for entry in entries:
                    refusal = refused.get(entry.message_id)
                    if refusal is None:
                        fresh[entry.message_id] = action
                    else:
                        self._refused(action, entry, refusal, fresh)
            done.update(fresh)
            if note and len(verdicts) > WAVE:
                book.note_done(fresh)
        return done

    def report(self, done: Iterable[Action]) -> SettleReport:
        """The report of what was done, and of what was refused on the way."""
        return report_of(
            Counter(done), lapsed=self._lapsed, failed=self._failed, errors=self._errors
        )

    # -- the actions ---------------------------------------------------------------------------

    def _do(self, action: Action, entries: list[Entry]) -> dict[str, Refusal]:
        if action is Action.LEAVE:
            return {}
        if action is Action.ACK:
            return self._delete(entries)
        if action is Action.DEAD_LETTER:
            return self._dead_letter(entries)
        if action is Action.RETRY:
            failures = {entry.message_id: entry.attempt for entry in entries}
            self._shelf.note_failures(failures, day_of(self._clock.now()))
        return self._change(entries)

    def _delete(self, entries: list[Entry]) -> dict[str, Refusal]:
        return self._bulk.send(
            self._queue.delete,
            ((each.message_id, {"ReceiptHandle": self._receipt(each)}) for each in entries),
        )

    def _change(self, entries: list[Entry]) -> dict[str, Refusal]:
        book, now = self._book, self._clock.now().timestamp()
        since = now if book.since is None else book.since
        left = max(0, math.floor(since + LONGEST_VISIBILITY - now) - 1)
        cut = 0

        def changes() -> Iterator[tuple[str, dict[str, Any]]]:
            nonlocal cut
            for each in entries:
                delay = math.ceil(each.verdict.delay)
                if delay > left:
                    delay, cut = left, cut + 1
                receipt = self._receipt(each)
                yield each.message_id, {"ReceiptHandle": receipt, "VisibilityTimeout": delay}

        refused = self._bulk.send(self._queue.change, changes())
        if cut:
            self._tell(
                f"SQS hides a message for 12 hours from its receipt at most: the delay of {cut}"
                f" messages was cut to the {left} s that remained"
            )
        return refused

    def _dead_letter(self, entries: list[Entry]) -> dict[str, Refusal]:
        try:
            target = dead_letter_queue(self._producer, self._queue)
            attributes = _attributes_of(target)
        except BroadwayError as error:
            return {each.message_id: Refusal("", str(error)) for each in entries}
        letters: dict[str, dict[str, Any]] = {}
        refused: dict[str, Refusal] = {}
        for each in entries:
            if each.payload is None:
                refused[each.message_id] = Refusal(
                    "",
                    "a dead letter cannot be sent: its body was not kept; give the producer"
                    " dead_letter=…, or on_failure='retry' or 'dead_letter', before it receives",
                )
                continue
            letters[each.message_id] = dead.letter(
                each,
                self._queue.name,
                fifo=target.url.endswith(".fifo"),
                max_bytes=int(attributes.get("MaximumMessageSize") or MAX_BODY),
            )
        refused |= self._bulk.send_requests(target.send, dead.requests(letters))
        sent = [each for each in entries if each.message_id not in refused]
        for key, refusal in self._delete(sent).items():
            # The dead letter stands; the original comes again, marked as redelivered.
            refused[key] = refusal
        return refused

    def _receipt(self, entry: Entry) -> str:
        return self._book.receipts.get(entry.message_id) or entry.receipt

    # -- refusals ------------------------------------------------------------------------------

    def _refused(
        self, action: Action, entry: Entry, refusal: Refusal, done: dict[str, Action]
    ) -> None:
        if refusal.gone:
            if self._resumed and action in (Action.RETRY, Action.RELEASE):
                # An earlier settlement, killed since, gave it back: it is in flight no more.
                done[entry.message_id] = action
                return
            self._lapsed += 1
            self._tell(
                f"SQS holds messages no longer for this run ({refusal.code}): they are delivered"
                " again, marked as redelivered"
            )
            return
        self._failed += 1
        self._tell(refusal.text if not refusal.code else f"{refusal.code}: {refusal.text}")

    def _tell(self, error: str) -> None:
        if error not in self._errors:
            log.warning("%s", error)
            self._errors.append(error)

    # -- FIFO ----------------------------------------------------------------------------------

    def _held_back(self, verdicts: dict[str, Entry]) -> dict[str, Entry]:
        """The verdicts with those acknowledged given back that follow one which comes again, in
        their group: they are handled again after it, in order.
        """
        book = self._book
        made: dict[str, Entry] = {}
        held = 0
        for key, entry in verdicts.items():
            group = book.groups.get(key)
            action = entry.verdict.action
            if group is not None:
                if action is Action.ACK and group in book.blocked and key not in book.done:
                    entry = entry._replace(verdict=Verdict(Action.RELEASE))
                    held += 1
                elif action in _COMES_AGAIN:
                    book.blocked.add(group)
            made[key] = entry
        if held:
            log.info(
                "%d messages were handled after one of their message group that comes again: they"
                " are given back, to be handled again in order.",
                held,
            )
        return made


def _attributes_of(queue: Queue) -> dict[str, str]:
    try:
        return queue.attributes("MaximumMessageSize")
    except BroadwayError:  # may be denied, and is not needed
        return {}


def _waves(verdicts: dict[str, Entry], size: int) -> Iterator[list[tuple[str, Entry]]]:
    wave: list[tuple[str, Entry]] = []
    for item in verdicts.items():
        wave.append(item)
        if len(wave) == size:
            yield wave
            wave = []
    if wave:
        yield wave
