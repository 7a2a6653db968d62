"""Publishes a generation's messages to the archive atomically at its settlement.

Messages that the broker will redeliver are excluded, by the custodian's report and not by the
requested verdicts: the execution that finally settles them archives them.  So each message is in
the archive once, however often it was delivered.  A broker may still redeliver settled messages;
readers drop duplicate ids.

A dead letter was settled and is in the archive.  If it is requeued under another id, it is there
under both ids, and the later one has the final outcome.  So readers drop the former, which the
column ``was`` of the later one names.
"""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import suppress

from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.text import pluralize
from airflow_broadway.staging.archive.table import (
    COLUMNS,
    DataFile,
    append,
    archive_folder,
    has_appended,
    open_table,
    partition_of,
    sync_log,
)
from airflow_broadway.staging.archive.writer import data_files, id_column
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import ParquetFile, TableFiles

log = logging.getLogger(__name__)


def publish(
    run: StagedRun, record: GenerationRecord, manifest: Manifest, report: SettleReport
) -> None:
    """Publishes a generation's messages to the archive atomically; idempotent.

    Of several calls the first commit is final.

    :param report: The report of the settlement.
    :raises StagingError: If the archive cannot be written.
    """
    again = report.again or ComingAgain()
    if again.all_but and not again.ids:
        return
    archive = archive_folder(run.store, run.pipeline)
    table = open_table(archive)
    if has_appended(table, record.generation):
        sync_log(archive)  # its writer may have been killed before it did
        return
    files: list[DataFile] = []
    for number, entry in enumerate(manifest.archived):
        file = DataFile(*entry)
        target = f"{partition_of(file.hour)}/{record.generation}-{number:05d}"
        try:
            files += _place_file(run.files, file, archive, target, again)
        except FileNotFoundError:
            count = pluralize(file.rows, "message")
            log.error("%s of the archive is lost: %s was removed.", count, file.path)
    if files and append(archive, record.generation, files, run.clock.now(), table):
        count = pluralize(sum(file.rows for file in files), "message")
        log.info("Generation %s: %s archived.", record.generation, count)


def _place_file(
    own: Folder, file: DataFile, archive: Folder, target: str, again: ComingAgain
) -> list[DataFile]:
    """Places a file in the archive without messages to be redelivered; none if none is left."""
    if again.ids:
        # A concurrent settler may exclude other messages, so each has its own files.
        return _place_filtered(own, file, archive, f"{target}-{uuid.uuid4().hex[:8]}", again)
    placed = file._replace(path=f"{target}.parquet")
    if archive.store.local:  # VACUUM removes files by their age; a link is as old as its file
        for folder, path in ((own, file.path), (archive, placed.path)):
            with suppress(FileNotFoundError):
                os.utime(folder.full(path))
    if not archive.exists(placed.path):
        own.copy(file.path, archive, placed.path)
    return [placed]


def _place_filtered(
    own: Folder, file: DataFile, archive: Folder, stem: str, again: ComingAgain
) -> list[DataFile]:
    files = TableFiles(archive, stem, COLUMNS, whole=True)
    named = id_column(sorted(again.ids))
    try:
        with ParquetFile(own, file.path) as source:
            for group in range(source.groups):
                table = source.read(group)
                mask = pc.is_in(table["message_id"], value_set=named)
                table = table.filter(mask if again.all_but else pc.invert(mask))
                if table.num_rows:
                    files.write([table])
        files.close()
    finally:
        files.abort()
    return data_files({file.hour: files})
