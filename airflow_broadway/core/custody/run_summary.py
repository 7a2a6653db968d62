"""A run in sentences: whether its settlement counts fail it, and its report as text and Markdown.

Pure functions of counts, used by the ack sensor, process tasks, :class:`BroadwayRunOperator`,
:class:`RunReport` and the command line.

A sentence that fails a task reaches Airflow's notifiers, some of which render it as markup: it
contains counts and names of tasks and options, and no text from a message's sender or a broker.

In Markdown, for the file next to ``report.json`` and for the page of a run, text from outside is
escaped and cannot add markup.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from airflow_broadway.core.custody.report import APPLIED, CLASSES, SettleReport, handled_of
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.rules import Rule, is_int
from airflow_broadway.core.text import pluralize, printable

#: The number of reasons in a report: the most frequent ones.
SHOWN_REASONS: Final = 10
_NUMBER: Final = re.compile(r"\d+")

#: With fewer handled messages than this, ``"all"`` and a share need a failure that is not retried.
FEW: Final = 10

#: The values of ``fail_when``: the failed messages that fail a run.
FAIL_WHEN: Final = Rule(
    "'all', 'never', a number of messages, or a share below 1 such as 0.05",
    lambda v: v in ("all", "never") or (is_int(v) and v > 0) or (type(v) is float and 0 < v < 1),
)


def check_fail_when(path: str, value: Any) -> Any:
    """Returns ``value`` if it is a valid ``fail_when``.

    :raises OptionsError: Otherwise.
    """
    if not FAIL_WHEN.holds(value):
        raise OptionsError(path, FAIL_WHEN.text, value)
    return value


def failures_trouble(totals: Mapping[str, int], fail_when: Any) -> str:
    """Returns why failed messages fail the run, as a sentence; empty if they do not.

    A single failing message in a quiet queue fails a run once, when its attempts are used up, and
    not at each attempt: see :data:`FEW`.

    :param totals: The classes of the run's account, and ``failed``.
    :param fail_when: ``"all"``: if every handled message failed.  ``"never"``.  An integer: at that
        number of failed messages.  A float: at that share of the handled messages.
    """
    failed, handled = totals["failed"], handled_of(totals)
    if fail_when == "never" or failed < 1:
        return ""
    if not is_int(fail_when) and handled < FEW and failed <= totals.get("requeued", 0):
        return ""
    share = 1.0 if fail_when == "all" else fail_when
    if failed < (share if is_int(share) else share * handled):
        return ""
    every = "every message that was handled" if failed >= handled else f"of {_n(handled)} handled"
    return f"{pluralize(failed, 'message')} failed, {every} (fail_when={fail_when!r})"


def settling_trouble(lapsed: int, refused: int, *, halted: int = 0) -> str:
    """Returns why a settlement with unsettled messages fails its run; empty if all are settled.

    :param halted: Messages that block their queue until an operator intervenes.
    """
    stopped = ""
    if halted:
        stopped = (
            f"{pluralize(halted, 'message')} {'holds' if halted == 1 else 'hold'} up"
            f" {'its' if halted == 1 else 'their'} run: mend the cause; the next run begins there,"
            " and a backfill is cleared to try again"
        )
    parts = []
    if lapsed:
        parts.append(f"{pluralize(lapsed, 'message')} had lapsed before they were settled")
    if refused:
        parts.append(f"{_n(refused)} could not be settled")
    if not parts:
        return stopped
    left_out = " and ".join(parts) + ": they are delivered again, marked as redelivered"
    return f"{left_out}; {stopped}" if stopped else left_out


def merged_reasons(
    counts: Mapping[tuple[str, str], Counter[str]],
) -> dict[tuple[str, str], Counter[str]]:
    """Merges reasons of one stage that differ in their numbers only; replaces each number by ….

    :param counts: Stage and reason → messages, counted by any key.
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
    """Renders a run's report in sentences: counts first, then reasons, ids last.

    :param report: As the ack sensor keeps it in ``report.json``.
    """
    if report.get("look"):
        return [*look_lines(report["look"]), *_ending_lines(report)]
    totals = report["totals"]
    lines = [summary_line(totals)]
    empty = [row for row in report.get("generations", ()) if "receives" in row]
    lines += dict.fromkeys(map(empty_line, empty))
    if totals.get("failed"):
        batchers = report.get("batchers", {}).items()
        failing = [(name, row["failed"]) for name, row in batchers if row["failed"]]
        where = [f"{_n(failed)} in batches of {name}" for name, failed in failing]
        before = totals["failed"] - sum(failed for _, failed in failing)
        if before > 0:
            where.insert(0, f"{_n(before)} before any batch")
        breakdown = f": {', '.join(where)}" if batchers else ""
        lines.append(f"{_n(totals['failed'])} failed{breakdown}.")
    lines += [
        f"{pluralize(totals[name], 'message')} {text}."
        for name, text in APPLIED.items()
        if totals.get(name)
    ]
    reasons = report.get("reasons", [])
    width = max((len(_n(row["count"])) for row in reasons), default=0)
    lines += [
        f"  {_n(row['count']).rjust(width)}  {row['stage'] or '-':7}  {printable(row['reason'])}"
        for row in reasons
    ]
    isolation = report.get("isolation")
    if isolation:
        lines.append(f"{pluralize(isolation['deaths'], 'process')} died at batches.")
        if isolation["interruptions"]:
            killed = pluralize(isolation["interruptions"], "whole task")
            lines.append(f"{killed} died at batches, which counts against no message.")
        lines += [
            f"  {row['batcher']}: {pluralize(row['split'], 'batch')} split,"
            f" {pluralize(row['crashed'], 'message')} dead-lettered (crashed)"
            for row in isolation["batches"]
        ]
    if not report["balanced"] and not report.get("unseen"):
        lines.append(f"{unbalanced_line(totals)}.")
    return [*lines, *_source_lines(report), *_ending_lines(report)]


def empty_line(reference: Mapping[str, Any]) -> str:
    """Describes a process task without messages: its receives, and the queue's depth.

    :param reference: The task's return value, or its generation in a report.
    """
    receives, depth = reference["receives"], reference["depth"]
    line = (
        f"No message was received by {pluralize(receives, 'request')}"
        if receives
        else "No messages were requested from the broker"
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
    """Returns a run's account as one sentence of counts, safe for a notifier."""
    figures = _classes(totals)
    return f"{pluralize(totals['received'], 'message')} received{figures and f': {figures}'}."


def settled_line(report: SettleReport) -> str:
    """Returns the result of a settlement, as a sentence."""
    figures = _classes(report.classes())
    return f"Settled {pluralize(report.total, 'message')}{figures and f': {figures}'}."


def dropped_line(dropped: Mapping[str, int]) -> str:
    """Returns which columns the schema lacks, and how many messages had each."""
    columns = ", ".join(f"{printable(name)} ({count:,})" for name, count in dropped.items())
    return f"Columns that the schema lacks were dropped: {columns}."


def unbalanced_line(totals: Mapping[str, int]) -> str:
    """Returns the imbalance of a run's account, as a sentence."""
    return (
        f"The sum does not balance: {_n(totals['received'])} received,"
        f" {_n(totals['accounted'])} accounted for"
    )


def look_lines(look: Mapping[str, Any]) -> list[str]:
    """Renders the result of a dry run in sentences.

    :param look: As written by :class:`airflow_broadway.runs.sources.dry_run.DryRun`.
    """
    messages, depth = look["messages"], look.get("depth")
    lines = ["Dry run: it only looked.  Nothing was received, handled or settled."]
    lines += _source_lines({"source": look["source"], "notes": look["notes"]})
    if look.get("batches") is not None:
        selected = f"{pluralize(messages, 'message')} in {pluralize(look['batches'], 'batch')}"
        lines.append(f"{selected} of the past run would be handled again.")
    elif messages is None:
        lines.append("The number of messages is unknown: it could not be counted, and is not zero.")
    elif look["at_most"]:
        lines.append(f"A run would take all messages of the interval: {_n(messages)} at most.")
    if look.get("dead_letters") is not None:
        dead = pluralize(look["dead_letters"], "dead letter")
        if look.get("deletes"):
            lines.append(f"A run would delete {dead}, and receive nothing.")
        else:
            lines.append(f"A run would send {dead} back first, and drain the queue behind that.")
    if depth is not None:
        lines.append(_depth_line(depth))
    if depth is not None and messages is not None:
        lines.append(_demand_line(messages, look["bounds"], look["producers"]))
    return lines


def _demand_line(messages: int, bounds: Mapping[str, Any], producers: int) -> str:
    """Returns how many messages of a queue a run would take within its budgets."""
    most = bounds.get("max_messages")
    taken = messages if most is None else min(messages, most * producers)
    budgets = ", ".join(f"{name}={value:,}" for name, value in bounds.items())
    of_each = f", of each of {producers} producers" if producers > 1 else ""
    within = f" ({budgets}{of_each})" if budgets else ""
    return f"A run now would take {pluralize(taken, 'message')} at most{within}."


def _ending_lines(report: Mapping[str, Any]) -> list[str]:
    """Returns failures other than of messages: tasks and errors."""
    return [
        *(f"Failed task: {name}." for name in report.get("failed_tasks", [])),
        *(f"Error: {printable(error)}" for error in report.get("errors", [])),
    ]


def _source_lines(report: Mapping[str, Any]) -> list[str]:
    """Returns the messages' source, if not the queue, and notes on gaps."""
    source = report.get("source")
    if not source:
        return []
    what = f"Source: {source['kind']}"
    if source.get("interval"):
        what += f", {' to '.join(source['interval'])}"
    if source.get("run_id"):
        what += f" {source['run_id']}"
    return [f"{what}.", *(f"Note: {printable(note)}." for note in report.get("notes", ()))]


def _classes(totals: Mapping[str, int]) -> str:
    return ", ".join(
        f"{_n(totals[name])} {word}" for name, word in CLASSES.items() if totals.get(name)
    )


def _n(number: int) -> str:
    return f"{number:,}"


# -- Markdown ------------------------------------------------------------------------------------

#: Characters that Markdown may interpret, besides HTML.
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]()#+\-.!|~:@/])")


def plain(text: object) -> str:
    """Escapes text from outside: one line, without Markdown markup, links or HTML."""
    return _SPECIAL.sub(r"\\\1", html.escape(printable(text), quote=False))


def markdown_of(report: Mapping[str, Any]) -> str:
    """Renders the report: summary, then counts, reasons, batchers, executions.

    :param report: As the ack sensor keeps it in ``report.json``.
    """
    classes = [
        {"class": name, "messages": report["totals"].get(key)}
        for key, name in {"received": "received", **CLASSES}.items()
    ]
    batchers = [{"name": name, **row} for name, row in sorted(report.get("batchers", {}).items())]
    title = f"Run {plain(report['run_id'])} of the Dag {plain(report['dag_id'])}"
    parts = [
        f"# {plain(report['pipeline'])}",
        f"{title}, accounted for at {plain(report['at'])}.",
        "\n".join(f"- {plain(line)}" for line in lines_of(report) if not line.startswith("  ")),
        *_table("Messages", _MESSAGES, [row for row in classes if row["messages"] is not None]),
        *_table("Reasons", _REASONS, report.get("reasons", ())),
        *_table("Batchers", _BATCHERS, batchers),
        *_table("Executions", _EXECUTIONS, list(map(_execution, report.get("generations", ())))),
    ]
    return "\n\n".join(parts) + "\n"


#: The columns of each table: title → key of a row.
_MESSAGES: Final = {"Class": "class", "Messages": "messages"}
_REASONS: Final = {"Messages": "count", "Stage": "stage", "Reason": "reason"}
_BATCHERS: Final = {
    "Batcher": "name",
    "Batches": "batches",
    "Messages": "messages",
    "Failed messages": "failed",
    "Seconds": "seconds",
}
_EXECUTIONS: Final = {
    "Generation": "generation",
    "Task": "task",
    "Try": "try_number",
    "Received": "received",
    "Stopped by": "stopped",
}


def _execution(row: Mapping[str, Any]) -> dict[str, Any]:
    index = f"[{row['map_index']}]" if row["map_index"] >= 0 else ""
    return {**row, "task": row["task_id"] + index}


def _table(head: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Renders a table with a heading; nothing if it has no rows."""
    if not rows:
        return []
    keys = columns.values()
    numeric = [all(isinstance(row[key], int | float) for row in rows) for key in keys]
    lines = [list(columns), ["--:" if right else "---" for right in numeric]]
    lines += [[_cell(row[key]) for key in keys] for row in rows]
    return [f"## {head}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else plain(value)
