"""From verdicts to requests: what one settlement does at SQS.

The order is such that whoever dies in the middle loses nothing: dead letters are sent before their
originals are deleted, attempts are noted before a message may come again, and what has been carried
out is noted in waves, so that settling again goes on from there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, HELD_BACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.guard import MessageGuard
from airflow_broadway.producers.kit.plan import plan_of
from airflow_broadway.producers.kit.reports import report_of
from airflow_broadway.producers.sqs import dead_letters
from airflow_broadway.producers.sqs.batch_requests import LAPSED, BatchRequests, Call, Refusal
from airflow_broadway.producers.sqs.client import BatchAnswer, Queue
from airflow_broadway.producers.sqs.inspect import dead_letter_queue
from airflow_broadway.producers.sqs.limits import LONGEST_VISIBILITY, MAX_BODY
from airflow_broadway.producers.sqs.receipts import Receipts, ReceiptsFolder

if TYPE_CHECKING:
    from airflow_broadway.producers.sqs.options import SqsOptions

__all__ = ["QueueSettlement", "Work", "work_of"]

log = logging.getLogger(__name__)

#: Messages after which a settlement notes how far it has come.
WAVE: Final = 2000
_NO_BODY: Final = (
    "a dead letter cannot be sent: its body was not kept; give the producer on_failure='retry' or"
    " 'dead_letter' before it receives"
)
_NO_LETTER: Final = "a dead letter cannot be made of a message, which comes back"
#: What SQS removes for good.
_REMOVES: Final = (Action.ACK, Action.DEAD_LETTER)


class Work(NamedTuple):
    """What is to be done with the messages of one generation.

    :param verdicts: Message id → verdict, in order of arrival.
    :param entries: Of these, those that were named one by one.
    :param lapsed: Messages of the generation that it holds no longer, or whose receipts are gone.
    """

    verdicts: Mapping[str, Verdict]
    entries: Mapping[str, Entry]
    lapsed: int = 0
    errors: tuple[str, ...] = ()


def work_of(receipts: Receipts, lease: Lease, settlement: Settlement) -> Work:
    """What is to be done, by what the receipts, the source's lease and the manifest say.

    :raises ProducerError: If all others are to be acknowledged and nobody says which they are.
    """
    lost = {each for each in receipts.lost if each in receipts.handles}
    at_once = 0 if settlement.settled_now is None else settlement.settled_now.total
    named = None if settlement.expected is None else settlement.expected + at_once
    written = max(named or 0, int(lease.state.get("messages") or 0))
    missing = max(0, written - len(receipts.handles))
    agree = named == len(receipts.handles) and not missing
    plan = plan_of(receipts.held(), settlement, at_once=receipts.now, agree=agree)
    errors: tuple[str, ...] = ()
    if missing and receipts.handles:
        error = (
            f"the receipts of {many(missing, 'message')} are missing in the staging folder: they"
            " are not settled, and come back when their visibility timeout is over"
        )
        errors = (error,)
    lapsed = max(len(plan.gone | lost), missing + len(lost))
    return Work(plan.verdicts, plan.entries, lapsed, errors)


class QueueSettlement:
    """Carries verdicts out on the messages of one generation; used from one thread.

    :param held_until: Until when all of it is held, as of now.  Who was held up for longer than
        that asks nothing more of SQS, which would still take an old receipt.
    """

    def __init__(
        self,
        producer: SqsOptions,
        queue: Queue,
        folder: ReceiptsFolder,
        requests: BatchRequests,
        receipts: Receipts,
        clock: Clock,
        *,
        held_until: Callable[[], float],
    ) -> None:
        self._producer = producer
        self._queue = queue
        self._folder = folder
        self._requests = requests
        self._receipts = receipts
        self._clock = clock
        self._held_until = held_until
        self._until = 0.0
        #: Whether a settlement before this one was killed on its way.
        self._resumed = receipts.begun
        self._errors: list[str] = []
        #: What it has done so far: message id → action.
        self.done: dict[str, Action] = {}
        self._entries: Mapping[str, Entry] = {}
        self._letters: tuple[Queue, int] | None = None
        self._lapsed = 0
        self._failed = 0
        self._cut = 0
        self._left = 0

    def carry_out(self, work: Work, *, note: bool) -> dict[str, Action]:
        """Do it; returns what was done, which :attr:`done` names however it ends.

        :param note: Whether to note on the way how far it has come.
        :raises ProducerUnavailable: If SQS cannot be reached: calling again goes on.
        """
        receipts, self._entries = self._receipts, work.entries
        done = self.done
        verdicts = self._held_back(work.verdicts) if receipts.groups else work.verdicts
        keys = list(verdicts)
        for start in range(0, len(keys), WAVE):
            if note and start and receipts.ended():
                break  # another has settled it meanwhile: what it reports stands
            fresh: dict[str, Action] = {}
            by_verdict: dict[Verdict, list[str]] = {}
            for key in keys[start : start + WAVE]:
                if key in receipts.done:
                    done[key] = receipts.done[key]
                else:
                    by_verdict.setdefault(verdicts[key], []).append(key)
            for action, each in _by_action(by_verdict).items():
                try:
                    refused = self._do(action, each)
                except ProducerUnavailable:
                    for key in each:
                        receipts.unanswered.setdefault(key, action)
                    raise
                fresh.update({key: action for key in each if key not in refused})
                for key, refusal in refused.items():
                    self._refused(action, key, refusal, fresh)
                done.update(fresh)
            if note and len(keys) > WAVE:
                receipts.note_done(fresh)
        return done

    def report(self, done: Iterable[Action]) -> SettleReport:
        """The report of what was done, and of what was refused on the way."""
        if self._cut:
            self._note_error(
                f"SQS hides a message for 12 hours from its receipt at most: the delay of"
                f" {many(self._cut, 'message')} was cut to the {self._left:,} s that remained"
            )
        return report_of(done, lapsed=self._lapsed, failed=self._failed, errors=self._errors)

    # -- the actions ---------------------------------------------------------------------------

    def _do(self, action: Action, verdicts: dict[str, Verdict]) -> dict[str, Refusal]:
        if action is Action.LEAVE:
            return {}
        if action is Action.ACK:
            return self._delete(verdicts)
        if action is Action.DEAD_LETTER:
            return self._dead_letter(verdicts)
        if action is Action.RETRY:
            failures = {key: self._entries[key].attempt for key in verdicts if key in self._entries}
            self._folder.failures.note(failures, self._clock.now())
        return self._change(verdicts)

    def _delete(self, keys: Iterable[str]) -> dict[str, Refusal]:
        receipt = self._receipt
        return self._requests.send(
            self._while_held(self._queue.delete),
            ((key, {"ReceiptHandle": receipt(key)}) for key in keys),
        )

    def _while_held(self, call: Call) -> Call:
        """The request, as long as the lease lasts; then every entry of it has lapsed."""

        def checked(entries: Sequence[Any]) -> BatchAnswer:
            now = self._clock.now().timestamp()
            if now >= self._until:
                self._until = self._held_until()
            if now < self._until:
                return call(entries)
            failed = {"Code": LAPSED, "SenderFault": True, "Message": "the lease has lapsed"}
            return BatchAnswer(frozenset(), [{"Id": entry["Id"], **failed} for entry in entries])

        return checked

    def _change(self, verdicts: dict[str, Verdict]) -> dict[str, Refusal]:
        receipts, now = self._receipts, self._clock.now().timestamp()
        since = now if receipts.since is None else receipts.since
        left = max(0, math.floor(since + LONGEST_VISIBILITY - now) - 1)
        cut = 0

        def changes() -> Iterator[tuple[str, dict[str, Any]]]:
            nonlocal cut
            for key, verdict in verdicts.items():
                delay = math.ceil(verdict.delay)
                if delay > left:
                    delay, cut = left, cut + 1
                yield key, {"ReceiptHandle": self._receipt(key), "VisibilityTimeout": delay}

        refused = self._requests.send(self._while_held(self._queue.change), changes())
        if cut:
            self._cut += cut
            self._left = left
        return refused

    def _dead_letter(self, verdicts: dict[str, Verdict]) -> dict[str, Refusal]:
        try:
            target, most = self._letters = self._letters or self._place()
        except ProducerUnavailable:
            raise
        except BroadwayError as error:
            return dict.fromkeys(verdicts, Refusal("", str(error)))
        guard = MessageGuard()
        letters: dict[str, dict[str, Any]] = {}
        refused: dict[str, Refusal] = {}
        for key in verdicts:
            entry = self._entries.get(key)
            if entry is None or entry.payload is None:
                refused[key] = Refusal("", _NO_BODY)
                continue
            with guard.each(key):
                letters[key] = dead_letters.letter(
                    entry, self._queue.name, fifo=target.url.endswith(".fifo"), max_bytes=most
                )
        for key, reason in guard.refused.items():
            refused[key] = Refusal("", f"{_NO_LETTER}: {reason}")
        requests = dead_letters.requests(letters)
        for key, refusal in self._requests.send_requests(target.send, requests).items():
            # Said of the letter, not of the receipt.
            code = f"SendMessage: {refusal.code}"
            refused[key] = Refusal(code, refusal.text) if refusal.code else refusal
        # Where this is refused the dead letter stands, and the original comes again, marked.
        return refused | self._delete([key for key in verdicts if key not in refused])

    def _place(self) -> tuple[Queue, int]:
        """Where dead letters go, and how large they may be."""
        target = dead_letter_queue(self._producer, self._queue)
        try:
            most = target.attributes("MaximumMessageSize").get("MaximumMessageSize")
        except BroadwayError:  # may be denied, and is not needed
            most = None
        return target, int(most or MAX_BODY)

    def _receipt(self, key: str) -> str:
        return self._receipts.handles.get(key) or self._entries[key].receipt

    # -- refusals ------------------------------------------------------------------------------

    def _refused(self, action: Action, key: str, refusal: Refusal, done: dict[str, Action]) -> None:
        if refusal.gone:
            earlier = self._receipts.unanswered.get(key)
            if earlier in _REMOVES and refusal.code != LAPSED:
                # It was done, though the answer never came: the message is gone for good.
                done[key] = earlier
                return
            again = self._resumed or refusal.unclear or earlier is not None
            if again and action in (Action.RETRY, Action.RELEASE) and refusal.code != LAPSED:
                # An earlier settlement, killed since, gave it back: it is in flight no more.
                done[key] = action
                return
            self._lapsed += 1
            self._note_error(
                f"SQS holds messages no longer for this run ({refusal.code}): they are delivered"
                " again, marked as redelivered"
            )
            return
        self._failed += 1
        self._note_error(refusal.text if not refusal.code else f"{refusal.code}: {refusal.text}")

    def _note_error(self, error: str) -> None:
        if error not in self._errors:
            log.warning("%s", error)
            self._errors.append(error)

    # -- FIFO ----------------------------------------------------------------------------------

    def _held_back(self, verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
        """The verdicts, with what follows a message that comes again given back, in each group.

        It is handled again after that message, in order.  What failed is given back too: it may
        have failed because the one before it did, and so uses up no attempt.
        """
        receipts = self._receipts
        made = dict(verdicts)
        held = 0
        for key, verdict in verdicts.items():
            group = receipts.groups.get(key)
            if group is None:
                continue
            if (
                group in receipts.blocked
                and key not in receipts.done
                and verdict.action in HELD_BACK
            ):
                made[key] = RELEASE
                held += 1
            elif verdict.action in COMES_AGAIN:
                receipts.blocked.add(group)
        if held:
            log.info(
                "%s handled after one of their message group that comes again: given back, to be"
                " handled again in order.",
                many(held, "message"),
            )
        return made


def _by_action(by_verdict: dict[Verdict, list[str]]) -> dict[Action, dict[str, Verdict]]:
    made: dict[Action, dict[str, Verdict]] = {}
    for verdict, keys in by_verdict.items():
        made.setdefault(verdict.action, {}).update(dict.fromkeys(keys, verdict))
    return made
