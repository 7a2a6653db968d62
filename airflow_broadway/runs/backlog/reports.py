"""The last reported depth of a pipeline's queues, one small file per pipeline and Dag.

Every task, trigger or sensor that reads the depth replaces the file.  The pages of the API server
display it with its time and read the producer's options from it, so they import no pipeline code.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import BroadwayError, StagingError
from airflow_broadway.core.formats.layout import VERSION, read_json
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.version import __version__
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.staging.run_folder import dag_folder
from airflow_broadway.staging.store import READERS, Store

log = logging.getLogger(__name__)

#: The file's name in the folder of a pipeline's Dag; no run's folder begins with ``_``.
_FILE: Final = "_backlog.json"


class PipelineKey(NamedTuple):
    """A pipeline of a Dag."""

    pipeline: str
    dag_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogReport:
    """The depth of a pipeline's queues at one time.

    :param at: Time of the measurement; aware UTC.
    :param by: The task, trigger or sensor that measured it, such as ``"run manual__1"``.
    :param depth: ``None`` if the broker reports none.
    :param queues: The producers' options, as :meth:`WatchedQueues.dumps` writes them; empty if
        they cannot be serialized.
    :param withheld: The reason why they cannot, as a sentence; empty if they can.
    """

    at: datetime
    by: str
    depth: QueueDepth | None
    queues: str = ""
    withheld: str = ""

    def dumps(self) -> str:
        """Returns the report as JSON for :meth:`loads`."""
        value = {
            "version": VERSION,
            "release": __version__,
            "at": self.at.isoformat(),
            "by": self.by,
            "depth": None if self.depth is None else self.depth._asdict(),
            "queues": self.queues,
            "withheld": self.withheld,
        }
        return json.dumps(value, indent=1, sort_keys=True)

    @classmethod
    def loads(cls, text: str, path: str) -> BacklogReport:
        """Parses the output of :meth:`dumps`.

        :raises StagingError: If a newer release wrote it, or it is damaged.
        """
        value = read_json(text, path)
        try:
            depth, at = value["depth"], datetime.fromisoformat(value["at"])
            if at.utcoffset() is None:
                raise ValueError(f"{value['at']!r} has no time zone")
            return cls(
                at=at,
                by=str(value["by"]),
                depth=None if depth is None else _depth(depth),
                queues=str(value["queues"]),
                withheld=str(value["withheld"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise StagingError(f"{path} is damaged: {error}; the next run replaces it") from None


def _depth(value: Mapping[str, Any]) -> QueueDepth:
    counts = {name: int(value[name]) for name in ("ready", "delayed", "leased", "dead")}
    age = None if value["oldest_age"] is None else float(value["oldest_age"])
    if min(counts.values()) < 0 or not (age is None or 0.0 <= age < math.inf):
        raise ValueError(f"{dict(value)} is no depth")
    return QueueDepth(**counts, oldest_age=age)


def report_backlog(
    store: Store,
    dag_id: str,
    queues: WatchedQueues,
    depth: QueueDepth | None,
    *,
    at: datetime,
    by: str,
) -> None:
    """Replaces the report of a pipeline; logs any failure, since nothing depends on it."""
    try:
        try:
            options, withheld = queues.dumps(), ""
        except BroadwayError as error:
            options, withheld = "", str(error)
        report = BacklogReport(at=at, by=by, depth=depth, queues=options, withheld=withheld)
        dag_folder(store, queues.pipeline, dag_id).replace(_FILE, report.dumps())
    except Exception as error:
        log.warning("%s", unreported(error))


def unreported(error: Exception) -> str:
    """Formats the log line about a depth that could not be reported."""
    kind, text = type(error).__name__, redacted(str(error))
    return f"The depth of the queue could not be reported to the pages: {kind}: {text}"


def read_reports(
    store: Store, keys: Iterable[PipelineKey]
) -> dict[PipelineKey, BacklogReport | StagingError]:
    """Returns the last report of each pipeline, or its error if it is unreadable; one read each."""
    pipelines = list(keys)
    with ThreadPoolExecutor(READERS, "broadway-reports") as pool:
        reports = zip(pipelines, pool.map(partial(_read, store), pipelines), strict=True)
        return {key: report for key, report in reports if report is not None}


def _read(store: Store, key: PipelineKey) -> BacklogReport | StagingError | None:
    path = f"{dag_folder(store, *key).path}/{_FILE}"
    try:
        return BacklogReport.loads(store.folder("").read(path), path)
    except FileNotFoundError:
        return None
    except StagingError as error:
        return error
