"""Turns verdicts into requests: carries out one settlement at the broker.

The order is such that a kill in the middle loses nothing: dead letters are sent before their
originals are removed, attempts are recorded before a message may come again, and progress is
recorded in waves, so that settling again goes on from there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, HELD_BACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable
from airflow_broadway.core.text import many
from airflow_broadway.producers.engine.plan import Plan, plan_of
from airflow_broadway.producers.engine.port import (
    LAPSED,
    Broker,
    DeadLetterTarget,
    Hidden,
    Keyed,
    Refusal,
)
from airflow_broadway.producers.engine.receipts import Receipts, ReceiptsFolder
from airflow_broadway.producers.engine.requests import BatchRequests
from airflow_broadway.producers.kit.guard import MessageGuard
from airflow_broadway.producers.kit.reports import report_of

log = logging.getLogger(__name__)

_NO_BODY: Final = (
    "a dead letter cannot be sent: its body was not kept; give the producer on_failure='retry' or"
    " 'dead_letter' before it receives"
)
_NO_LETTER: Final = "a dead letter cannot be made of a message, which comes back"
#: Actions after which the message is removed for good.
REMOVES: Final = (Action.ACK, Action.DEAD_LETTER)
#: Actions after which it comes again; in each group a failed message goes before those behind it.
_RELEASES: Final = (Action.RETRY, Action.RELEASE, Action.LEAVE)
#: Messages after which a settlement records its progress, at least.
_WAVE: Final = 2000


def plan_for(receipts: Receipts, lease: Lease, settlement: Settlement) -> tuple[Plan, SettleReport]:
    """Compares receipts, the source's lease and the manifest.

    :returns: The verdicts, and a report of what the generation holds no longer, or of which the
        receipts are gone.
    :raises ProducerError: If all others are to be acknowledged and the manifest does not name them.
    """
    lost = receipts.lost
    at_once = 0 if settlement.settled_now is None else settlement.settled_now.total
    named = None if settlement.expected is None else settlement.expected + at_once
    written = max(named or 0, int(lease.state.get("messages") or 0))
    missing = max(0, written - len(receipts.handles))
    agree = named == len(receipts.handles) and not missing
    plan = plan_of(receipts.held(), settlement, at_once=receipts.now, agree=agree)
    report = SettleReport(lapsed=max(len(plan.gone | lost), missing + len(lost)))
    if missing and receipts.handles:
        error = (
            f"the receipts of {many(missing, 'message')} are missing in the staging folder: they"
            " are not settled, and come back when their time is over"
        )
        report += SettleReport(errors=(error,))
    return plan, report


#: Sends the requests for some verdicts; returns the refusals.
_Step = Callable[[dict[str, Verdict]], dict[str, Refusal]]


class EngineSettlement:
    """Carries out verdicts on the messages of one generation; used from one thread.

    :param held_until: Until when all of it is held, as of now.  After that no request is sent any
        more, since the broker would still accept an old receipt.
    """

    def __init__(
        self,
        broker: Broker[Any],
        folder: ReceiptsFolder,
        requests: BatchRequests,
        receipts: Receipts,
        held_until: Callable[[], float],
    ) -> None:
        self._broker, self._clock = broker, broker.clock
        self._wave = max(_WAVE, broker.max_batch * broker.concurrency)
        self._folder = folder
        self._requests = requests
        self._receipts = receipts
        self._held_until = held_until
        self._until = 0.0
        #: Whether an earlier settlement was killed on its way.
        self._resumed = receipts.resumed
        #: Whether that one may have sent the requests of this wave already.
        self._sent_before = False
        self._errors: list[str] = []
        #: What it has done so far: message id → action.
        self.done: dict[str, Action] = {}
        #: The messages among them whose receipt was void at a second request: counted as done.
        self._taken_as_done: set[str] = set()
        self._entries: Mapping[str, Entry] = {}
        self._target: DeadLetterTarget | None = None
        self._lapsed = 0
        self._failed = 0
        #: Messages whose delay was cut, and the seconds that it was cut to.
        self._cut = 0
        self._cut_to = 0

    # -- a settlement --------------------------------------------------------------------------

    def carry_out(
        self, planned: Mapping[str, Verdict], entries: Mapping[str, Entry], *, note: bool
    ) -> dict[str, Action]:
        """Carries out verdicts; returns what was done, which :attr:`done` has however it ends.

        :param planned: Message id → verdict, in order of arrival.
        :param entries: The entries that name some of them.
        :param note: Whether to record progress on the way.
        :raises ProducerUnavailable: If the broker cannot be reached: calling again goes on.
        """
        receipts, self._entries = self._receipts, entries
        verdicts = self._held_back(planned, all_of_it=note)
        if note:
            self._as_planned(verdicts)
        in_waves = note and len(verdicts) > self._wave
        for key in receipts.done.keys() & verdicts.keys():  # by a settlement that was killed
            self.done[key] = receipts.done[key]
            del verdicts[key]
        keys = list(verdicts)
        for start in range(0, len(keys), self._wave):
            if note and start and receipts.ended():
                break  # another process has settled it meanwhile: its report stands
            self._sent_before = self._resumed and not start
            fresh = self._carry_out(
                {key: verdicts[key] for key in keys[start : start + self._wave]}
            )
            if in_waves:
                receipts.note_done(fresh)
        if not self._broker.native_attempts:
            # Nothing else tells the next receiver that these were delivered before.
            doubtful = [key for key in planned if key not in self.done]
            self._note(Action.RELEASE, [*doubtful, *(self._taken_as_done & planned.keys())])
        return self.done

    def _as_planned(self, verdicts: dict[str, Verdict]) -> None:
        """Releases what a killed settlement released, or was about to.

        Outcomes may have been recorded since: but a released message comes again, and cannot be
        taken back.
        """
        again = ComingAgain.of(
            {key: verdict.action for key, verdict in verdicts.items()}, whole=True
        )
        if self._resumed or again != ComingAgain():
            stands = self._receipts.plan(again)
            for key, verdict in verdicts.items():
                if verdict.action not in COMES_AGAIN and stands.has(key):
                    verdicts[key] = RELEASE

    def _carry_out(self, verdicts: dict[str, Verdict]) -> dict[str, Action]:
        """Does a wave: sends dead letters, then removes, in order, then releases."""
        fresh: dict[str, Action] = {}
        by_action = _by_action(verdicts)
        removed, letters = by_action[Action.ACK], by_action[Action.DEAD_LETTER]
        if letters:
            unsent = self._sent(letters, self._send_letters)
            self._count_refused(unsent, letters, fresh)
            removed = {
                key: verdict
                for key, verdict in verdicts.items()
                if verdict.action in REMOVES and key not in unsent
            }
        steps: list[tuple[dict[str, Verdict], _Step]] = [
            (removed, self._remove),
            *((by_action[action], partial(self._release, action)) for action in _RELEASES),
        ]
        for some, step in steps:
            refused = self._sent(some, step)
            fresh.update(
                {key: verdict.action for key, verdict in some.items() if key not in refused}
            )
            self._count_refused(refused, some, fresh)
            self.done.update(fresh)
        return fresh

    def _sent(self, verdicts: dict[str, Verdict], step: _Step) -> dict[str, Refusal]:
        """Sends requests and returns the refusals; remembers those that were not answered."""
        if not verdicts:
            return {}
        try:
            return step(verdicts)
        except ProducerUnavailable:
            for key, verdict in verdicts.items():
                self._receipts.unanswered.setdefault(key, verdict.action)
            raise

    def report(self, done: Iterable[Action]) -> SettleReport:
        """Reports what was done, and what was refused on the way."""
        if self._cut:
            self._note_error(self._why_cut())
        return report_of(done, lapsed=self._lapsed, failed=self._failed, errors=self._errors)

    def _why_cut(self) -> str:
        service, messages = self._broker.service, many(self._cut, "message")
        if self._broker.max_hold is None:
            return (
                f"{service} puts a message off for {self._cut_to} s at most: the delay of"
                f" {messages} was cut to that; give retry a max_backoff of {self._cut_to}"
            )
        return (
            f"{service} hides a message for {self._broker.max_hold / 3600:g} hours from its receipt"
            f" at most: the delay of {messages} was cut to the {self._cut_to:,} s that remained"
        )

    # -- the actions ---------------------------------------------------------------------------

    def _note(self, action: Action, keys: Iterable[str]) -> None:
        """Records what the next receiver of these messages has to know of them."""
        entries = self._entries
        if action is Action.RETRY:
            failures = {key: entries[key].attempt for key in keys if key in entries}
        elif self._broker.native_attempts:
            return
        else:  # that they were delivered, with the failures on record before
            failures = {key: entries[key].attempt - 1 if key in entries else 0 for key in keys}
        self._folder.failures.note(failures, self._clock.now())

    def _release(self, action: Action, verdicts: dict[str, Verdict]) -> dict[str, Refusal]:
        self._note(action, verdicts)
        return {} if action is Action.LEAVE else self._hide(verdicts)

    def _remove(self, keys: Iterable[str]) -> dict[str, Refusal]:
        handles = self._receipts.handles
        entries = ((key, handles[key]) for key in keys)
        return self._requests.send(self._broker.client.remove, entries, self._is_held)

    def _hide(self, verdicts: dict[str, Verdict]) -> dict[str, Refusal]:
        handles = self._receipts.handles
        longest, cut = self._longest_delay(), 0

        def entries() -> Iterator[Keyed]:
            nonlocal cut
            for key, verdict in verdicts.items():
                delay = math.ceil(verdict.delay)
                if delay > longest:
                    delay, cut = longest, cut + 1
                yield key, Hidden(handles[key], delay)

        refused = self._requests.send(self._broker.client.hide, entries(), self._is_held)
        if cut:
            self._cut += cut
            self._cut_to = longest
        return refused

    def _longest_delay(self) -> int:
        """Returns the seconds for which a message can be hidden at most, as of now."""
        limit, hold = self._broker.max_hide, self._broker.max_hold
        if hold is None:
            return limit
        now = self._clock.now().timestamp()
        since = now if self._receipts.since is None else self._receipts.since
        return min(limit, max(0, math.floor(since + hold - now) - 1))

    def _is_held(self) -> bool:
        """Whether the lease lasts still, by its newest record."""
        now = self._clock.now().timestamp()
        if now >= self._until:
            self._until = self._held_until()
        return now < self._until

    def _send_letters(self, verdicts: dict[str, Verdict]) -> dict[str, Refusal]:
        try:
            target = self._target = self._target or self._broker.dead_letter_target()
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
                letters[key] = target.make(entry)
        for key, reason in guard.refused.items():
            refused[key] = Refusal("", f"{_NO_LETTER}: {reason}")
        publisher = target.publisher
        unsent = self._requests.send_requests(publisher.send, publisher.requests(letters))
        for key, refusal in unsent.items():
            # The code is the letter's, not the receipt's.
            code = refusal.code and f"{publisher.action}: {refusal.code}"
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
            stands = self._done_before(verdicts[key].action, key, refusal)
            if stands is not None:
                done[key] = stands
                self._taken_as_done.add(key)
            elif refusal.gone:
                self._lapsed += 1
                self._note_error(
                    f"{self._broker.service} holds messages no longer for this run"
                    f" ({refusal.code}): they are delivered again, marked as redelivered"
                )
            else:
                self._failed += 1
                self._note_error(str(refusal))

    def _done_before(self, action: Action, key: str, refusal: Refusal) -> Action | None:
        """Returns the action that made a message's receipt void, if that is why."""
        if not refusal.gone or refusal.code == LAPSED.code:
            return None
        earlier = self._receipts.unanswered.get(key)
        if earlier in REMOVES:
            # It was done, though the answer never came: the message is gone for good.
            return earlier
        broker = self._broker
        if action in REMOVES:
            sent = refusal.unclear or self._sent_before
            return action if broker.removes_once and sent else None
        # An earlier settlement, killed since, released it, or the one before it in its group
        # brought it along: it is in flight no more.
        along = broker.ordered_groups and self._receipts.groups.get(key) in self._receipts.blocked
        again = self._resumed or refusal.unclear or earlier is not None or along
        return action if again else None

    def _note_error(self, error: str) -> None:
        if error not in self._errors:
            log.warning("%s", error)
            self._errors.append(error)

    # -- order ---------------------------------------------------------------------------------

    def _held_back(self, verdicts: Mapping[str, Verdict], *, all_of_it: bool) -> dict[str, Verdict]:
        """Returns the verdicts, with those on what follows a message that comes again in its group
        replaced by releases.

        It is handled again after that message, in order.  A failed one is released too: it may have
        failed because the one before it did, and so uses up no attempt.

        :param all_of_it: Whether these are all that are left; before them, callbacks may have
            released others immediately.
        """
        receipts, now = self._receipts, self._clock.now().timestamp()
        made = dict(verdicts)
        if not receipts.groups:
            return made
        held = 0
        receipts.blocked.clear()  # what is before such a message in its group is not behind it
        at_once = receipts.settled_now(now)
        for key in receipts.handles:
            verdict, group = verdicts.get(key) or at_once.get(key), receipts.groups.get(key)
            if verdict is None or group is None:
                continue
            if (
                group in receipts.blocked
                and key not in receipts.done
                and key not in receipts.now
                and verdict.action in HELD_BACK
            ):
                together = self._broker.ordered_groups
                behind = max(0.0, receipts.blocked[group] - now) if together else 0.0
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
    """Groups verdicts by action, in their order."""
    groups: dict[Action, dict[str, Verdict]] = {action: {} for action in Action}
    objects = [*verdicts.values()]
    if objects and objects.count(objects[0]) == len(objects):  # most often all have succeeded
        groups[objects[0].action] = verdicts
        return groups
    for key, verdict in verdicts.items():
        groups[verdict.action][key] = verdict
    return groups
