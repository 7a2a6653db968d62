"""From verdicts to requests: what one settlement does at a broker of receipts.

The order is such that whoever dies in the middle loses nothing: dead letters are sent before their
originals are removed, attempts are noted before a message may come again, and what has been carried
out is noted in waves, so that settling again goes on from there.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, HELD_BACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.guard import MessageGuard
from airflow_broadway.producers.kit.plan import plan_of
from airflow_broadway.producers.kit.receipts.batch_requests import (
    LAPSED,
    BatchRequests,
    Call,
    Keyed,
    Letters,
    Refusal,
)
from airflow_broadway.producers.kit.receipts.receipts import Receipts, ReceiptsFolder
from airflow_broadway.producers.kit.reports import report_of

__all__ = ["REMOVES", "ReceiptSettlement", "Work", "work_of"]

log = logging.getLogger(__name__)

_NO_BODY: Final = (
    "a dead letter cannot be sent: its body was not kept; give the producer on_failure='retry' or"
    " 'dead_letter' before it receives"
)
_NO_LETTER: Final = "a dead letter cannot be made of a message, which comes back"
#: What the broker removes for good.
REMOVES: Final = (Action.ACK, Action.DEAD_LETTER)
#: After these it comes again; in each group what fails goes before what follows it.
_GIVES_BACK: Final = (Action.RETRY, Action.RELEASE, Action.LEAVE)


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
    lost = receipts.lost
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
            " are not settled, and come back when their time is over"
        )
        errors = (error,)
    lapsed = max(len(plan.gone | lost), missing + len(lost))
    return Work(plan.verdicts, plan.entries, lapsed, errors)


#: Asks for some verdicts; returns what was refused.
_Ask = Callable[[dict[str, Verdict]], dict[str, Refusal]]


class ReceiptSettlement(ABC):
    """Carries verdicts out on the messages of one generation; used from one thread.

    :param held_until: Until when all of it is held, as of now.  Who was held up for longer than
        that asks nothing more of the broker, which would still take an old receipt.
    :param wave: Messages after which a settlement notes how far it has come.
    """

    #: The broker's name, for people.
    service: ClassVar[str]
    #: Whether a message can be removed once only: who asks again hears that its receipt is void.
    removes_once: ClassVar[bool] = False
    #: Whether what follows a message in its group has to be hidden for as long as that one.
    hides_behind: ClassVar[bool] = False

    def __init__(
        self,
        folder: ReceiptsFolder,
        requests: BatchRequests,
        receipts: Receipts,
        clock: Clock,
        *,
        held_until: Callable[[], float],
        wave: int = 2000,
    ) -> None:
        self._wave = wave
        self._folder = folder
        self._requests = requests
        self._receipts = receipts
        self._clock = clock
        self._held_until = held_until
        self._until = 0.0
        #: Whether a settlement before this one was killed on its way.
        self._resumed = receipts.resumed
        #: Whether it may have asked of this wave already.
        self._asked_before = False
        self._errors: list[str] = []
        #: What it has done so far: message id → action.
        self.done: dict[str, Action] = {}
        #: Of these, those whose receipt was void when it was asked again: taken as done then.
        self._taken_as_done: set[str] = set()
        self._entries: Mapping[str, Entry] = {}
        self._letters: Letters | None = None
        self._lapsed = 0
        self._failed = 0
        #: Messages whose delay was cut, and the seconds that it was cut to.
        self._cut = 0
        self._cut_to = 0

    # -- what each broker does -----------------------------------------------------------------

    @abstractmethod
    def _remove_call(self) -> Call:
        """One request that removes messages for good; its entries are those of `_removed`."""

    @abstractmethod
    def _removed(self, receipt: str) -> Any:
        """An entry that removes a message."""

    @abstractmethod
    def _hide_call(self) -> Call:
        """One request that hides messages for a while; its entries are those of `_hidden`."""

    @abstractmethod
    def _hidden(self, receipt: str, seconds: int) -> Any:
        """An entry that hides a message for so long; 0: it is shown at once."""

    @abstractmethod
    def _longest_delay(self) -> int:
        """Seconds for which a message can be hidden at most, as of now."""

    @abstractmethod
    def _why_cut(self, count: int, seconds: int) -> str:
        """Why the delay of so many messages was cut to so many seconds."""

    @abstractmethod
    def _open_letters(self) -> Letters:
        """How dead letters are sent.

        :raises BroadwayError: If they have nowhere to go.
        """

    def _note(self, action: Action, verdicts: Mapping[str, Verdict]) -> None:
        """Write down what whoever receives these messages next has to know of them."""
        if action is Action.RETRY:
            failures = {key: self._entries[key].attempt for key in verdicts if key in self._entries}
            self._folder.failures.note(failures, self._clock.now())

    # -- a settlement --------------------------------------------------------------------------

    def carry_out(self, work: Work, *, note: bool) -> dict[str, Action]:
        """Do it; returns what was done, which :attr:`done` names however it ends.

        :param note: Whether to note on the way how far it has come.
        :raises ProducerUnavailable: If the broker cannot be reached: calling again goes on.
        """
        receipts, self._entries = self._receipts, work.entries
        verdicts = self._held_back(work.verdicts, all_of_it=note)
        if note:
            self._as_planned(verdicts)
        in_waves = note and len(verdicts) > self._wave
        for key in receipts.done.keys() & verdicts.keys():  # by a settlement that was killed
            self.done[key] = receipts.done[key]
            del verdicts[key]
        keys = list(verdicts)
        for start in range(0, len(keys), self._wave):
            if note and start and receipts.ended():
                break  # another has settled it meanwhile: what it reports stands
            wave = keys[start : start + self._wave]
            self._asked_before = self._resumed and not start
            fresh = self._carry_out({key: verdicts[key] for key in wave})
            if in_waves:
                receipts.note_done(fresh)
        return self.done

    def _as_planned(self, verdicts: dict[str, Verdict]) -> None:
        """Give back what a settlement that was killed gave back, or was about to.

        Outcomes may have come since: but what was given back comes again, and nobody can take it
        back.
        """
        again = ComingAgain.of({key: each.action for key, each in verdicts.items()}, whole=True)
        if self._resumed or again != ComingAgain():
            stands = self._receipts.plan(again)
            for key, each in verdicts.items():
                if each.action not in COMES_AGAIN and stands.has(key):
                    verdicts[key] = RELEASE

    def _carry_out(self, verdicts: dict[str, Verdict]) -> dict[str, Action]:
        """Do a wave: send letters, then remove, in order, then give back; returns what was done."""
        fresh: dict[str, Action] = {}
        by_action = _by_action(verdicts)
        removed, letters = by_action[Action.ACK], by_action[Action.DEAD_LETTER]
        if letters:
            unsent = self._asked(letters, self._send_letters)
            self._count_refused(unsent, letters, fresh)
            removed = {
                key: each
                for key, each in verdicts.items()
                if each.action in REMOVES and key not in unsent
            }
        steps: list[tuple[dict[str, Verdict], _Ask]] = [
            (removed, self._remove),
            *((by_action[each], partial(self._give_back, each)) for each in _GIVES_BACK),
        ]
        for some, ask in steps:
            refused = self._asked(some, ask)
            fresh.update({key: each.action for key, each in some.items() if key not in refused})
            self._count_refused(refused, some, fresh)
            self.done.update(fresh)
        return fresh

    def _asked(self, verdicts: dict[str, Verdict], ask: _Ask) -> dict[str, Refusal]:
        """What was refused; what was not answered is remembered."""
        if not verdicts:
            return {}
        try:
            return ask(verdicts)
        except ProducerUnavailable:
            for key, verdict in verdicts.items():
                self._receipts.unanswered.setdefault(key, verdict.action)
            raise

    def report(self, done: Iterable[Action]) -> SettleReport:
        """The report of what was done, and of what was refused on the way."""
        if self._cut:
            self._note_error(self._why_cut(self._cut, self._cut_to))
        return report_of(done, lapsed=self._lapsed, failed=self._failed, errors=self._errors)

    # -- the actions ---------------------------------------------------------------------------

    def _give_back(self, action: Action, verdicts: dict[str, Verdict]) -> dict[str, Refusal]:
        self._note(action, verdicts)
        return {} if action is Action.LEAVE else self._hide(verdicts)

    def _remove(self, keys: Iterable[str]) -> dict[str, Refusal]:
        handles, removed = self._receipts.handles, self._removed
        return self._requests.send(
            self._while_held(self._remove_call()), [(key, removed(handles[key])) for key in keys]
        )

    def _hide(self, verdicts: dict[str, Verdict]) -> dict[str, Refusal]:
        handles = self._receipts.handles
        longest, cut = self._longest_delay(), 0

        def entries() -> Iterator[Keyed]:
            nonlocal cut
            for key, verdict in verdicts.items():
                delay = math.ceil(verdict.delay)
                if delay > longest:
                    delay, cut = longest, cut + 1
                yield key, self._hidden(handles[key], delay)

        refused = self._requests.send(self._while_held(self._hide_call()), entries())
        if cut:
            self._cut += cut
            self._cut_to = longest
        return refused

    def _while_held(self, call: Call) -> Call:
        """The request, as long as the lease lasts; then every entry of it has lapsed."""

        def checked(entries: Sequence[Any]) -> Mapping[int, Refusal]:
            if self._is_held():
                return call(entries)
            return dict.fromkeys(range(len(entries)), LAPSED)

        return checked

    def _is_held(self) -> bool:
        """Whether the lease lasts still, by its newest note."""
        now = self._clock.now().timestamp()
        if now >= self._until:
            self._until = self._held_until()
        return now < self._until

    def _send_letters(self, verdicts: dict[str, Verdict]) -> dict[str, Refusal]:
        try:
            post = self._letters = self._letters or self._open_letters()
        except ProducerUnavailable:
            raise
        except BroadwayError as error:
            return dict.fromkeys(verdicts, Refusal("", str(error)))
        guard = MessageGuard()
        letters: dict[str, Any] = {}
        refused: dict[str, Refusal] = {}
        for key in verdicts:
            entry = self._entries.get(key)
            if entry is None or entry.payload is None:
                refused[key] = Refusal("", _NO_BODY)
                continue
            with guard.each(key):
                letters[key] = post.make(entry)
        for key, reason in guard.refused.items():
            refused[key] = Refusal("", f"{_NO_LETTER}: {reason}")
        sent = self._requests.send_requests(post.call, post.requests(letters))
        for key, refusal in sent.items():
            # Said of the letter, not of the receipt.
            code = refusal.code and f"{post.action}: {refusal.code}"
            refused[key] = Refusal(code, refusal.text)
        # Where an original cannot be removed its dead letter stands, and it comes again, marked.
        return refused

    # -- refusals ------------------------------------------------------------------------------

    def _count_refused(
        self,
        refused: Mapping[str, Refusal],
        verdicts: Mapping[str, Verdict],
        done: dict[str, Action],
    ) -> None:
        for key, refusal in refused.items():
            action = verdicts[key].action
            stands = self._done_before(action, key, refusal) if refusal.gone else None
            if stands is not None:
                done[key] = stands
                self._taken_as_done.add(key)
            elif refusal.gone:
                self._lapsed += 1
                self._note_error(
                    f"{self.service} holds messages no longer for this run ({refusal.code}): they"
                    " are delivered again, marked as redelivered"
                )
            else:
                self._failed += 1
                text = refusal.text
                self._note_error(text if not refusal.code else f"{refusal.code}: {text}")

    def _done_before(self, action: Action, key: str, refusal: Refusal) -> Action | None:
        """What was done with a message whose receipt is void, if that is why."""
        if refusal.code == LAPSED.code:
            return None
        earlier = self._receipts.unanswered.get(key)
        if earlier in REMOVES:
            # It was done, though the answer never came: the message is gone for good.
            return earlier
        if action in REMOVES:
            asked = refusal.unclear or self._asked_before
            return action if self.removes_once and asked else None
        # An earlier settlement, killed since, gave it back, or the one before it in its group
        # brought it along: it is in flight no more.
        along = self.hides_behind and self._receipts.groups.get(key) in self._receipts.blocked
        again = self._resumed or refusal.unclear or earlier is not None or along
        return action if again else None

    def _note_error(self, error: str) -> None:
        if error not in self._errors:
            log.warning("%s", error)
            self._errors.append(error)

    # -- order ---------------------------------------------------------------------------------

    def _held_back(self, verdicts: Mapping[str, Verdict], *, all_of_it: bool) -> dict[str, Verdict]:
        """The verdicts, with what follows a message that comes again given back, in each group.

        It is handled again after that message, in order.  What failed is given back too: it may
        have failed because the one before it did, and so uses up no attempt.

        :param all_of_it: Whether these are all that are left; before them, callbacks may have
            given others back at once.
        """
        receipts, now = self._receipts, self._clock.now().timestamp()
        made = dict(verdicts)
        if not receipts.groups:
            return made
        held = 0
        receipts.blocked.clear()  # what is before such a message in its group is not behind it
        at_once = receipts.settled_now(now)
        walked = {
            key: each
            for key in receipts.handles
            if (each := verdicts.get(key) or at_once.get(key)) is not None
        }
        for key, verdict in walked.items():
            group = receipts.groups.get(key)
            if group is None:
                continue
            if (
                group in receipts.blocked
                and key not in receipts.done
                and key not in receipts.now
                and verdict.action in HELD_BACK
            ):
                behind = max(0.0, receipts.blocked[group] - now) if self.hides_behind else 0.0
                made[key] = RELEASE._replace(delay=behind)
                held += 1
            elif verdict.action in COMES_AGAIN:
                left = verdict.action is Action.LEAVE
                until = self._held_until() if left else now + verdict.delay
                if key in verdicts and not all_of_it:
                    receipts.again[key] = until
                receipts.blocked[group] = max(until, receipts.blocked.get(group, 0.0))
        if held:
            log.info(
                "%s handled after one of their message group that comes again: given back, to be"
                " handled again in order.",
                many(held, "message"),
            )
        return made


def _by_action(verdicts: dict[str, Verdict]) -> dict[Action, dict[str, Verdict]]:
    """The verdicts of each action, in their order."""
    found: dict[Action, dict[str, Verdict]] = {action: {} for action in Action}
    each_one = [*verdicts.values()]
    if each_one and each_one.count(each_one[0]) == len(each_one):  # most often all have succeeded
        found[each_one[0].action] = verdicts
        return found
    for key, each in verdicts.items():
        found[each.action][key] = each
    return found
