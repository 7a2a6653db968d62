"""The journal of a settled generation: what became of it, written once."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import VERSION, check_version, paths
from airflow_broadway.core.version import __version__
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.store import host_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a generation has come.

    :param received: Messages by the manifest; 0 without one.
    :param staged: Of these, staged for batchers.
    :param decided: Of the staged, those of batches with an outcome.
    :param batches: Batches that hold messages of the generation.
    :param recorded: Of these, those with an outcome.
    :param unplanned: Batchers that have messages of it but no plan.
    :param settled_now: What callbacks settled at once, in processors and batches.
    """

    received: int = 0
    staged: int = 0
    decided: int = 0
    batches: int = 0
    recorded: int = 0
    unplanned: tuple[str, ...] = ()
    settled_now: SettleReport = field(default_factory=SettleReport)


class SettlementJournal(NamedTuple):
    """What became of a settled generation.

    :param report: What settling it did.
    :param settled_now: What callbacks had settled at once, in processors and batches.
    :param received: Messages by its manifest; ``None`` if it published none.
    :param by: Who settled it, for people: a task and its try, or a host.
    :param at: When, in ISO 8601.
    """

    report: SettleReport
    settled_now: SettleReport
    received: int | None
    by: str
    at: str


def settled_journal(run: StagedRun, generation: str) -> SettlementJournal | None:
    """What became of a generation; ``None`` while it is not settled."""
    path = paths.settled(generation)
    try:
        value: dict[str, Any] = json.loads(run.files.read(path))
    except FileNotFoundError:
        return None
    check_version(value, path)
    return SettlementJournal(
        SettleReport.from_json(value["report"]),
        SettleReport.from_json(value["settled_now"]),
        value["received"],
        value["by"],
        value["at"],
    )


def record_settled(
    run: StagedRun,
    record: GenerationRecord,
    report: SettleReport,
    *,
    progress: Progress | None = None,
    by: str = "",
) -> SettlementJournal:
    """Write down what settling a generation did, unless that is written already.

    :returns: What is written now: this call's report, or an earlier one.
    :raises StagingError: If it cannot be written.
    """
    progress = progress or Progress()
    written = {
        "version": VERSION,
        "release": __version__,
        "generation": record.generation,
        "report": replace(report, again=None).to_json(),
        "received": progress.received or None,
        "settled_now": progress.settled_now.to_json(),
        "by": by or host_name(),
        "at": run.clock.now().isoformat(),
    }
    if not run.files.create(paths.settled(record.generation), json.dumps(written)):
        log.info("generation %s: it was settled before, or by another", record.generation)
    journal = settled_journal(run, record.generation)
    if journal is None:
        raise StagingError(f"the journal of generation {record.generation} is gone")
    return journal
