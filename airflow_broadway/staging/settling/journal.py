"""The journal of a settled generation, written once."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.layout import VERSION, check_version
from airflow_broadway.core.version import __version__
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.store import host_name

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Progress:
    """The progress of a generation.

    :param received: Messages by the manifest; 0 without one.
    :param staged: Messages staged for batchers.
    :param decided: Staged messages in batches with an outcome.
    :param batches: Batches with messages of the generation.
    :param recorded: Batches among these with an outcome.
    :param unplanned: Batchers with messages of it but without a plan.
    :param settled_now: Messages settled immediately by callbacks, in processors and batches.
    """

    received: int = 0
    staged: int = 0
    decided: int = 0
    batches: int = 0
    recorded: int = 0
    unplanned: tuple[str, ...] = ()
    settled_now: SettleReport = field(default_factory=SettleReport)


class SettlementJournal(NamedTuple):
    """The result of a settled generation.

    :param report: The report of the settlement.
    :param settled_now: Messages settled immediately by callbacks, in processors and batches.
    :param received: Messages by its manifest; ``None`` without one.
    :param by: The host that settled it.
    :param at: Time in ISO 8601.
    """

    report: SettleReport
    settled_now: SettleReport
    received: int | None
    by: str
    at: str


def settled_journal(run: StagedRun, generation: str) -> SettlementJournal | None:
    """Reads the journal of a generation; ``None`` while it is not settled."""
    path = paths.settled(generation)
    try:
        value: dict[str, Any] = json.loads(run.read_once(path))
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


def settling_record(run: StagedRun, record: GenerationRecord, **values: Any) -> str:
    """Returns a file of a generation's settlement as JSON."""
    header = {"version": VERSION, "release": __version__, "generation": record.generation}
    signature = {"by": host_name(), "at": run.clock.now().isoformat()}
    return json.dumps({**header, **values, **signature})


def record_settled(
    run: StagedRun,
    record: GenerationRecord,
    report: SettleReport,
    *,
    progress: Progress | None = None,
) -> SettlementJournal:
    """Writes the journal of a generation unless there is one.

    :returns: The journal, written by this call or an earlier one.
    :raises StagingError: If it cannot be written.
    """
    progress = progress or Progress()
    text = settling_record(
        run,
        record,
        report=replace(report, again=None).to_json(),
        received=progress.received or None,
        settled_now=progress.settled_now.to_json(),
    )
    if not run.create_once(paths.settled(record.generation), text):
        log.info("generation %s: it was settled before or by another process", record.generation)
    journal = settled_journal(run, record.generation)
    if journal is None:
        raise StagingError(f"the journal of generation {record.generation} is missing")
    return journal
