"""Computes the verdict on each message of a lease from a settlement."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import pluralize


class Plan(NamedTuple):
    """The verdicts on the messages of one generation.

    :param verdicts: Message id → verdict, for each held message, in order of arrival.
    :param entries: Message id → entry, for messages with an entry in the settlement.
    :param absent: Ids in the settlement that are neither held nor settled immediately.
    """

    verdicts: Mapping[str, Verdict]
    entries: Mapping[str, Entry]
    absent: frozenset[str]


def plan_of(
    held: Collection[str],
    settlement: Settlement,
    *,
    at_once: Collection[str] = (),
    agree: bool = False,
) -> Plan:
    """Returns the verdict on each held message.

    A received message that is in no manifest was never handled.  So it is released, and does not
    get the verdict ``settlement.rest``.

    :param held: The ids of the messages that the lease still holds.
    :param at_once: The ids of messages that ``settle_now`` has settled under the lease.
    :param agree: Whether manifest and lease are known to name the same messages; then the long
        ``settlement.everything`` is not read.
    :raises ProducerError: If ``settlement.rest`` is not a release, and the settlement does not
        list the handled messages.
    """
    entries = {entry.message_id: entry for entry in settlement.entries()}
    named = set(entries)
    # Most share one verdict object: a generation may hold millions of messages.
    verdicts = dict.fromkeys(held, settlement.rest)
    if settlement.rest.action is not Action.RELEASE and not agree:
        if settlement.everything is None:
            raise ProducerError(
                f"the lease holds {pluralize(len(held), 'message')} and its manifest names"
                f" {settlement.expected}: none was settled; all are redelivered when it lapses"
            )
        handled = {entry.message_id for entry in settlement.everything()}
        named |= handled
        verdicts = {key: settlement.rest if key in handled else RELEASE for key in held}
    for key, entry in entries.items():
        if key in verdicts:
            verdicts[key] = entry.verdict
    absent = frozenset(key for key in named if key not in verdicts and key not in at_once)
    return Plan(verdicts, entries, absent)
