"""What a campaign found, for people: a table by stage and kind of call, and the failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from textwrap import wrap

from airflow_broadway.core.text import cut, many, printable, table
from airflow_broadway.testing.crashes.account import Wrong
from airflow_broadway.testing.crashes.campaign import Failure, Sums
from airflow_broadway.testing.crashes.case import Case

#: Cases that are told of each kind of failure, and lines of each.
_CASES, _LINES = 3, 3
_COUNTS = {
    "points": "points",
    "cases": "cases",
    "failed": "failed",
    "lost": "lost",
    "missing": "missing",
    "repeated": "repeated",
    "unmarked": "unmarked",
    "left": "left over",
    "other": "other",
}
#: What each kind of failure means, and what to do.
_MEANS: Mapping[Wrong, str] = {
    Wrong.LOST: "Nobody has these messages: neither the queue, nor a dead letter, nor a callback"
    " that succeeded. That is a defect of airflow-broadway: please report it.",
    Wrong.MISSING: "These rows should be in the sink, and are not: write and flush a row before the"
    " callback returns, and let a row that comes again replace only itself.",
    Wrong.REPEATED: "A message that may have been handled before is handled again. A sink that is"
    " idempotent writes it over itself, with message_id as the row's key (INSERT OR REPLACE);"
    " batch_id knows a batch that comes again whole, but not a message that comes again in another."
    " See docs/testing.md.",
    Wrong.UNMARKED: "A message came again, and did not say so. That is a defect of"
    " airflow-broadway: please report it.",
    Wrong.LEFT: "These remain when all runs are over. That is a defect of airflow-broadway: please"
    " report it.",
    Wrong.OTHER: "These came out otherwise than without a strike.",
}


def report(sums: Sums, again: Callable[[Case], str]) -> list[str]:
    """The lines of a report.

    :param again: What runs just one case again.
    """
    lines = [*_table(sums), ""]
    for kind in Wrong:
        failures = [each for each in sums.failures if kind in each.wrong]
        if failures:
            lines += [*_failures(kind, failures, again), ""]
    if sums.unsteady:
        lines += [*_unsteady(sums), ""]
    said = f"{many(sums.cases, 'case')} at {many(len(sums.points), 'point')}"
    failed = f"{len(sums.failures):,} failed" if sums.failures else "none failed"
    return [*lines, f"{said}: {failed}."]


def _table(sums: Sums) -> list[str]:
    whole: Counter[str] = Counter()
    rows: list[list[object]] = []
    for (stage, kind), part in sums.parts.items():
        whole.update(part)
        rows.append([stage, kind, *(part[name] for name in _COUNTS)])
    order = {stage: place for place, (stage, _) in enumerate(reversed(sums.parts))}
    rows.sort(key=lambda row: (-order[str(row[0])], not row[4], str(row[1])))
    return table(
        ("stage", "call", *_COUNTS.values()), [*rows, ["all", "", *(whole[n] for n in _COUNTS)]]
    )


def _unsteady(sums: Sums) -> Iterator[str]:
    yield from wrap(
        f"Not struck: {many(len(sums.unsteady), 'call')}, made in some runs only, where nothing is"
        " struck. What depends on time, on chance or on other threads makes such calls.",
        100,
    )
    yield from (f"  {each}" for each in sums.unsteady[:_LINES])
    if len(sums.unsteady) > _LINES:
        yield f"  and {len(sums.unsteady) - _LINES:,} more"


def _failures(kind: Wrong, failures: list[Failure], again: Callable[[Case], str]) -> Iterator[str]:
    yield from wrap(
        f"{kind.value.capitalize()}, in {many(len(failures), 'case')}. {_MEANS[kind]}", 100
    )
    yield ""
    for failure in failures[:_CASES]:
        yield f"  {failure.case}"
        told = failure.wrong[kind]
        yield from (f"    {cut(printable(each), 300)}" for each in told[:_LINES])
        if len(told) > _LINES:
            yield f"    and {len(told) - _LINES:,} more"
        yield "    Run just this one again:"
        yield f"      {again(failure.case)}"
    if len(failures) > _CASES:
        yield f"  and {many(len(failures) - _CASES, 'case')} more"
