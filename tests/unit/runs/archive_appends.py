"""Appends messages to an archive, a generation at a time: ``STORE FIRST LAST [--announce]``."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime

from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import Archive
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.staging.archive.table import append, archive_folder, partition_of
from airflow_broadway.staging.archive.writer import ArchiveWriter
from airflow_broadway.staging.store import Store

NOW = datetime(2013, 1, 1, tzinfo=UTC)


def append_message(store: Store, number: int) -> None:
    own, archive = store.folder("own"), archive_folder(store, "p")
    producer = SqliteProducer(queue="q", path="/none")
    generation = f"{number:032x}"
    message = Message(b"%d" % number, message_id=generation, received_at=NOW)
    with ArchiveWriter(own, f"{generation}/{os.getpid()}", producer, Archive()) as writer:
        writer.add([message])
        [file] = writer.close()
    target = f"{partition_of(file.hour)}/{generation}-00000.parquet"
    own.copy(file.path, archive, target)
    append(archive, generation, [file._replace(path=target)], NOW)


def main(uri: str, first: str, last: str, *announce: str) -> None:
    store = Store.open(uri)
    for number in range(int(first), int(last)):
        append_message(store, number)
        if announce:
            store.folder("").replace("began", "")


if __name__ == "__main__":
    main(*sys.argv[1:])
