"""The hosts that have used a staging root."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import SHARED
from airflow_broadway.runs.reading.runs import find_run, list_runs
from airflow_broadway.staging.errors import SETTING
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.store import Store, host_name

#: Notes of checks, one file per host.
_HOSTS = f"{SHARED}/hosts"
#: Runs whose hosts are read.
_RUNS = 20


def probe_root(store: Store) -> None:
    """Writes, reads and removes a file, and leaves a note that this host has done so.

    :raises StagingError: If the root cannot be used, or does not refuse to create a file twice.
    """
    store.root_id()
    notes, probe = store.folder(_HOSTS), f"probe-{uuid.uuid4().hex}"
    text = json.dumps({"host": host_name(), "at": datetime.now(UTC).isoformat()})
    try:
        created = notes.create(probe, text)
        if not created or notes.create(probe, "") or notes.read(probe) != text:
            raise StagingError(
                f"the staging root {store.uri} does not return a file as it was created, or creates"
                f" it twice: set {SETTING} to a disk or a store with conditional writes"
            )
    finally:
        notes.remove(probe)
    notes.replace(f"{encode_name(host_name())}.json", text)


def hosts_of(store: Store) -> dict[str, str]:
    """Returns when each host last used the root: by its checks, and as a worker of recent runs.

    :returns: ISO 8601 timestamps by host name, the latest first.
    :raises StagingError: If the root cannot be read.
    """
    notes = store.folder(_HOSTS)
    paths = [path for path in notes.list("") if path.endswith(".json")]
    read = [json.loads(text) for _, text in notes.read_all(paths) if text]
    used = [(str(note["at"]), str(note["host"])) for note in read]
    for summary in list_runs(store, newest=_RUNS)[0]:
        run = find_run(store, summary.dag_id, summary.run_id, summary.pipeline)
        used += [(record.opened_at, record.host) for record in run.generations()]
    latest = {host: at for at, host in sorted(used)}
    return dict(sorted(latest.items(), key=lambda item: item[1], reverse=True))
