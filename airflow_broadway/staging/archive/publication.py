"""Publishes a generation's messages to the archive atomically at its settlement.

Messages that the broker will redeliver are excluded, by the custodian's report and not by the
requested verdicts: the execution that finally settles them archives them.  So each message is in
the archive once, however often it was delivered.  A broker may still redeliver settled messages;
readers drop duplicate ids.

A dead letter was settled and is in the archive.  If it is requeued under another id, it is there
under both ids, and the later one has the final outcome.  So ``again`` lists the dead letters, and
readers drop these.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Collection, Iterator

from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.formats.layout import VERSION
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.text import many
from airflow_broadway.staging.archive.layout import (
    AGAIN,
    BEGUN,
    COLUMNS,
    Index,
    archive_folder,
    digest_of,
    index_path,
    partition_of,
    put_index,
)
from airflow_broadway.staging.archive.writer import Archived, id_column
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import ParquetFile, TableFiles

log = logging.getLogger(__name__)


def publish(
    run: StagedRun, record: GenerationRecord, manifest: Manifest, report: SettleReport
) -> None:
    """Publishes a generation's messages to the archive atomically; idempotent.

    Of several calls the first index is final.

    :param report: The report of the settlement.
    :raises StagingError: If the archive cannot be written.
    """
    again = report.again or ComingAgain()
    if again.all_but and not again.ids:
        return
    archive = archive_folder(run.store, run.pipeline)
    if archive.exists(index_path(record.generation)):
        return
    archived = Archived.from_json(manifest.archived)
    files: dict[str, int] = {}
    hours: set[int] = set()
    for number, (path, hour, rows) in enumerate(archived.files):
        name = f"{partition_of(hour)}/{record.generation}-{number:05d}"
        try:
            placed = _publish_file(run.files, path, archive, name, again, rows)
        except FileNotFoundError:
            log.error("%s of the archive is lost: %s was removed.", many(rows, "message"), path)
            continue
        if placed[1]:
            files[placed[0]] = placed[1]
            hours.add(hour)
    if files:
        _record_begin(archive, record)
        _write_index(archive, run, record, files, hours, archived)


def _publish_file(
    own: Folder, path: str, archive: Folder, name: str, again: ComingAgain, rows: int
) -> tuple[str, int]:
    """Copies a file without messages to be redelivered; returns its path and message count."""
    if again.ids:
        # A concurrent settler may exclude other messages, so each has its own files.
        return _copy_filtered(own, path, archive, f"{name}-{uuid.uuid4().hex[:8]}", again)
    target = f"{name}.parquet"
    if not archive.exists(target):
        own.copy(path, archive, target)
    return target, rows


def _copy_filtered(
    own: Folder, path: str, archive: Folder, stem: str, again: ComingAgain
) -> tuple[str, int]:
    files = TableFiles(archive, stem, COLUMNS, whole=True)
    named = id_column(sorted(again.ids))
    rows = 0
    try:
        with ParquetFile(own, path) as file:
            for group in range(file.groups):
                table = file.read(group)
                mask = pc.is_in(table["message_id"], value_set=named)
                kept = table.filter(mask if again.all_but else pc.invert(mask))
                if kept.num_rows:
                    files.write([kept])
                    rows += kept.num_rows
        files.close()
    finally:
        files.abort()
    return (files.paths or [""])[0], rows


def _record_begin(archive: Folder, record: GenerationRecord) -> None:
    """Records the begin of the archive unless it is recorded."""
    if not archive.exists(BEGUN):
        begun = {"version": VERSION, "since": record.opened_at}
        archive.create(BEGUN, json.dumps(begun))


def _write_again(archive: Folder, record: GenerationRecord, files: Collection[str]) -> str:
    """Records the messages that were dead letters, with digest of the payload and file."""
    path = f"{AGAIN}/{record.generation}-{uuid.uuid4().hex[:8]}.jsonl"
    archive.write_lines(path, _iter_again(archive, files))
    return path


def _iter_again(archive: Folder, files: Collection[str]) -> Iterator[str]:
    for path in files:
        with ParquetFile(archive, path) as file:
            for group in range(file.groups):
                table = file.read(group, ["was", "payload"])
                for row in table.filter(pc.is_valid(table["was"])).to_pylist():
                    yield json.dumps([row["was"], digest_of(row["payload"]), path])


def _write_index(
    archive: Folder,
    run: StagedRun,
    record: GenerationRecord,
    files: dict[str, int],
    hours: Collection[int],
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
        again=_write_again(archive, record, files) if archived.again else "",
    )
    if put_index(archive, index, hours):
        count = many(sum(files.values()), "message")
        log.info("Generation %s: %s archived.", record.generation, count)
