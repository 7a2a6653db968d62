"""From a settlement to one verdict for each message that a lease holds, and to its report.

:func:`plan_of` decides.  The others carry out besides, for a broker that can do each verdict by
itself and twice without harm.  They write down first what they are about to do, so that whoever
settles after a kill does the same, and reports the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.generation_log import GenerationLog
from airflow_broadway.producers.kit.reports import beyond, report_of

__all__ = ["CarryOut", "Plan", "end_by_log", "plan_of", "settle_by_log", "settle_now_by_log"]

#: Carries verdicts out, by message id.
CarryOut = Callable[[Mapping[str, Verdict]], object]


class Plan(NamedTuple):
    """What becomes of the messages of one generation.

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
    """The verdict on each message that is held.

    What was received and is in no manifest was never handled: it must not get the verdict of the
    rest, and is given back.

    :param held: The ids of the messages that the lease still holds.
    :param at_once: The ids of those that ``settle_now`` has settled under it.
    :param agree: Whether manifest and lease are known to name the same messages; then
        ``settlement.everything``, which is long, is not read.
    :raises ProducerError: If the others are not all to be given back, and nobody says which those
        are that were handled.
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
        verdicts = {each: settlement.rest if each in handled else RELEASE for each in held}
    for key, entry in entries.items():
        if key in verdicts:
            verdicts[key] = entry.verdict
    gone = frozenset(each for each in named if each not in verdicts and each not in at_once)
    return Plan(verdicts, entries, gone)


def settle_by_log(
    log: GenerationLog, held: Collection[str], settlement: Settlement, carry_out: CarryOut
) -> SettleReport:
    """Settle a generation: what :meth:`Custodian.settle` promises.

    :param held: The ids of the messages that its lease holds.
    :param carry_out: As for :func:`end_by_log`.
    :raises ProducerError: As :func:`plan_of`.
    """
    settled = log.settled()
    if settled is not None:
        return settled.report
    at_once = log.now()
    plan = plan_of([each for each in held if each not in at_once], settlement, at_once=at_once)
    report = report_of(
        (verdict.action for verdict in plan.verdicts.values()), lapsed=len(plan.gone)
    )
    report += beyond(report_of(at_once.values()), settlement)
    done = at_once | {key: verdict.action for key, verdict in plan.verdicts.items()}
    report = replace(report, again=ComingAgain.of(done, whole=not plan.gone))
    # What was noted at once may still be held, if its process was killed in between.
    early = {each: Verdict(action) for each, action in at_once.items()}
    return end_by_log(log, report, {**early, **plan.verdicts}, carry_out)


def end_by_log(
    log: GenerationLog,
    report: SettleReport,
    verdicts: Mapping[str, Verdict],
    carry_out: CarryOut,
) -> SettleReport:
    """End a generation: by this report and these verdicts, or by those of whoever began before.

    :param carry_out: Carries out the verdicts that stand, and gives back whatever else the lease
        holds; nothing is held when it returns.
    """
    steps = {key: list(verdict) for key, verdict in verdicts.items()}
    plan = log.begin({"report": report.to_json(), "verdicts": steps})
    stands = {
        key: Verdict(Action(action), delay, reason, stage)
        for key, (action, delay, reason, stage) in plan["verdicts"].items()
    }
    carry_out(stands)
    return log.end(SettleReport.from_json(plan["report"])).report


def settle_now_by_log(
    log: GenerationLog, held: Collection[str], entries: Iterable[Entry], carry_out: CarryOut
) -> SettleReport:
    """Settle some messages and keep the lease: what :meth:`Custodian.settle_now` promises.

    :param held: The ids of the messages that the lease holds.
    :param carry_out: Carries out these verdicts.
    """
    given = {entry.message_id: entry.verdict for entry in entries}
    before = log.now()
    fresh = {key: each for key, each in given.items() if key in held and key not in before}
    log.note_now({key: verdict.action for key, verdict in fresh.items()})
    carry_out(fresh)
    done = before | {key: verdict.action for key, verdict in fresh.items()}
    undone = frozenset(given.keys() - done.keys())
    report = report_of(done[key] for key in given if key in done)
    return report + SettleReport(lapsed=len(undone), undone=undone)
