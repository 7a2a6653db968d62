"""From a generation's own folder to the archive: when it is settled, and at once.

What its broker delivers again is left out: the execution that settles it for good archives it.  So
each message is in the archive once, however often it was delivered.  A message of which the broker
only said that it was not settled (its lease had lapsed, or the broker refused) may come again all
the same; readers drop an id that they have seen.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, COMES_AGAIN
from airflow_broadway.core.formats.layout import VERSION
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.text import many
from airflow_broadway.staging.archive.layout import (
    BEGUN,
    COLUMNS,
    Index,
    archive_folder,
    index_path,
    partition_of,
)
from airflow_broadway.staging.archive.writer import Archived
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import ParquetFile, TableFiles

__all__ = ["ComingAgain", "coming_again", "publish"]

log = logging.getLogger(__name__)


class ComingAgain(NamedTuple):
    """The messages of a generation that its broker delivers again.

    :param everything: Whether all of them do.
    """

    ids: frozenset[str]
    everything: bool = False


def coming_again(settlement: Settlement, *, void: bool = False) -> ComingAgain:
    """What a settlement leaves to the broker.  Memory holds the ids of these.

    :param void: Whether verdicts count no more, and only what was settled at once is settled.
    """
    if settlement.rest == ACK and not void:
        return ComingAgain(frozenset(_ids(settlement.entries(), again=True)))
    at_once = settlement.settled_now
    if settlement.everything is None or (void and not (at_once and at_once.total)):
        return ComingAgain(frozenset(), everything=True)
    left = {entry.message_id for entry in settlement.everything()}
    if not void:
        left.difference_update(_ids(settlement.entries(), again=False))
    return ComingAgain(frozenset(left))


def _ids(entries: Iterable[Entry], *, again: bool) -> Iterator[str]:
    return (each.message_id for each in entries if (each.verdict.action in COMES_AGAIN) is again)


def publish(
    run: StagedRun,
    record: GenerationRecord,
    manifest: Manifest,
    again: ComingAgain,
    report: SettleReport,
) -> None:
    """Put a generation's messages into the archive, to be seen there together; safe to repeat.

    Of several calls the first index stands.

    :param report: What settling it did.
    :raises StagingError: If the archive cannot be written.
    """
    at_once = SettleReport.from_json(manifest.settled_now)
    if again.everything or not (report + at_once).final:
        return
    archive = archive_folder(run.store, run.pipeline)
    if archive.exists(index_path(record.generation)):
        return
    archived = Archived.from_json(manifest.archived)
    files: dict[str, int] = {}
    for number, (path, hour, rows) in enumerate(archived.files):
        name = f"{partition_of(hour)}/{record.generation}-{number:05d}"
        try:
            placed = _place(run.files, path, archive, name, again.ids, rows)
        except FileNotFoundError:
            log.error(
                "%s of the archive is lost: somebody has removed %s.", many(rows, "message"), path
            )
            continue
        if placed[1]:
            files[placed[0]] = placed[1]
    if files:
        _begin(archive, record)
        _index(archive, run, record, files, archived)


def _place(
    own: Folder, path: str, archive: Folder, name: str, left: frozenset[str], rows: int
) -> tuple[str, int]:
    """One file, without what comes again: its path in the archive, and its messages."""
    if left:
        # Another settler may leave out others: only the files that its own index names are its own.
        return _copy_without(own, path, archive, f"{name}-{uuid.uuid4().hex[:8]}", left)
    target = f"{name}.parquet"
    if not archive.exists(target):
        own.copy(path, archive, target)
    return target, rows


def _copy_without(
    own: Folder, path: str, archive: Folder, stem: str, left: frozenset[str]
) -> tuple[str, int]:
    files = TableFiles(archive, stem, COLUMNS, whole=True)
    unwanted = array_of(sorted(left), pa.string())
    rows = 0
    try:
        with ParquetFile(own, path) as file:
            for group in range(file.groups):
                table = file.read(group)
                kept = table.filter(pc.invert(pc.is_in(table["message_id"], value_set=unwanted)))
                if kept.num_rows:
                    files.write([kept])
                    rows += kept.num_rows
        files.close()
    finally:
        files.abort()
    return (files.paths or [""])[0], rows


def _begin(archive: Folder, record: GenerationRecord) -> None:
    """Note when the archive was begun, unless that is noted."""
    if not archive.exists(BEGUN):
        begun = {"version": VERSION, "since": record.opened_at}
        archive.create(BEGUN, json.dumps(begun))


def _index(
    archive: Folder,
    run: StagedRun,
    record: GenerationRecord,
    files: dict[str, int],
    archived: Archived,
) -> None:
    index = Index(
        generation=record.generation,
        dag_id=run.dag_id,
        run_id=run.run_id,
        files=files,
        untimed=archived.untimed,
        why=archived.why,
        at=run.clock.now().isoformat(),
    )
    if archive.create(index_path(record.generation), index.dumps()):
        count = many(sum(files.values()), "message")
        log.info("Generation %s: %s archived.", record.generation, count)
