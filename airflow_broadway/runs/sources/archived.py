"""An interval of the archive as the source of a run: nobody else holds its messages.

So its lease never ends, and settling it is the run's own journal.  What failed is kept beside the
archive: nothing delivers it again but another run of the interval.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
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
    Interval,
    RunSource,
)
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.schema.plain import load, load_key
from airflow_broadway.core.text import many
from airflow_broadway.staging.archive.coverage import gaps_of, remarks_of
from airflow_broadway.staging.archive.failed import put_failed
from airflow_broadway.staging.archive.layout import archive_folder
from airflow_broadway.staging.archive.metadata import metadata_of
from airflow_broadway.staging.archive.reader import Found, look, tables
from airflow_broadway.staging.run_folder import iter_unsettled
from airflow_broadway.staging.store import Folder

log = logging.getLogger(__name__)

#: The deadline of a lease that nobody could take over.
FOR_EVER: Final = datetime(9999, 1, 1, tzinfo=UTC)
#: Seconds between two renewals that a lease would have, if it were renewed.
_RENEWED: Final = 86_400.0
#: Rows that are made messages of at a time.
_ROWS: Final = 4096


class PastProducer:
    """The pipeline's own producer, but that its messages come from what is past.

    Whatever is not said here is as its options say: the transformer, what callbacks may configure.
    """

    keeps_payload = False
    keeps_order = False
    renews = False
    backfills = True

    def __init__(self, pipeline: Pipeline, source: RunSource) -> None:
        self.live: Producer = pipeline.producer
        self.run_source = source
        self.kind = source.kind
        self._archive: Archive | None = pipeline.archive

    def __getattr__(self, name: str) -> Any:
        return getattr(self.live, name)

    def publishes(self, action: Action) -> bool:
        """Nothing is published: there is no broker."""
        return False

    def may_publish(self, own: Delivery) -> bool:
        """Nothing is published: there is no broker."""
        return False

    def group_of(self, message: Message) -> None:
        """No message comes again, and so none holds others back."""

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        """No broker is asked."""
        return None

    def source(self, env: ProducerEnv) -> Source:
        """The messages of the interval."""
        return ArchiveSource(env, cast("Archive", self._archive))

    def custodian(self, env: ProducerEnv) -> Custodian:
        """Settles what nobody holds."""
        return PastCustodian(env)


def of_archive(pipeline: Pipeline, source: RunSource) -> Producer:
    """The producer that serves an interval of the archive."""
    return cast("Producer", PastProducer(pipeline, source))


class ArchiveSource:
    """The messages of an interval, in order; the first of several producers has them all.

    :raises RequestRefused: If the interval is not whole, and the archive is to refuse that.
    :raises StagingError: If it cannot be read.
    """

    def __init__(self, env: ProducerEnv, options: Archive) -> None:
        interval = cast("Interval", env.interval)
        self._archive = folder_of(env)
        self._generation = env.generation
        self._stopped = bool(env.index)
        found, gaps = found_in(env, interval, options)
        self._rows = self._messages(tables(self._archive, found, interval))
        self.lease = Lease(
            kind=ARCHIVE,
            generation=env.generation,
            seconds=_RENEWED,
            deadline=FOR_EVER,
            owner=dict(env.owner),
            state={
                "ordered": True,
                "interval": [each.isoformat() for each in interval],
                "notes": [] if self._stopped else [*gaps, *remarks_of(found)],
            },
        )

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        """The next messages; nothing at the end."""
        if self._stopped:
            return []
        made: list[Message] = []
        for message in self._rows:
            made.append(message)
            if len(made) >= demand:
                break
        return made

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Nobody else can take them."""
        return messages

    def stop(self) -> Sequence[Message]:
        """Read no more."""
        self._stopped = True
        return []

    def close(self) -> None:
        """Read no more."""
        self._stopped = True

    def _messages(self, found: Iterator[pa.Table]) -> Iterator[Message]:
        ref = AckRef(None, self._generation, Delivery())
        position = 0
        for table in found:
            for start in range(0, table.num_rows, _ROWS):
                for row in table.slice(start, _ROWS).to_pylist():
                    key = row["batch_key"]
                    yield Message(
                        _data_of(row["payload"], row["form"]),
                        metadata=metadata_of(row["metadata"]),
                        acknowledger=ref,
                        message_id=row["message_id"],
                        batch_key=DEFAULT if key is None else load_key(json.loads(key)),
                        redelivered=True,
                        received_at=row["received_at"],
                        position=position,
                        size=row["size"],
                    )
                    position += 1


def found_in(env: ProducerEnv, interval: Interval, options: Archive) -> tuple[Found, list[str]]:
    """What the archive has of an interval, and what is known to be missing, which is logged.

    :raises RequestRefused: If the interval is not whole, and the archive is to refuse that.
    :raises StagingError: If it cannot be read.
    """
    archive = folder_of(env)
    found = look(archive, interval)
    gaps = gaps_of(archive, found, interval, options, env.clock.now())
    gaps += _unsettled(env, interval, options)
    if gaps and options.on_gap == "refuse":
        raise RequestRefused(
            f"the interval from {interval} is not whole in the archive: {'; '.join(gaps)}."
            "  Nothing was handled, since on_gap is 'refuse'"
        )
    for gap in gaps:
        log.warning("The interval from %s: %s.", interval, gap)
    return found, gaps


def _unsettled(env: ProducerEnv, interval: Interval, options: Archive) -> list[str]:
    """What live runs have received, and nobody has settled yet: it may be of it.

    Of any Dag: the archive is the pipeline's, whichever fills it.
    """
    count = 0
    for _, record in iter_unsettled(env.store, env.pipeline, None):
        live = RunSource.from_json(record.source).kind in (LIVE, DEAD_LETTERS)
        early = datetime.fromisoformat(record.opened_at) < interval.end
        count += live and (early or options.time != "received_at")
    if not count:
        return []
    runs = many(count, "execution")
    return [f"{runs} of live runs are not settled yet, and what they received of it is not read"]


def _data_of(payload: bytes, form: str | None) -> Any:
    if form is None:
        return payload
    text = payload.decode("utf-8", "surrogatepass")
    return text if form == "text" else load(text)


def folder_of(env: ProducerEnv) -> Folder:
    """The archive of the pipeline of an environment."""
    return archive_folder(env.store, env.pipeline)


class PastCustodian:
    """Settles messages that no broker holds: it counts, and keeps what failed."""

    def __init__(self, env: ProducerEnv) -> None:
        self._env = env

    def renew(self, lease: Lease) -> Lease | None:
        """It does not end."""
        return lease

    def holds(self, lease: Lease) -> bool:
        """Nobody can take its messages."""
        return True

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        """Count each message, and keep those that failed; the same whenever it is asked again."""
        counts: Counter[str] = Counter()
        failed = list(_failed(settlement.entries(), counts))
        if failed:
            put_failed(folder_of(self._env), lease, failed, self._env.clock.now())
        if settlement.expected is not None:
            left = settlement.expected - sum(counts.values())
            counts[_class_of(settlement.rest)] += max(0, left)
        return SettleReport.from_json(dict(counts))

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        """The same, of a few."""
        counts: Counter[str] = Counter()
        failed = list(_failed(entries, counts))
        if failed:
            name = f"{lease.generation}-{uuid.uuid4().hex[:8]}"
            put_failed(folder_of(self._env), lease, failed, self._env.clock.now(), name=name)
        return SettleReport.from_json(dict(counts))

    def close(self) -> None:
        """Nothing is open."""


def _failed(entries: Iterable[Entry], counts: Counter[str]) -> Iterator[Entry]:
    """Count entries by what becomes of them here; those that failed."""
    for entry in entries:
        name = _class_of(entry.verdict)
        counts[name] += 1
        if name == CLASS_OF[Action.DEAD_LETTER]:
            yield entry


def _class_of(verdict: Verdict) -> str:
    """What a verdict comes to where no broker delivers anything again."""
    if verdict.action is Action.LEAVE and not verdict.reason:
        return CLASS_OF[Action.ACK]
    if verdict.action in (Action.ACK, Action.RELEASE):
        return CLASS_OF[verdict.action]
    return CLASS_OF[Action.DEAD_LETTER]
