"""Builds reports of settlements from counts of actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_broadway.core.custody.protocol import Lease, Settlement
from airflow_broadway.core.custody.report import CLASS_OF, SettleReport
from airflow_broadway.core.custody.verdicts import Action


def report_of(
    actions: Mapping[Action, int] | Iterable[Action],
    *,
    lapsed: int = 0,
    failed: int = 0,
    errors: Iterable[str] = (),
) -> SettleReport:
    """Builds the report of completed actions.

    :param actions: The count of each action; or the action of each message.
    :param errors: Error texts; duplicates are removed.
    """
    counts: dict[str, Any] = {CLASS_OF[action]: count for action, count in Counter(actions).items()}
    return SettleReport(**counts, lapsed=lapsed, failed=failed, errors=tuple(dict.fromkeys(errors)))


def beyond(at_once: SettleReport, settlement: Settlement) -> SettleReport:
    """Returns the immediately settled messages that are missing in the settlement's own report.

    :param at_once: The report of all ``settle_now`` calls, by the producer's own record.
    """
    known = settlement.settled_now
    if known is None:
        return SettleReport()
    more = {name: getattr(at_once, name) - getattr(known, name) for name in CLASS_OF.values()}
    return SettleReport(**{name: count for name, count in more.items() if count > 0})


def about_set_aside(lease: Lease) -> tuple[str, ...]:
    """Describes received messages that reached no callback."""
    words = {
        "bundle": "bundles: move them back into their holding queue",
        "oversized": "too large",
    }
    return tuple(
        f"dead letters, unprocessed, next to those received: {count} ({words.get(kind, kind)})"
        for kind, count in sorted(lease.state.get("set_aside", {}).items())
    )
