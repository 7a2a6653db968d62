"""Reads an interval of the archive as the source of a run.

No broker holds these messages.  So the lease never lapses, and settlement is only recorded in the
run's journal.  Failed messages are stored next to the archive, and only another run of the interval
redelivers them.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, cast

import pyarrow as pa

from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import (
    Custodian,
    Delivery,
    Entry,
    Lease,
    QueueDepth,
    Settlement,
    Source,
)
from airflow_broadway.core.custody.report import CLASS_OF, SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import DEFAULT, Message
from airflow_broadway.core.model.pipeline_options import Archive
from airflow_broadway.core.model.run_source import (
    ARCHIVE,
    DEAD_LETTERS,
    LIVE,
    RUN,
    Interval,
    RunSource,
)
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.schema.encoding import load, load_key
from airflow_broadway.core.text import pluralize
from airflow_broadway.runs.sinks import time_sinks
from airflow_broadway.staging.archive.letters import put_failed
from airflow_broadway.staging.archive.metadata import metadata_of
from airflow_broadway.staging.archive.reader import ArchivedInterval, look, tables
from airflow_broadway.staging.archive.table import archive_folder
from airflow_broadway.staging.run_folder import iter_unsettled
from airflow_broadway.staging.store import Folder

log = logging.getLogger(__name__)

#: The deadline of a lease that never lapses.
NEVER_LAPSES: Final = datetime(9999, 1, 1, tzinfo=UTC)
#: Duration in seconds recorded for the lease, which needs no renewal.
LEASE_SECONDS: Final = 86_400.0
#: Rows converted to messages at a time.
_ROWS: Final = 4096


class PastProducer:
    """The pipeline's producer, with messages from the archive or a past run.

    Other attributes, such as the transformer, are those of the pipeline's producer.
    """

    keeps_order = False
    renews = False
    backfills = True

    def __init__(self, pipeline: Pipeline, source: RunSource) -> None:
        self.live: Producer = pipeline.producer
        self.kind = source.kind
        #: Whether staged files have payloads: those of a past run may.
        self.keeps_payload = source.kind == RUN and self.live.keeps_payload
        self._archive: Archive | None = pipeline.archive
        if self._archive is not None and time_sinks(pipeline):  # what is missing would be deleted
            self._archive = replace(self._archive, on_gap="refuse")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.live, name)

    def publishes(self, action: Action) -> bool:
        """Returns ``False``: there is no broker to publish to."""
        return False

    def may_publish(self, own: Delivery) -> bool:
        """Returns ``False``: there is no broker to publish to."""
        return False

    def is_dead_letter(self, verdict: Verdict) -> bool:
        """Returns whether a verdict is that of a failed message: none is retried."""
        return _outcome_class(verdict) == CLASS_OF[Action.DEAD_LETTER]

    def group_of(self, message: Message) -> None:
        """Returns ``None``: without redelivery no message blocks others of its group."""

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        """Returns ``None``: there is no broker."""
        return None

    def source(self, env: ProducerEnv) -> Source:
        """Opens the messages of the interval."""
        return ArchiveSource(env, cast("Archive", self._archive))

    def custodian(self, env: ProducerEnv) -> Custodian:
        """Opens the custodian of messages without a broker."""
        return PastCustodian(env)


class ArchiveSource:
    """The messages of an interval, in order; the first of several producers reads them all.

    :raises RequestRefused: If the interval has gaps and ``on_gap`` is ``"refuse"``.
    :raises StagingError: If it cannot be read.
    """

    def __init__(self, env: ProducerEnv, options: Archive) -> None:
        interval = cast("Interval", env.interval)
        self._archive = folder_of(env)
        self._generation = env.generation
        self._stopped = bool(env.index)
        contents, gaps = find_range(env, interval, options)
        self._rows = self._messages(tables(self._archive, contents, interval))
        self.lease = Lease(
            kind=ARCHIVE,
            generation=env.generation,
            seconds=LEASE_SECONDS,
            deadline=NEVER_LAPSES,
            owner=dict(env.owner),
            state={
                "ordered": True,
                "interval": [bound.isoformat() for bound in interval],
                "notes": [] if self._stopped else [*gaps, *contents.remarks()],
            },
        )

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        """Returns the next messages; none at the end."""
        return [] if self._stopped else list(islice(self._rows, demand))

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns all messages: no other consumer can take them."""
        return messages

    def stop(self) -> Sequence[Message]:
        """Stops reading."""
        self._stopped = True
        return []

    def close(self) -> None:
        """Stops reading."""
        self._stopped = True

    def _messages(self, interval_tables: Iterator[pa.Table]) -> Iterator[Message]:
        ref = AckRef(None, self._generation, Delivery())
        position = 0
        for table in interval_tables:
            for start in range(0, table.num_rows, _ROWS):
                for row in table.slice(start, _ROWS).to_pylist():
                    key = row["batch_key"]
                    yield Message(
                        _decode_data(row["payload"], row["form"]),
                        metadata=metadata_of(row["metadata"] or "{}"),
                        acknowledger=ref,
                        message_id=row["message_id"],
                        batch_key=DEFAULT if key is None else load_key(json.loads(key)),
                        redelivered=True,
                        received_at=row["received_at"] or row["time"],
                        position=position,
                        size=len(row["payload"]) if row["size"] is None else row["size"],
                    )
                    position += 1


def find_range(
    env: ProducerEnv, interval: Interval, options: Archive
) -> tuple[ArchivedInterval, list[str]]:
    """Finds the archived files of an interval and its known gaps; logs the gaps.

    :raises RequestRefused: If the interval has gaps and ``on_gap`` is ``"refuse"``.
    :raises StagingError: If it cannot be read.
    """
    contents = look(folder_of(env), interval)
    gaps = contents.gaps(interval, options, env.clock.now())
    gaps += _find_unsettled(env, interval, options)
    if gaps and options.on_gap == "refuse":
        raise RequestRefused(
            f"the interval from {interval} is not whole in the archive: {'; '.join(gaps)}."
            "  Nothing was handled, since on_gap is 'refuse', as it always is if a sink has a"
            " time_column, by which the interval's rows would be deleted"
        )
    for gap in gaps:
        log.warning("The interval from %s: %s.", interval, gap)
    return contents, gaps


def _find_unsettled(env: ProducerEnv, interval: Interval, options: Archive) -> list[str]:
    """Counts unsettled executions of live runs, whose messages may belong to the interval.

    Covers all Dags, since they share the pipeline's archive.
    """
    count = 0
    for _, record in iter_unsettled(env.store, env.pipeline, None):
        live = RunSource.from_json(record.source).kind in (LIVE, DEAD_LETTERS)
        early = datetime.fromisoformat(record.opened_at) < interval.end
        count += live and (early or options.time != "received_at")
    if not count:
        return []
    runs = pluralize(count, "execution")
    return [f"{runs} of live runs are not settled yet, and their messages of it are not read"]


def _decode_data(payload: bytes, form: str | None) -> Any:
    if form is None:
        return payload
    text = payload.decode("utf-8", "surrogatepass")
    return text if form == "text" else load(text)


def folder_of(env: ProducerEnv) -> Folder:
    """Returns the archive folder of the environment's pipeline."""
    return archive_folder(env.store, env.pipeline)


class PastCustodian:
    """Settles messages without a broker: counts them and stores those that failed."""

    def __init__(self, env: ProducerEnv) -> None:
        self._env = env

    def renew(self, lease: Lease) -> Lease | None:
        """Returns the lease unchanged: it never lapses."""
        return lease

    def holds(self, lease: Lease) -> bool:
        """Returns ``True``: no other consumer can take its messages."""
        return True

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        """Counts each message and stores those that failed; idempotent."""
        counts = self._count(lease, settlement.entries())
        if settlement.expected is not None:
            left = settlement.expected - counts.total()
            counts[_outcome_class(settlement.rest)] += max(0, left)
        return SettleReport.from_json(dict(counts))

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        """Settles some messages before the rest."""
        name = f"{lease.generation}-{uuid.uuid4().hex[:8]}"
        return SettleReport.from_json(dict(self._count(lease, entries, name)))

    def _count(self, lease: Lease, entries: Iterable[Entry], name: str = "") -> Counter[str]:
        """Counts entries by outcome class; stores those that failed in the archive."""
        counts = Counter[str]()
        failed = []
        for entry in entries:
            outcome = _outcome_class(entry.verdict)
            counts[outcome] += 1
            if outcome == CLASS_OF[Action.DEAD_LETTER]:
                failed.append(entry)
        if failed:
            put_failed(folder_of(self._env), lease, failed, self._env.clock.now(), name=name)
        return counts

    def close(self) -> None:
        """Does nothing: no connection is open."""


def _outcome_class(verdict: Verdict) -> str:
    """Maps a verdict to its outcome class, where no broker redelivers."""
    if verdict.action is Action.LEAVE and not verdict.reason:
        return CLASS_OF[Action.ACK]
    if verdict.action in (Action.ACK, Action.RELEASE):
        return CLASS_OF[verdict.action]
    return CLASS_OF[Action.DEAD_LETTER]
