"""Decides, by a settlement, the verdict on each message that a lease holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import many


class Plan(NamedTuple):
    """The verdicts on the messages of one generation.

    :param verdicts: Message id → verdict, of each message that is held, in the order given.
    :param entries: Message id → entry, of those that the settlement names one by one.
    :param gone: Ids that the settlement names, and that are neither held nor settled at once.
    """

    verdicts: Mapping[str, Verdict]
    entries: Mapping[str, Entry]
    gone: frozenset[str]


def plan_of(
    held: Collection[str],
    settlement: Settlement,
    *,
    at_once: Collection[str] = (),
    agree: bool = False,
) -> Plan:
    """Returns the verdict on each message that is held.

    A message that was received and is in no manifest was never handled: it must not get the verdict
    of the rest, and is released.

    :param held: The ids of the messages that the lease still holds.
    :param at_once: The ids of those that ``settle_now`` has settled under it.
    :param agree: Whether manifest and lease are known to name the same messages; then
        ``settlement.everything``, which is long, is not read.
    :raises ProducerError: If the others are not all to be released, and the settlement does not
        name those that were handled.
    """
    entries = {entry.message_id: entry for entry in settlement.entries()}
    named = set(entries)
    # One object for most of them: a generation may hold millions.
    verdicts = dict.fromkeys(held, settlement.rest)
    if settlement.rest.action is not Action.RELEASE and not agree:
        if settlement.everything is None:
            raise ProducerError(
                f"the lease holds {many(len(held), 'message')} and its manifest names"
                f" {settlement.expected}: none was settled, and all come back when the lease lapses"
            )
        handled = {entry.message_id for entry in settlement.everything()}
        named |= handled
        verdicts = {key: settlement.rest if key in handled else RELEASE for key in held}
    for key, entry in entries.items():
        if key in verdicts:
            verdicts[key] = entry.verdict
    gone = frozenset(key for key in named if key not in verdicts and key not in at_once)
    return Plan(verdicts, entries, gone)
