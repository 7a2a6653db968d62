"""Carries out one settlement at the broker: turns verdicts into requests.

The order of requests makes a kill at any point safe.  Dead letters are sent before their originals
are removed.  Attempts are recorded before a message can be redelivered.  Progress is recorded in
waves, so that the next settlement resumes from there.
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
from airflow_broadway.core.text import pluralize
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
_NO_LETTER: Final = "a dead letter cannot be made of a message, which is redelivered"
#: Actions after which the message is removed for good.
REMOVES: Final = (Action.ACK, Action.DEAD_LETTER)
#: Actions after which the message is redelivered; retries first, as they precede later messages.
_RELEASES: Final = (Action.RETRY, Action.RELEASE, Action.LEAVE)
#: The minimum number of messages after which a settlement records its progress.
_WAVE: Final = 2000


def plan_for(receipts: Receipts, lease: Lease, settlement: Settlement) -> tuple[Plan, SettleReport]:
    """Compares receipts, the source's lease and the manifest.

    :returns: The verdicts, and a report of messages that are no longer held, or whose receipts are
        missing.
    :raises ProducerError: If all others are to be acknowledged and the manifest does not list them.
    """
    lost = receipts.lost
    at_once = 0 if settlement.settled_now is None else settlement.settled_now.total
    named = None if settlement.expected is None else settlement.expected + at_once
    written = max(named or 0, int(lease.state.get("messages") or 0))
    missing = max(0, written - len(receipts.handles))
    agree = named == len(receipts.handles) and not missing
    plan = plan_of(receipts.held(), settlement, at_once=receipts.now, agree=agree)
    report = SettleReport(lapsed=max(len(plan.absent | lost), missing + len(lost)))
    if missing and receipts.handles:
        error = (
            f"the receipts of {pluralize(missing, 'message')} are missing in the staging folder:"
            " they are not settled, and are redelivered when the lease lapses"
        )
        report += SettleReport(errors=(error,))
    return plan, report


#: Sends the requests for some verdicts; returns the refusals.
_Step = Callable[[dict[str, Verdict]], dict[str, Refusal]]


class EngineSettlement:
    """Carries out verdicts on the messages of one generation; used from one thread.

    :param held_until: Returns the current deadline of the generation.  After it no request is sent,
        because the broker might still accept an expired receipt.
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
        #: Whether an earlier settlement was interrupted.
        self._resumed = receipts.resumed
        #: Whether the interrupted settlement may have sent the requests of this wave.
        self._sent_before = False
        self._errors: list[str] = []
        #: Message id → action carried out so far.
        self.done: dict[str, Action] = {}
        #: Messages whose receipt was invalid at a second request, which counts as done.
        self._taken_as_done: set[str] = set()
        self._entries: Mapping[str, Entry] = {}
        self._target: DeadLetterTarget | None = None
        self._lapsed = 0
        self._failed = 0
        #: The number of messages whose delay was reduced, and the reduced delay in seconds.
        self._cut = 0
        self._cut_to = 0

    # -- a settlement --------------------------------------------------------------------------

    def carry_out(
        self, planned: Mapping[str, Verdict], entries: Mapping[str, Entry], *, note: bool
    ) -> dict[str, Action]:
        """Carries out verdicts; returns the completed actions, also in :attr:`done` after an error.

        :param planned: Message id → verdict, in order of arrival.
        :param entries: Message id → entry, of some of them.
        :param note: Whether to record progress.
        :raises ProducerUnavailable: If the broker is unreachable; another call resumes.
        """
        receipts, self._entries = self._receipts, entries
        verdicts = self._hold_back(planned, all_of_it=note)
        if note:
            self._apply_earlier_plan(verdicts)
        in_waves = note and len(verdicts) > self._wave
        for key in receipts.done.keys() & verdicts.keys():  # by an interrupted settlement
            self.done[key] = receipts.done[key]
            del verdicts[key]
        keys = list(verdicts)
        for start in range(0, len(keys), self._wave):
            if note and start and receipts.ended():
                break  # another process has settled it meanwhile, and its report is valid
            self._sent_before = self._resumed and not start
            fresh = self._carry_out(
                {key: verdicts[key] for key in keys[start : start + self._wave]}
            )
            if in_waves:
                receipts.note_done(fresh)
        if not self._broker.native_attempts:
            # There is no other record by which the next receiver recognizes a redelivery.
            doubtful = [key for key in planned if key not in self.done]
            self._note(Action.RELEASE, [*doubtful, *(self._taken_as_done & planned.keys())])
        return self.done

    def _apply_earlier_plan(self, verdicts: dict[str, Verdict]) -> None:
        """Releases the messages that an interrupted settlement has released, or had planned to.

        Their outcomes may have been recorded since, but a release cannot be undone.
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
        """Carries out one wave: sends dead letters, removes messages in order, then releases."""
        fresh: dict[str, Action] = {}
        by_action = _by_action(verdicts)
        removed, letters = by_action[Action.ACK], by_action[Action.DEAD_LETTER]
        if letters:
            unsent = self._send_step(letters, self._send_letters)
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
        for group, step in steps:
            refused = self._send_step(group, step)
            fresh.update(
                {key: verdict.action for key, verdict in group.items() if key not in refused}
            )
            self._count_refused(refused, group, fresh)
            self.done.update(fresh)
        return fresh

    def _send_step(self, verdicts: dict[str, Verdict], step: _Step) -> dict[str, Refusal]:
        """Sends requests and returns the refusals; records requests without a response."""
        if not verdicts:
            return {}
        try:
            return step(verdicts)
        except ProducerUnavailable:
            for key, verdict in verdicts.items():
                self._receipts.unanswered.setdefault(key, verdict.action)
            raise

    def report(self, done: Iterable[Action]) -> SettleReport:
        """Returns the report of completed actions and refusals."""
        if self._cut:
            self._note_error(self._why_cut())
        return report_of(done, lapsed=self._lapsed, failed=self._failed, errors=self._errors)

    def _why_cut(self) -> str:
        service, messages = self._broker.service, pluralize(self._cut, "message")
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
        """Records the failures of messages for their next receiver."""
        entries = self._entries
        if action is Action.RETRY:
            failures = {key: entries[key].attempt for key in keys if key in entries}
        elif self._broker.native_attempts:
            return
        else:  # the delivery counts, and the recorded failures stay the same
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
        """Returns the maximum seconds for which a message can currently be hidden."""
        limit, hold = self._broker.max_hide, self._broker.max_hold
        if hold is None:
            return limit
        now = self._clock.now().timestamp()
        since = now if self._receipts.since is None else self._receipts.since
        return min(limit, max(0, math.floor(since + hold - now) - 1))

    def _is_held(self) -> bool:
        """Returns whether the lease is still valid by its newest record."""
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
        dead_letters: dict[str, Any] = {}
        refused: dict[str, Refusal] = {}
        for key in verdicts:
            entry = self._entries.get(key)
            if entry is None or entry.payload is None:
                refused[key] = Refusal("", _NO_BODY)
                continue
            with guard.isolate(key):
                dead_letters[key] = target.make(entry)
        for key, reason in guard.refused.items():
            refused[key] = Refusal("", f"{_NO_LETTER}: {reason}")
        publisher = target.publisher
        unsent = self._requests.send_requests(publisher.send, publisher.requests(dead_letters))
        for key, refusal in unsent.items():
            # The code belongs to the dead letter, not to the receipt.
            code = refusal.code and f"{publisher.action}: {refusal.code}"
            refused[key] = Refusal(code, refusal.text)
        # If an original cannot be removed, its dead letter remains and it is redelivered.
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
            elif refusal.invalid:
                self._lapsed += 1
                self._note_error(
                    f"{self._broker.service} holds messages no longer for this run"
                    f" ({refusal.code}): they are delivered again, marked as redelivered"
                )
            else:
                self._failed += 1
                self._note_error(str(refusal))

    def _done_before(self, action: Action, key: str, refusal: Refusal) -> Action | None:
        """Returns the earlier action that made a receipt invalid; ``None``: another cause."""
        if not refusal.invalid or refusal.code == LAPSED.code:
            return None
        earlier = self._receipts.unanswered.get(key)
        if earlier in REMOVES:
            # It was carried out, though the response was lost: the message is removed.
            return earlier
        broker = self._broker
        if action in REMOVES:
            sent = refusal.unclear or self._sent_before
            return action if broker.removes_once and sent else None
        # An interrupted settlement released it, or the broker released it with an earlier message
        # of its group: it is no longer in flight.
        along = broker.ordered_groups and self._receipts.groups.get(key) in self._receipts.blocked
        again = self._resumed or refusal.unclear or earlier is not None or along
        return action if again else None

    def _note_error(self, error: str) -> None:
        if error not in self._errors:
            log.warning("%s", error)
            self._errors.append(error)

    # -- order ---------------------------------------------------------------------------------

    def _hold_back(self, verdicts: Mapping[str, Verdict], *, all_of_it: bool) -> dict[str, Verdict]:
        """Replaces verdicts by releases for messages that follow a redelivered one of their group.

        They are handled again after that message, in order.  A failed message is released too and
        uses up no attempt: the failure before it may be the cause.

        :param all_of_it: Whether these are all remaining messages of the generation; callbacks may
            have released others before.
        """
        receipts, now = self._receipts, self._clock.now().timestamp()
        result = dict(verdicts)
        if not receipts.groups:
            return result
        released = 0
        receipts.blocked.clear()  # only messages behind a redelivered one are blocked
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
                in_order = self._broker.ordered_groups
                behind = max(0.0, receipts.blocked[group] - now) if in_order else 0.0
                result[key] = RELEASE._replace(delay=behind)
                released += 1
            elif verdict.action in COMES_AGAIN:
                is_left = verdict.action is Action.LEAVE
                until = self._held_until() if is_left else now + verdict.delay
                if key in verdicts and not all_of_it:
                    receipts.again[key] = until
                receipts.blocked[group] = max(until, receipts.blocked.get(group, 0.0))
        if released:
            log.info(
                "%s behind a redelivered message of their group: released, to be handled again in"
                " order.",
                pluralize(released, "message"),
            )
        return result


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
