"""The text report of a campaign: a table by stage and kind of call, and the failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from textwrap import wrap

from airflow_broadway.core.text import cut, pluralize, printable, table
from airflow_broadway.testing.crashes.account import Violation
from airflow_broadway.testing.crashes.campaign import Totals
from airflow_broadway.testing.crashes.case import Case, Result

#: Cases reported for each kind of failure, and lines for each case.
_CASES, _LINES = 3, 3
#: Counts → column titles.
_COUNTS = {name: name for name in ("points", "cases", "failed")} | {
    kind.name.lower(): kind.name.lower() for kind in Violation
}
_COUNTS["left"] = "left over"
#: The meaning of each kind of failure, and the way out.
_MEANS: Mapping[Violation, str] = {
    Violation.LOST: "These messages are neither in the queue, nor dead-lettered, nor handled by a"
    " callback that succeeded. That is a defect of airflow-broadway: please report it.",
    Violation.MISSING: "These rows should be in the sink, and are not: write and flush a row before"
    " the callback returns, and make a repeated row replace only itself.",
    Violation.REPEATED: "A message that may have been handled before is handled again. A sink that"
    " is idempotent overwrites it, with message_id as the row's key (INSERT OR REPLACE);"
    " batch_id identifies a batch that is repeated whole, but not a message that is redelivered in"
    " another batch. See docs/testing.md.",
    Violation.UNMARKED: "A message was redelivered without being marked as redelivered. That is a"
    " defect of airflow-broadway: please report it.",
    Violation.LEFT: "These remain after all runs have ended. That is a defect of airflow-broadway:"
    " please report it.",
    Violation.OTHER: "These results differ from a run without faults.",
}


def report(totals: Totals, again: Callable[[Case], str]) -> list[str]:
    """Returns the lines of a report.

    :param again: Returns the command that repeats one case.
    """
    lines = [*_table(totals), ""]
    for kind in Violation:
        failures = [failure for failure in totals.failures if kind in failure.account.violations]
        if failures:
            lines += [*_failures(kind, failures, again), ""]
    if totals.unsteady:
        lines += [*_unsteady(totals), ""]
    total = f"{pluralize(totals.cases, 'case')} at {pluralize(len(totals.points), 'point')}"
    failed = f"{len(totals.failures):,} failed" if totals.failures else "none failed"
    return [*lines, f"{total}: {failed}."]


def _table(totals: Totals) -> list[str]:
    rows: list[list[object]] = [
        [stage, kind, *(part[name] for name in _COUNTS)]
        for (stage, kind), part in totals.parts.items()
    ]
    order = {stage: place for place, (stage, _) in enumerate(reversed(totals.parts))}
    rows.sort(key=lambda row: (-order[str(row[0])], not row[4], str(row[1])))
    whole = ["all", "", *(totals.counts[name] for name in _COUNTS)]
    return table(("stage", "call", *_COUNTS.values()), [*rows, whole])


def _unsteady(totals: Totals) -> Iterator[str]:
    yield from wrap(
        f"Skipped: {pluralize(len(totals.unsteady), 'call')}, made in some runs only, even without"
        " faults. Such calls depend on time, on chance or on other threads.",
        100,
    )
    yield from (f"  {point}" for point in totals.unsteady[:_LINES])
    if len(totals.unsteady) > _LINES:
        yield f"  and {len(totals.unsteady) - _LINES:,} more"


def _failures(
    kind: Violation, failures: list[Result], again: Callable[[Case], str]
) -> Iterator[str]:
    yield from wrap(
        f"{kind.value.capitalize()}, in {pluralize(len(failures), 'case')}. {_MEANS[kind]}", 100
    )
    yield ""
    for failure in failures[:_CASES]:
        yield f"  {failure.case}"
        details = failure.account.violations[kind]
        yield from (f"    {cut(printable(line), 300)}" for line in details[:_LINES])
        if len(details) > _LINES:
            yield f"    and {len(details) - _LINES:,} more"
        yield "    Run just this one again:"
        yield f"      {again(failure.case)}"
    if len(failures) > _CASES:
        yield f"  and {pluralize(len(failures) - _CASES, 'case')} more"
