"""Why messages failed, and what is done with them: retried, dead letters, or else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from airflow_broadway.core.custody.report import CLASS_OF
from airflow_broadway.core.custody.run_summary import SHOWN_REASONS, merged_reasons
from airflow_broadway.core.text import many
from airflow_broadway.runs.reading.batches import reads_ahead
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import GenerationRecord

#: Bytes of verdicts that are read to count reasons before a report says them.
MOST_BYTES: Final = 4 * 1024 * 1024
#: Characters of a reason; longer ones that begin alike count as one.
_LENGTH: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A reason for which messages failed.

    :param stage: The stage that failed them; empty if that is not known.
    :param classes: Class of the account → how many of them; ``None`` where that is not known.
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
    plans = [recorded.counted(batcher) for batcher in batchers]
    if all(reads_ahead(recorded, of_batcher) for of_batcher in plans):
        files = _files(recorded, records, batchers)
        size = sum(total["bytes"] for total in files.values() if total)
        if size <= MOST_BYTES and (files or not (report or {}).get("reasons")):
            return Reasons(rows=_count(recorded, files), known=True)
    if report is None:
        return Reasons(rows=(), known=False)
    return Reasons(rows=[Reason(**each) for each in report["reasons"]], known=True)


def count_reasons(
    recorded: Recorded, records: Sequence[GenerationRecord], batchers: Iterable[str]
) -> list[Reason]:
    """Count the messages of a run that failed by reason, however many they are."""
    return _count(recorded, _files(recorded, records, batchers))


def _files(
    recorded: Recorded, records: Sequence[GenerationRecord], batchers: Iterable[str]
) -> dict[str, Any]:
    """The files with verdicts, and their sums."""
    files: dict[str, Any] = {}
    for record in records:
        manifest = recorded.run.manifest(record.generation)
        if manifest is not None:
            files |= {path: manifest.sums.get(path) for path in manifest.entries}
    for batcher in batchers:
        for plan in recorded.counted(batcher):
            for _, outcome in recorded.outcomes(plan):
                if outcome is not None and outcome.exceptions is not None:
                    files[outcome.exceptions] = outcome.entries_sum
    return files


def _count(recorded: Recorded, files: Mapping[str, Any]) -> list[Reason]:
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
        count=others.total(),
        stage="",
        reason=many(len(rest), "other reason"),
        classes=dict(others),
    )
    return [*rows[:SHOWN_REASONS], more]
