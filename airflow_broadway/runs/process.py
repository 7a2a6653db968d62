"""One execution of a process task: receive, secure, handle, stage, publish.

Messages are secured before any callback, and the manifest is published last.  If the process dies
before that, the messages are redelivered once their lease lapses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from airflow_broadway.core.collector import look_after, rare_collections
from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.custody.in_process import settle_at_once
from airflow_broadway.core.custody.lease_renewer import LeaseRenewer
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian, Entry, Lease, Settlement, Source
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.run_summary import (
    dropped_line,
    settled_line,
    settling_trouble,
)
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import BroadwayError, PipelineError, StagingError
from airflow_broadway.core.formats.live import LiveCounts, LiveSign
from airflow_broadway.core.formats.manifest import Manifest, Staged
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.run_source import DEAD_LETTERS, LIVE
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.processor import ChunkResult
from airflow_broadway.core.stages.processor_pool import ProcessorPool
from airflow_broadway.core.stages.rate_limiter import RateLimiter, RateState
from airflow_broadway.core.stages.receiving import Budget, Receiving, demand_of, enqueued_of
from airflow_broadway.core.stages.staged_row import RowConverter
from airflow_broadway.core.stages.stop import STOP_CHECK_INTERVAL, Stop
from airflow_broadway.core.text import many
from airflow_broadway.runs.chunk_stager import ChunkStager
from airflow_broadway.runs.poison.suspects import suspects_of
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.settle import settle
from airflow_broadway.runs.sources.prepare import prepare_sink
from airflow_broadway.staging.archive.writer import ArchiveWriter, NoArchive
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import host_name
from airflow_broadway.staging.writer import ProcessWriter

log = logging.getLogger(__name__)


class Process:
    """One execution of a process task.

    :param run: The run's staging folder.
    :param env: The environment of the producer; names the generation.
    :param isolates: Whether messages that may have crashed an earlier process run in a child.
    """

    def __init__(
        self,
        run: StagedRun,
        pipeline: Pipeline,
        *,
        env: ProducerEnv,
        budget: Budget,
        rate_state: RateState | None = None,
        ports: Ports | None = None,
        isolates: bool = True,
    ) -> None:
        ports = ports or Ports()
        self._suspects = suspects_of(run, pipeline, env) if isolates else None
        self._child = ports.child
        self._run = run
        self._pipeline = pipeline
        self._env = env
        self._budget = budget
        self._clock = env.clock
        self._rate_state = rate_state
        #: Whether an interrupt of the host ended it; results until then are published.
        self.timed_out = False
        self._interrupts = ports.interrupts
        self._stop = Stop(
            env.clock,
            min(pipeline.shutdown, ports.max_shutdown),
            interrupts=ports.interrupts,
        )
        self._custodian: Custodian | None = None
        #: A problem of the settlement here that needs attention; empty if there is none.
        self.trouble = ""
        self._receiving: Receiving | None = None
        self._renewed: Lease | None = None
        self._archive: ArchiveWriter | NoArchive = NoArchive()

    def stop(self, reason: str) -> None:
        """Stops receiving.  Messages in progress are finished within the pipeline's ``shutdown``;
        finished ones are published and the rest is released.  Called from a signal handler.
        """
        self._stop.request(reason)

    @property
    def receives(self) -> int:
        """Number of receive calls to the source."""
        return 0 if self._receiving is None else self._receiving.receives

    @rare_collections()
    def run(self) -> dict[str, Any]:
        """Runs all steps; returns the reference for later tasks.

        :raises BroadwayError: If the broker or staging fails; all received messages were released.
        """
        started, self._tick = self._clock.now(), self._clock.monotonic()
        stop = self._stop
        source = self._source = self._pipeline.producer.source(
            replace(self._env, stopping=lambda: bool(stop.reason()))
        )
        try:
            owner = self._env.owner
            self._run.open_generation(
                lease=source.lease,
                task_id=owner["task_id"],
                map_index=owner["map_index"],
                try_number=owner["try_number"],
                source=self._pipeline.run.source.to_json(),
            )
            try:
                with (
                    self._renewer(source) as renewer,
                    ProcessWriter(self._run, self._env.generation, self._pipeline) as writer,
                    self._archive_writer() as self._archive,
                ):
                    if not self._pipeline.batchers:
                        prepare_sink(self._run, self._pipeline, self._env)
                    stager = ChunkStager(self._pipeline, writer, self._settle_now)
                    receiving = self._handle_messages(source, stager)
                    renewer.check()
                    lease = self._lease_now(source)
                    written = writer.close()
                    if self._pipeline.batchers:
                        prepare_sink(self._run, self._pipeline, self._env)
                    manifest = self._publish(lease, written, stager, receiving, started)
            except BaseException:  # also on KeyboardInterrupt and a time-out; re-raised
                # Nothing of this execution counts: release the messages now, instead of when the
                # lease lapses.
                try:
                    source.stop()
                except BroadwayError as error:  # the first error is the one to raise
                    log.warning("The source could not be stopped: %s", error)
                self._release_all(source.lease)
                raise
        finally:
            source.close()
        self._finish(manifest)
        return self._reference(manifest)

    def _archive_writer(self) -> ArchiveWriter | NoArchive:
        """Returns the archive of received messages, if the source is the live queue."""
        pipeline = self._pipeline
        if pipeline.archive is None or pipeline.run.source.kind not in (LIVE, DEAD_LETTERS):
            return NoArchive()
        stem = f"{self._env.generation}/archive"
        return ArchiveWriter(self._run.files, stem, pipeline.producer, pipeline.archive)

    def _renewer(self, source: Source) -> LeaseRenewer:
        producer = self._pipeline.producer

        def held() -> list[Lease]:
            receiving = self._receiving
            holds = receiving is not None and bool(receiving.received)
            return [source.lease] if producer.renews and holds else []

        return LeaseRenewer(
            lambda: producer.custodian(self._env),
            source.lease.seconds,
            held,
            renewed=self._note_renewed,
        )

    def _note_renewed(self, lease: Lease) -> None:
        self._renewed = lease

    def _lease_now(self, source: Source) -> Lease:
        """Returns the lease as last extended, by a receipt or later by the renewer."""
        lease, renewed = source.lease, self._renewed
        return (
            lease
            if renewed is None or renewed.deadline <= lease.deadline
            else replace(lease, deadline=renewed.deadline)
        )

    # -- messages ------------------------------------------------------------------------------

    def _handle_messages(self, source: Source, stager: ChunkStager) -> Receiving:
        acknowledger = RunAcknowledger(self._pipeline.producer, stager)
        # Verdicts are recorded when a result is staged; a result that is dropped has none.
        pool = ProcessorPool(
            self._pipeline,
            ack=_ack_nothing,
            convert=RowConverter,
            stop=self._stop,
            traces=False,
            transformer=self._pipeline.producer.transformer,
            suspects=self._suspects,
            host=self._child,
        )
        receiving = self._receiving = self._open_receiving(source, acknowledger)
        sign = LiveSign(self._run.files, self._env.generation, self._clock)
        self._stop.bound(self._budget.max_seconds)
        looked = 0
        try:
            for chunk, result in self._iter_results(pool, receiving):
                if chunk:
                    stager.stage(chunk, result)
                elif self._stop.over():
                    break
                looked = look_after(receiving.received_bytes, looked)
                sign.leave(lambda: self._live_counts(source, receiving, stager))
        finally:
            done, unhandled = pool.left()
            stager.close()
            pool.close()
        for chunk, result in done:
            stager.stage(chunk, result)
        stager.release([*unhandled, *receiving.stop()])
        if receiving.error is not None:
            raise receiving.error
        run_source = self._pipeline.run.source
        if not run_source.asks_broker and receiving.ended != "empty":
            raise PipelineError(
                f"the source {run_source.kind!r} was not read to its end (stopped by"
                f" {receiving.ended or self._stop.reason()!r}, after"
                f" {many(receiving.received, 'message')}): its results do not count; if the task"
                " has an execution_timeout, increase it"
            )
        self.timed_out = self._stop.reason() == "interrupted"
        return receiving

    def _live_counts(self, source: Source, receiving: Receiving, stager: ChunkStager) -> LiveCounts:
        return LiveCounts(
            at=self._clock.now(),
            received=receiving.received,
            received_bytes=receiving.received_bytes,
            failed=stager.failed,
            batchers=stager.staged,
            deadline=self._lease_now(source).deadline,
        )

    def _iter_results(
        self, pool: ProcessorPool, receiving: Receiving
    ) -> Iterator[tuple[list[Message], ChunkResult]]:
        """Yields each chunk with its result; a time-out during callbacks ends the loop."""
        try:
            yield from pool.map(receiving, wait=lambda: STOP_CHECK_INTERVAL)
        except self._interrupts:
            if receiving.under_way:  # the messages of the interrupted receive are unknown
                raise
            self._stop.request("interrupted", at_once=True)
            # Other processors end with their current message.
            yield from pool.map([], wait=lambda: STOP_CHECK_INTERVAL)

    def _open_receiving(self, source: Source, acknowledger: RunAcknowledger) -> Receiving:
        producer, archive = self._pipeline.producer, self._archive

        def accept(messages: Sequence[Message]) -> list[Message]:
            archive.add(messages)
            return [
                message.with_acknowledger(
                    AckRef(acknowledger, self._env.generation, message.acknowledger.data)
                )
                for message in messages
            ]

        return Receiving(
            source,
            self._budget,
            clock=self._clock,
            limiter=RateLimiter(producer.rate_limiting, self._clock, self._rate_state),
            demand=demand_of(self._pipeline),
            most=producer.most_at_once,
            accept=accept,
            stop=self._stop.reason,
            enqueued_at=enqueued_of(self._pipeline),
        )

    def _settle_now(self, entries: list[Entry]) -> tuple[SettleReport, list[Entry], list[Entry]]:
        lease = self._lease_now(self._source)
        return settle_at_once(self._open_custodian(), lease, entries)

    # -- the end -------------------------------------------------------------------------------

    def _publish(
        self,
        lease: Lease,
        written: Staged,
        stager: ChunkStager,
        receiving: Receiving,
        started: datetime,
    ) -> Manifest:
        if written.count != receiving.received:
            raise StagingError(
                f"received {many(receiving.received, 'message')} and staged {written.count}: all of"
                " them are released; this is a bug in airflow-broadway, please report it"
            )
        manifest = Manifest(
            generation=self._env.generation,
            root_id=self._run.store.root_id(),
            host=host_name(),
            lease=lease.to_json(),
            received=receiving.received,
            received_bytes=receiving.received_bytes,
            failed=stager.failed,
            settled_now=stager.settled_now.to_json(),
            **asdict(written),
            archived=self._archive.close().to_json(),
            stopped=receiving.ended or self._stop.reason(),
            started_at=started.isoformat(),
            ended_at=self._clock.now().isoformat(),
            seconds={
                "receive": round(receiving.seconds, 3),
                "total": round(self._clock.monotonic() - self._tick, 3),
                **receiving.lag,
            },
        )
        self._run.put_lease(lease)
        self._run.publish(manifest)
        log.info(
            "Received %s (%d bytes) in generation %s; %d failed; to batchers: %s; stopped by %s.",
            many(manifest.received, "message"),
            manifest.received_bytes,
            manifest.generation,
            manifest.failed,
            ", ".join(f"{name} {count:,}" for name, count in manifest.batchers.items()) or "none",
            manifest.stopped,
        )
        stager.reasons.log_table(log, "the process stage")
        if manifest.dropped:
            log.warning("%s", dropped_line(manifest.dropped))
        return manifest

    def _finish(self, manifest: Manifest) -> None:
        """Settles a pipeline without batchers or an empty run, since no other task will."""
        if manifest.received and self._pipeline.batchers:
            return
        record = self._run.generation(manifest.generation)
        settled = settle(self._run, record, self._pipeline, self._open_custodian, batchers=())
        report = settled.report
        log.info("%s", settled_line(report))
        for error in report.errors:
            log.error("%s", error)
        self.trouble = settling_trouble(report.lapsed, report.failed, halted=report.halted)
        self._close_custodian()

    def _release_all(self, lease: Lease) -> None:
        """Releases all messages of this execution."""
        try:
            report = self._release(lease)
            log.warning("Released %s of this execution.", many(report.released, "message"))
            for error in report.errors:
                log.error("%s", error)
        except (BroadwayError, OSError) as error:
            # The lease lapses by itself; the first error is the one to raise.
            log.error("Could not release messages; their lease will lapse: %s", error)
        self._close_custodian()

    def _release(self, lease: Lease) -> SettleReport:
        try:
            record = self._run.generation(lease.generation)
            self._run.put_lease(lease)  # unlike the opened lease, it counts its messages
            settled = settle(
                self._run,
                record,
                self._pipeline,
                self._open_custodian,
                void=True,
                own=True,
                batchers=(),
            )
            return settled.report
        except (StagingError, OSError) as error:
            # On a full disk there is no journal: the next sweep records the settlement.
            log.warning("Could not record that messages are released: %s", error)
            settlement = Settlement(rest=RELEASE, settled_now=SettleReport())
            return self._open_custodian().settle(lease, settlement)

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
        # Messages that the source dead-lettered before any callback are not counted as received.
        dead_lettered = sum(manifest.lease["state"].get("set_aside", {}).values())
        return {
            **({"set_aside": dead_lettered} if dead_lettered else {}),
            **manifest.reference(),
        }


def _ack_nothing(successful: list[Message], failed: list[Message]) -> None:
    """Does nothing: no message is settled in a processor's thread."""
