"""What processes died of, at a broker of receipts: handled alone, at last set aside unhandled."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import SUSPECTS, Entry, Lease, Settlement
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kit.receipts.polls import Received
from airflow_broadway.producers.kit.receipts.receipts import KEPT_REPORTS, ReceiptsFolder
from airflow_broadway.producers.kit.state_files import day_of
from airflow_broadway.producers.kit.suspects import divide, is_suspect, why_crashed

__all__ = ["Isolation", "Sorted"]

log = logging.getLogger(__name__)


class Sorted(NamedTuple):
    """What becomes of what was received; message ids.

    :param take: Handled now.
    :param later: For a later run.
    :param crashed: Set aside now.
    """

    take: Sequence[str]
    later: Sequence[str] = ()
    crashed: Sequence[str] = ()


class Isolation:
    """Keeps what processes died of apart from all else, for one generation."""

    def __init__(self, producer: Producer, env: ProducerEnv, folder: ReceiptsFolder) -> None:
        self._producer, self._env, self._folder = producer, env, folder
        deaths = folder.deaths.everything(env.clock.now(), producer.max_crashes)
        #: Whether there may be suspects: then it looks for them first.
        self.searches = any(is_suspect(each, producer.max_crashes) for each in deaths.values())
        #: Whether the generation holds suspects, and must take nothing else.
        self.alone = False
        #: Messages that were set aside, and how often that was tried.
        self.set_aside = self._tries = 0
        #: Groups of which something was put off: what follows it waits, too.
        self._waiting: set[str] = set()

    def sorted(
        self, keys: Sequence[str], groups: Mapping[str, str], *, fresh: bool, now: datetime
    ) -> Sorted:
        """Which messages of a portion the generation may handle.

        :param keys: Message ids, in order of arrival.
        :param groups: Message id → the group in which it keeps its order, if any.
        :param fresh: Whether it holds nothing yet.
        """
        found = self._divided(keys, groups, fresh=fresh, now=now)
        if found.take is keys and not self._waiting:  # as nearly always
            return Sorted(keys, [])
        wanted, crashed = set(found.take), set(found.crashed)
        take: list[str] = []
        later: list[str] = []
        for key in keys:
            group = groups.get(key)
            if key in crashed:
                continue
            if key in wanted and group not in self._waiting:
                take.append(key)
                continue
            later.append(key)
            if group is not None:
                self._waiting.add(group)
        return Sorted(take, later, found.crashed)

    def _divided(
        self, keys: Sequence[str], groups: Mapping[str, str], *, fresh: bool, now: datetime
    ) -> Sorted:
        most = self._producer.max_crashes
        deaths = self._folder.deaths.of(keys, now, most)
        suspects = {key: count for key, count in deaths.items() if is_suspect(count, most)}
        if not suspects:
            return Sorted(keys)
        first = _in_turn(keys, groups, suspects, self._waiting)
        division = divide(
            first or list(suspects),
            deaths.__getitem__,
            room=len(suspects),
            fresh=fresh and bool(first),  # else they wait, and so would all else
            max_crashes=most,
        )
        others = [key for key in keys if not is_suspect(deaths.get(key, 0), most)]
        if division is None:
            return Sorted(others)
        if not division.alone:
            return Sorted(others, (), division.crashed)
        self.alone = True
        log.warning(
            "Processes died of %s and others, %d times: a portion of %d is handled, and nothing"
            " else in this run.",
            division.take[0],
            deaths[division.take[0]],
            len(division.take),
        )
        return Sorted(division.take, (), division.crashed)

    def make_letters(
        self, messages: Sequence[Message], received: Mapping[str, Received], lease: Lease
    ) -> None:
        """Make dead letters of messages, by a generation of their own.

        :param received: What they were made of, by message id.
        :param lease: The source's.
        """
        now = self._env.clock.now()
        generation = f"{lease.generation}.crashed.{self._tries}"
        self._tries += 1
        held = self._folder.open(generation, day_of(now, before=KEPT_REPORTS))
        ids = [message.message_id for message in messages]
        handles = {key: received[key].receipt for key in ids}
        until = now.timestamp() + lease.seconds
        held.write(handles, {}, now.timestamp(), until)
        held.add(handles, {}, now.timestamp(), until)
        deaths = self._folder.deaths.of(ids, now, self._producer.max_crashes)
        entries = [_letter(message, deaths[message.message_id]) for message in messages]
        state = {**lease.state, "messages": len(ids), "since": None, SUSPECTS: True}
        own = replace(lease, generation=generation, state=state)
        custodian = self._producer.custodian(replace(self._env, generation=generation))
        try:
            report = custodian.settle(
                own, Settlement(rest=RELEASE, entries=lambda: iter(entries), expected=len(ids))
            )
        finally:
            custodian.close()
            self._folder.close(generation)
        self.set_aside += report.dead_lettered
        for error in report.errors:
            log.error("What crashed its processes stays in the queue: %s", error)
        for entry in entries[: report.dead_lettered]:
            log.error("%s is set aside: %s.", entry.message_id, entry.verdict.reason)


def _in_turn(
    keys: Sequence[str],
    groups: Mapping[str, str],
    suspects: Mapping[str, int],
    waiting: Collection[str],
) -> list[str]:
    """The suspects that are behind nothing else of their group, the worst first.

    One in front of a worse one of its group comes with that one: it has to be taken before.

    :param waiting: Groups of which something was put off before.
    """
    behind = set(waiting)
    first: list[str] = []
    for key in keys:
        group = groups.get(key)
        if key in suspects and group not in behind:
            first.append(key)
        elif group is not None:
            behind.add(group)
    worst: dict[str, int] = {}
    weights: dict[str, int] = {}
    for key in reversed(first):
        group = groups.get(key, key)
        weights[key] = worst[group] = max(suspects[key], worst.get(group, 0))
    return sorted(first, key=weights.__getitem__, reverse=True)


def _letter(message: Message, deaths: int) -> Entry:
    verdict = Verdict(Action.DEAD_LETTER, 0.0, why_crashed(deaths), "process")
    entry = entry_of(message, verdict)
    if entry.payload is None and isinstance(message.data, bytes):
        entry = entry._replace(payload=message.data)  # the option keeps none, for it sends none
    return entry
