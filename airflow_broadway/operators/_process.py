"""One execution of a process task: receive, secure, handle, stage, publish.

Securing comes before any callback, and the manifest last: what dies before it is published leaves
messages that their lease gives back.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

from airflow_broadway.core.acknowledger import (
    Judged,
    RunAcknowledger,
    ack_messages_or_raise,
    is_settled,
    once,
)
from airflow_broadway.core.broadway import Broadway
from airflow_broadway.core.custody import (
    ACK,
    RELEASE,
    Custodian,
    Lease,
    Settlement,
    SettleReport,
    Source,
)
from airflow_broadway.core.errors import BroadwayError, PipelineError, StagingError
from airflow_broadway.core.intake import Budget, Intake
from airflow_broadway.core.keeper import Keeper
from airflow_broadway.core.manifest import Manifest
from airflow_broadway.core.message import AckRef, Message
from airflow_broadway.core.processor import ChunkResult
from airflow_broadway.core.processors import ProcessorPool
from airflow_broadway.core.producer import ProducerEnv
from airflow_broadway.core.rate_limiter import RateLimiter, RateState
from airflow_broadway.core.settler import entry_of, settled
from airflow_broadway.staging.rows import Rows
from airflow_broadway.staging.run import StagedRun
from airflow_broadway.staging.settlement import build_settlement, settle_generation
from airflow_broadway.staging.store import host_name
from airflow_broadway.staging.writer import ProcessWriter, Written

log = logging.getLogger(__name__)

#: Messages asked for at a time: enough that a broker's round trip is shared by many, few enough
#: that what a stop gives back unprocessed is soon handled elsewhere.
DEMAND = 1000


class Process:
    """One execution of a process task.

    :param run: The run's staging folder.
    :param env: What the producer is opened in; names the generation.
    """

    def __init__(
        self,
        run: StagedRun,
        pipeline: Broadway,
        *,
        env: ProducerEnv,
        budget: Budget,
        rate_state: RateState | None = None,
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._env = env
        self._budget = budget
        self._clock = env.clock
        self._rate_state = rate_state
        self._stopped = ""
        self._failed = 0
        self._settled_now = SettleReport()
        #: What callbacks have settled at once, until their chunk is done.
        self._now: set[str] = set()
        self._custodian: Custodian | None = None
        self._intake_now: Intake | None = None
        self._renewed: Lease | None = None

    def stop(self, reason: str) -> None:
        """Stop pulling; what was received is finished.  Called from a signal handler."""
        self._stopped = self._stopped or reason

    def run(self) -> dict[str, Any]:
        """Do it all; returns the reference that later tasks get.

        :raises BroadwayError: If the broker or staging fails; everything received was given back.
        """
        started, self._tick = self._clock.now(), self._clock.monotonic()
        source = self._pipeline.producer.source(self._env)
        self._source_lease = source.lease
        try:
            owner = self._env.owner
            self._run.open_generation(
                lease=source.lease,
                task_id=owner["task_id"],
                map_index=owner["map_index"],
                try_number=owner["try_number"],
            )
            try:
                with (
                    self._keeper(source) as keeper,
                    ProcessWriter(self._run, self._env.generation, self._pipeline) as writer,
                ):
                    intake = self._handle_all(source, writer)
                    keeper.check()
                    lease = self._lease_now(source)
                    manifest = self._publish(lease, writer, intake, started.isoformat())
            except BaseException:
                # Nothing of this execution counts: give back now what would else wait for the
                # lease to lapse.
                self._give_back(source.lease)
                raise
        finally:
            source.close()
        self._finish(manifest)
        return self._reference(manifest)

    def _keeper(self, source: Source) -> Keeper:
        producer = self._pipeline.producer

        def held() -> list[Lease]:
            intake = self._intake_now
            return [source.lease] if producer.renews and intake and intake.received else []

        return Keeper(
            lambda: producer.custodian(self._env),
            source.lease.seconds,
            held,
            renewed=self._note_renewed,
        )

    def _note_renewed(self, lease: Lease) -> None:
        self._renewed = lease

    def _lease_now(self, source: Source) -> Lease:
        """The lease as last extended: by a receipt, or since then by the keeper."""
        given, renewed = source.lease, self._renewed
        return (
            given
            if renewed is None or renewed.deadline <= given.deadline
            else replace(given, deadline=renewed.deadline)
        )

    # -- messages ------------------------------------------------------------------------------

    def _handle_all(self, source: Source, writer: ProcessWriter) -> Intake:
        acknowledger = RunAcknowledger(self._pipeline.producer, _Sink(self, writer))
        pool = ProcessorPool(self._pipeline, ack=ack_messages_or_raise, convert=Rows)
        intake = self._intake_now = self._intake(source, acknowledger)
        number = 0
        try:
            for chunk, result in pool.map(intake):
                if not chunk:
                    continue
                # handle_failed may have returned a message twice.
                result = result._replace(failed=once([], result.failed)[1])
                self._check_settled(result)
                self._failed += len(result.failed)
                if self._pipeline.batchers:
                    writer.messages(number, result.successful)
                else:
                    self._note_settled(result.successful, writer)
                self._note_settled(result.failed, writer)
                for message in _unaccounted(chunk, result):
                    at_once = message.message_id in self._now
                    self._now.discard(message.message_id)
                    writer.entry(entry_of(message, ACK if at_once else RELEASE), settled=at_once)
                number += 1
        finally:
            pool.close()
        if intake.error is not None:
            raise intake.error
        return intake

    def _check_settled(self, result: ChunkResult) -> None:
        """Tell what a callback settled at once from what has lost its acknowledger.

        The latter would count as settled, and a failure of it, in a batch, as a success.
        """
        for messages in result:
            for message in messages:
                if is_settled(message):
                    if message.message_id not in self._now:
                        raise PipelineError(
                            f"the callbacks returned message {message.message_id!r} without what"
                            " settles it; return each message as it was given, changed by its"
                            " put_… functions"
                        )
                    self._now.discard(message.message_id)

    @staticmethod
    def _note_settled(messages: list[Message], writer: ProcessWriter) -> None:
        """Keep a line for each message that a callback settled and that goes no further."""
        for message in messages:
            if is_settled(message):
                writer.entry(entry_of(message, ACK), settled=True)

    def _intake(self, source: Source, acknowledger: RunAcknowledger) -> Intake:
        producer = self._pipeline.producer
        return Intake(
            source,
            self._budget,
            clock=self._clock,
            limiter=RateLimiter(producer.rate_limiting, self._clock, self._rate_state),
            demand=max(DEMAND, self._pipeline.processors.chunk_size),
            transformer=producer.transformer,
            accept=lambda messages: [
                message.with_acknowledger(
                    AckRef(acknowledger, self._env.generation, message.acknowledger.data)
                )
                for message in messages
            ],
            stop=lambda: self._stopped,
        )

    def settle_now(self, judged: list[Judged]) -> None:
        """Carry verdicts out at the broker, for ``ack_immediately``."""
        entries = [entry_of(message, verdict) for message, verdict in judged]
        report = self._open_custodian().settle_now(self._source_lease, entries)
        self._settled_now += settled(report)
        self._now.update(entry.message_id for entry in entries)

    # -- the end -------------------------------------------------------------------------------

    def _publish(
        self, lease: Lease, writer: ProcessWriter, intake: Intake, started_at: str
    ) -> Manifest:
        written: Written = writer.close()
        staged = sum(written.batchers.values()) + written.entry_count
        if staged != intake.received:
            raise StagingError(
                f"received {intake.received} messages and staged {staged}: all of them are given"
                " back; this is an error in airflow-broadway, please report it"
            )
        manifest = Manifest(
            generation=self._env.generation,
            root_id=self._run.store.root_id(),
            host=host_name(),
            lease=lease.to_json(),
            received=intake.received,
            received_bytes=intake.received_bytes,
            failed=self._failed,
            settled_now=self._settled_now.to_json(),
            batchers=written.batchers,
            files=written.files,
            entries=written.entries,
            configured=written.configured,
            dropped=written.dropped,
            stopped=intake.ended,
            started_at=started_at,
            ended_at=self._clock.now().isoformat(),
            seconds={
                "receive": round(intake.seconds, 3),
                "total": round(self._clock.monotonic() - self._tick, 3),
            },
        )
        self._run.put_lease(lease)
        self._run.publish(manifest)
        log.info(
            "Received %d messages (%d bytes) in generation %s; %d failed; to batchers: %s;"
            " stopped by %s.",
            manifest.received,
            manifest.received_bytes,
            manifest.generation,
            manifest.failed,
            manifest.batchers or "none",
            manifest.stopped,
        )
        if manifest.dropped:
            log.warning("Columns that the schema lacks were dropped: %s.", manifest.dropped)
        return manifest

    def _finish(self, manifest: Manifest) -> None:
        """Settle here what no other task will: a pipeline without batchers, an empty run."""
        if manifest.received and self._pipeline.batchers:
            return
        record = self._run.generation(manifest.generation)
        settlement, _, progress = build_settlement(
            self._run, manifest.generation, self._pipeline, None, final=True
        )
        report = settle_generation(
            self._run, record, self._open_custodian(), settlement, progress=progress
        )
        log.info("Settled: %s.", report)
        self._close_custodian()

    def _give_back(self, lease: Lease) -> None:
        settlement = Settlement(rest=RELEASE, settled_now=SettleReport())
        try:
            custodian = self._open_custodian()
            try:
                record = self._run.generation(lease.generation)
                self._run.put_lease(lease)  # it knows how much it holds; when opened it did not
                report = settle_generation(self._run, record, custodian, settlement)
            except (StagingError, OSError) as error:
                # A full disk takes no journal: the sweep after this one will note what it hears.
                log.warning("Could not note that messages are given back: %s", error)
                report = custodian.settle(lease, settlement)
            log.warning("Gave back %d messages of this execution.", report.released)
            for told in report.errors:
                log.error("%s", told)
        except (BroadwayError, OSError) as error:
            # The lease lapses by itself; the first error is the one to show.
            log.error("Could not give messages back; their lease lapses by itself: %s", error)
        self._close_custodian()

    def _open_custodian(self) -> Custodian:
        if self._custodian is None:
            self._custodian = self._pipeline.producer.custodian(self._env)
        return self._custodian

    def _close_custodian(self) -> None:
        if self._custodian is not None:
            self._custodian.close()
            self._custodian = None

    @staticmethod
    def _reference(manifest: Manifest) -> dict[str, Any]:
        return {
            "generation": manifest.generation,
            "received": manifest.received,
            "failed": manifest.failed,
            "batchers": manifest.batchers,
            "stopped": manifest.stopped,
        }


class _Sink:
    """Keeps the verdicts of the process stage: in entries, or at the broker at once."""

    def __init__(self, process: Process, writer: ProcessWriter) -> None:
        self._process = process
        self._writer = writer

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        for message, verdict in [*successful, *failed]:
            self._writer.entry(entry_of(message, verdict))

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        self._process.settle_now([*successful, *failed])


def _unaccounted(chunk: list[Message], result: ChunkResult) -> list[Message]:
    """Those of a chunk that no callback returned: they must not be taken for successes."""
    given = [message.message_id for message in chunk]
    if not result.failed and given == [message.message_id for message in result.successful]:
        return []
    seen = Counter(message.message_id for message in result.successful)
    seen.update(message.message_id for message in result.failed)
    known = set(given)
    for message_id, times in seen.items():
        if message_id not in known or times > 1:
            raise PipelineError(
                f"the callbacks returned message {message_id!r} {times} times, in a chunk that"
                f" {'holds it once' if message_id in known else 'does not hold it'}; return each"
                " message as it was given, changed by its put_… functions"
            )
    return [message for message in chunk if message.message_id not in seen]
