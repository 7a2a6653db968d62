"""Why messages failed, and what is done with them: retried, dead letters, or else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from airflow_broadway.core.custody.report import CLASS_OF
from airflow_broadway.core.custody.run_summary import SHOWN_REASONS, merged_reasons
from airflow_broadway.runs.view.batches import reads_ahead
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import GenerationRecord

#: Bytes of verdicts that are read to count reasons before a report says them.
MOST_BYTES: Final = 4 * 1024 * 1024
#: Characters of a reason by which it is told from others.
_LENGTH: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A reason for which messages failed.

    :param stage: The stage that failed them; empty if that is not known.
    :param classes: Class of the account → how many of them; ``None`` where the report alone is
        read, which does not say.
    """

    count: int
    stage: str
    reason: str
    classes: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """The most frequent reasons first.

    :param known: Whether these are all: of a run that goes on, verdicts may be too many to read.
    """

    rows: Sequence[Reason]
    known: bool


def reasons_in(
    recorded: Recorded,
    records: Sequence[GenerationRecord],
    batchers: Sequence[str],
    report: Mapping[str, Any] | None,
) -> Reasons:
    """The reasons in what is recorded, if that is little, else in the report.

    :param report: The run's report, if it tells of all that is recorded.
    """
    files = _files(recorded, records, batchers)
    if files is not None and (files or not (report or {}).get("reasons")):
        return Reasons(rows=_counted(recorded, files), known=True)
    if report is None:
        return Reasons(rows=(), known=False)
    return Reasons(rows=[Reason(**each) for each in report["reasons"]], known=True)


def _files(
    recorded: Recorded, records: Sequence[GenerationRecord], batchers: Sequence[str]
) -> dict[str, Any] | None:
    """The files with verdicts, and their sums; ``None`` if they are too large."""
    files: dict[str, Any] = {}
    size = 0
    for record in records:
        manifest = recorded.run.manifest(record.generation)
        for path in () if manifest is None else manifest.entries:
            files[path] = manifest.sums.get(path) if manifest else None
    for batcher in batchers:
        plans = recorded.counted(batcher)
        if not reads_ahead(recorded, plans):
            return None
        for plan in plans:
            for _, outcome in recorded.outcomes(plan):
                if outcome is not None and outcome.exceptions is not None:
                    files[outcome.exceptions] = outcome.entries_sum
    for total in files.values():
        size += total["bytes"] if total else 0
    return files if size <= MOST_BYTES else None


def _counted(recorded: Recorded, files: Mapping[str, Any]) -> list[Reason]:
    recorded.keep(files)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for path, total in files.items():
        for line in recorded.entries(path, total):
            verdict = line.entry.verdict
            if verdict.reason:
                key = verdict.stage, verdict.reason[:_LENGTH]
                counts.setdefault(key, Counter())[CLASS_OF[verdict.action]] += 1
    rows = [
        Reason(count=classes.total(), stage=stage, reason=reason, classes=dict(classes))
        for (stage, reason), classes in merged_reasons(counts).items()
    ]
    rows.sort(key=lambda row: -row.count)
    rest = rows[SHOWN_REASONS:]
    if not rest:
        return rows
    others = Counter[str]()
    for row in rest:
        others.update(row.classes or {})
    more = Reason(
        count=others.total(), stage="", reason=f"{len(rest):,} other reasons", classes=dict(others)
    )
    return [*rows[:SHOWN_REASONS], more]
