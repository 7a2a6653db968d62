"""A run in words: whether it fails by its settlements' counts, and its report in sentences.

Pure functions of counts, for the ack sensor, a process task, :class:`BroadwayRunOperator`,
:class:`RunReport` and the command line alike.

A sentence that a task fails with reaches Airflow's notifiers, some of which render it as markup:
it has figures, names of tasks and options, and no text of a message's sender or of a broker.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from airflow_broadway.core.custody.report import CLASSES, SettleReport, handled_of
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.rules import Rule, is_int
from airflow_broadway.core.text import many, printable

#: Reasons that a report names: the most frequent.
SHOWN_REASONS: Final = 10
_NUMBER: Final = re.compile(r"\d+")

#: With fewer handled messages than this, ``"all"`` and a share need a failure that is not retried.
FEW: Final = 10

#: When failed messages make a run fail.
FAIL_WHEN: Final = Rule(
    "'all', 'never', a number of messages, or a share below 1 such as 0.05",
    lambda v: v in ("all", "never") or (is_int(v) and v > 0) or (type(v) is float and 0 < v < 1),
)


def check_fail_when(path: str, value: Any) -> Any:
    """Return ``value`` if it may be a ``fail_when``.

    :raises OptionsError: Otherwise.
    """
    if not FAIL_WHEN.holds(value):
        raise OptionsError(path, FAIL_WHEN.text, value)
    return value


def failures_trouble(totals: Mapping[str, int], fail_when: Any) -> str:
    """Return why a run fails for its failed messages, as a sentence; empty if it does not.

    One message that fails in a quiet queue makes a run red once, when it is out of attempts, and
    not at each attempt: see :data:`FEW`.

    :param totals: The classes of the run's account, and ``failed``.
    :param fail_when: ``"all"``: if every handled message failed.  ``"never"``.  An integer: from so
        many failed messages on.  A float: from that share of the handled ones on.
    """
    failed, handled = totals["failed"], handled_of(totals)
    if fail_when == "never" or failed < 1:
        return ""
    if not is_int(fail_when) and handled < FEW and failed <= totals.get("requeued", 0):
        return ""
    if fail_when == "all":
        met = failed >= handled
    elif is_int(fail_when):
        met = failed >= fail_when
    else:
        met = failed >= fail_when * handled
    if not met:
        return ""
    every = "every message that was handled" if failed >= handled else f"of {_n(handled)} handled"
    return f"{many(failed, 'message')} failed, {every} (fail_when={fail_when!r})"


def settling_trouble(lapsed: int, refused: int, *, halted: int = 0) -> str:
    """Return why a settlement that left messages out makes its run fail; empty if it left out none.

    :param halted: Messages that nobody takes up before people have looked.
    """
    stopped = ""
    if halted:
        stopped = (
            f"{many(halted, 'message')} {'holds' if halted == 1 else 'hold'} up"
            f" {'its' if halted == 1 else 'their'} run: mend the cause; the next run begins there,"
            " and a backfill is cleared to try again"
        )
    parts = []
    if lapsed:
        parts.append(f"{many(lapsed, 'message')} had lapsed before they were settled")
    if refused:
        parts.append(f"{_n(refused)} could not be settled")
    if not parts:
        return stopped
    left_out = " and ".join(parts) + ": they are delivered again, marked as redelivered"
    return f"{left_out}; {stopped}" if stopped else left_out


def merged_reasons(
    counts: Mapping[tuple[str, str], Counter[str]],
) -> dict[tuple[str, str], Counter[str]]:
    """Merges reasons of one stage that differ in their numbers only, and shows … for each number.

    :param counts: Stage and reason → messages, by whatever they are counted apart.
    """
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for stage, reason in counts:
        groups.setdefault((stage, _NUMBER.sub("…", reason)), []).append((stage, reason))
    merged: dict[tuple[str, str], Counter[str]] = {}
    for pattern, keys in groups.items():
        total = Counter[str]()
        for key in keys:
            total.update(counts[key])
        merged[pattern if len(keys) > 1 else keys[0]] = total
    return merged


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """A run's report in sentences: figures first, then reasons, ids last.

    :param report: As the ack sensor keeps it in ``report.json``.
    """
    if report.get("look"):
        return [*look_lines(report["look"]), *_ending_lines(report)]
    totals = report["totals"]
    lines = [summary_line(totals)]
    empty = [each for each in report.get("generations", ()) if "receives" in each]
    lines += dict.fromkeys(map(empty_line, empty))
    if totals.get("failed"):
        batchers = report.get("batchers", {}).items()
        where = [f"{_n(each['failed'])} in batches of {name}" for name, each in batchers]
        where = [text for text in where if not text.startswith("0 ")]
        before = totals["failed"] - sum(each["failed"] for _, each in batchers)
        if before > 0:
            where.insert(0, f"{_n(before)} before any batch")
        shown_where = f": {', '.join(where)}" if batchers else ""
        lines.append(f"{_n(totals['failed'])} failed{shown_where}.")
    reasons = report.get("reasons", [])
    width = max((len(_n(each["count"])) for each in reasons), default=0)
    lines += [
        f"  {_n(each['count']).rjust(width)}  {each['stage'] or '-':7}  {printable(each['reason'])}"
        for each in reasons
    ]
    isolation = report.get("isolation")
    if isolation:
        lines.append(f"{many(isolation['deaths'], 'process')} died at batches.")
        if isolation["interruptions"]:
            killed = many(isolation["interruptions"], "whole task")
            lines.append(f"{killed} died at batches, which tells against no message.")
        lines += [
            f"  {each['batcher']}: {many(each['split'], 'batch')} split,"
            f" {many(each['crashed'], 'message')} set aside (crashed)"
            for each in isolation["batches"]
        ]
    if not report["balanced"] and not report.get("unseen"):
        lines.append(f"{unbalanced_line(totals)}.")
    return [*lines, *_source_lines(report), *_ending_lines(report)]


def empty_line(reference: Mapping[str, Any]) -> str:
    """Say of a process task without a message whether it asked its broker, and the queue's depth.

    :param reference: As the task returns it, or its generation in a report.
    """
    receives, depth = reference["receives"], reference["depth"]
    line = (
        f"No message was received by {many(receives, 'request')}"
        if receives
        else "The broker was not asked for messages"
    )
    line += f" (stopped by {reference['stopped'] or 'an error'})"
    if depth is None:
        return f"{line}; the depth of the queue is not known."
    return f"{line}.  {_depth_line(depth)}"


def _depth_line(depth: Mapping[str, Any]) -> str:
    age = depth["oldest_age"]
    oldest = "" if age is None else f"; the oldest is {age:,.0f} s old"
    return (
        f"The queue: {_n(depth['ready'])} ready, {_n(depth['delayed'])} wait for a retry,"
        f" {_n(depth['leased'])} held by runs{oldest}."
    )


def summary_line(totals: Mapping[str, int]) -> str:
    """Return a run's account as one sentence of figures, fit for a notifier."""
    figures = _classes(totals)
    return f"{many(totals['received'], 'message')} received{figures and f': {figures}'}."


def settled_line(report: SettleReport) -> str:
    """Return what a settlement did, as a sentence."""
    figures = _classes(report.classes())
    return f"Settled {many(report.total, 'message')}{figures and f': {figures}'}."


def dropped_line(dropped: Mapping[str, int]) -> str:
    """Return which columns a schema lacks, and how many messages had each."""
    columns = ", ".join(f"{printable(name)} ({count:,})" for name, count in dropped.items())
    return f"Columns that the schema lacks were dropped: {columns}."


def unbalanced_line(totals: Mapping[str, int]) -> str:
    """Return by how much the account of a run is off."""
    return (
        f"The sum does not balance: {_n(totals['received'])} received,"
        f" {_n(totals['accounted'])} accounted for"
    )


def look_lines(look: Mapping[str, Any]) -> list[str]:
    """What a dry run found, in sentences.

    :param look: As :class:`airflow_broadway.runs.sources.dry_run.DryRun` keeps it.
    """
    messages, depth = look["messages"], look.get("depth")
    lines = ["Dry run: it only looked.  Nothing was received, handled or settled."]
    lines += _source_lines({"source": look["source"], "notes": look["notes"]})
    if look.get("batches") is not None:
        found = f"{many(messages, 'message')} in {many(look['batches'], 'batch')} of the past run"
        lines.append(f"{found} would be handled again.")
    elif messages is None:
        lines.append("How many messages there are, nobody could say: unknown, not none.")
    elif look["at_most"]:
        lines.append(f"A run would take all that is of the interval: {_n(messages)} at most.")
    if look.get("dead_letters") is not None:
        dead = many(look["dead_letters"], "dead letter")
        if look.get("deletes"):
            lines.append(f"A run would delete {dead}, and receive nothing.")
        else:
            lines.append(f"A run would send {dead} back first, and drain the queue behind that.")
    if depth is not None:
        lines.append(_depth_line(depth))
    if depth is not None and messages is not None:
        lines.append(_would_take(messages, look["bounds"], look["producers"]))
    return lines


def _would_take(messages: int, bounds: Mapping[str, Any], producers: int) -> str:
    """What a run would take of a queue with so many messages, by its budgets."""
    most = bounds.get("max_messages")
    taken = messages if most is None else min(messages, most * producers)
    said = ", ".join(f"{name}={value:,}" for name, value in bounds.items())
    of_each = f", of each of {producers} producers" if producers > 1 else ""
    within = f" ({said}{of_each})" if said else ""
    return f"A run now would take {many(taken, 'message')} at most{within}."


def _ending_lines(report: Mapping[str, Any]) -> list[str]:
    """What failed beside messages."""
    return [
        *(f"Failed task: {name}." for name in report.get("failed_tasks", [])),
        *(f"Error: {printable(error)}" for error in report.get("errors", [])),
    ]


def _source_lines(report: Mapping[str, Any]) -> list[str]:
    """Where the messages came from, if not from the queue, and what is missing."""
    source = report.get("source")
    if not source:
        return []
    what = f"Source: {source['kind']}"
    if source.get("interval"):
        what += f", {' to '.join(source['interval'])}"
    if source.get("run_id"):
        what += f" {source['run_id']}"
    return [f"{what}.", *(f"Note: {printable(each)}." for each in report.get("notes", ()))]


def _classes(totals: Mapping[str, int]) -> str:
    return ", ".join(
        f"{_n(totals[name])} {word}" for name, word in CLASSES.items() if totals.get(name)
    )


def _n(number: int) -> str:
    return f"{number:,}"
