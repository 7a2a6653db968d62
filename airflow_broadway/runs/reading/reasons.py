"""Failure reasons of a run's messages, with counts by outcome class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from airflow_broadway.core.custody.report import CLASS_OF
from airflow_broadway.core.custody.run_summary import SHOWN_REASONS, merged_reasons
from airflow_broadway.core.text import pluralize
from airflow_broadway.runs.reading.batches import reads_ahead
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import GenerationRecord

#: Maximum bytes of verdicts read to count reasons while there is no report.
MOST_BYTES: Final = 4 * 1024 * 1024
#: Maximum characters of a reason; longer reasons with the same prefix count as one.
_LENGTH: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A failure reason and its number of messages.

    :param stage: The stage that failed them; empty if unknown.
    :param classes: Outcome class → number of messages; ``None`` if unknown.
    """

    count: int
    stage: str
    reason: str
    classes: Mapping[str, int] | None = None


def reasons_in(
    recorded: Recorded,
    records: Sequence[GenerationRecord],
    batchers: Sequence[str],
    report: Mapping[str, Any] | None,
) -> list[Reason] | None:
    """Counts the reasons in the recorded verdicts if these are small, else reads the report.

    :param report: The run's report, if it covers all generations.
    :returns: The reasons, most frequent first; ``None`` if an active run has too many verdicts.
    """
    plans = [recorded.counted(batcher) for batcher in batchers]
    if all(reads_ahead(recorded, of_batcher) for of_batcher in plans):
        files = _files(recorded, records, batchers)
        size = sum(total["bytes"] for total in files.values() if total)
        if size <= MOST_BYTES and (files or not (report or {}).get("reasons")):
            return _count(recorded, files)
    return None if report is None else [Reason(**row) for row in report["reasons"]]


def count_reasons(
    recorded: Recorded, records: Sequence[GenerationRecord], batchers: Iterable[str]
) -> list[Reason]:
    """Counts the failed messages of a run by reason, without a size limit."""
    return _count(recorded, _files(recorded, records, batchers))


def _files(
    recorded: Recorded, records: Sequence[GenerationRecord], batchers: Iterable[str]
) -> dict[str, Any]:
    """Maps the files with verdicts to their sums."""
    files: dict[str, Any] = {}
    for record in records:
        manifest = recorded.run.manifest(record.generation)
        if manifest is not None:
            files |= {path: manifest.sums.get(path) for path in manifest.entries}
    for batcher in batchers:
        for outcome in recorded.handled(recorded.counted(batcher)):
            if outcome.exceptions is not None:
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
    less_frequent = rows[SHOWN_REASONS:]
    if not less_frequent:
        return rows
    others = Counter[str]()
    for row in less_frequent:
        others.update(row.classes or {})
    more = Reason(
        count=others.total(),
        stage="",
        reason=pluralize(len(less_frequent), "other reason"),
        classes=dict(others),
    )
    return [*rows[:SHOWN_REASONS], more]
