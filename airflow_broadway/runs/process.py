"""One execution of a process task: receive, secure, handle, stage, publish.

Messages are secured before any callback, and the manifest is published last.  If the process dies
before that, the messages are redelivered once their lease lapses.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.collector import look_after, rare_collections
from airflow_broadway.core.custody.acknowledger import Judged, RunAcknowledger
from airflow_broadway.core.custody.in_process import (
    check_settled,
    done_of,
    entry_of,
    settle_at_once,
)
from airflow_broadway.core.custody.lease_renewer import LeaseRenewer
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian, Entry, Lease, Settlement, Source
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.run_summary import dropped_line, settled_line, settling_trouble
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Verdict
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, PipelineError, StagingError
from airflow_broadway.core.formats.live import LiveCounts, LiveSign
from airflow_broadway.core.formats.manifest import Manifest, Staged
from airflow_broadway.core.model.acks import NO_ACK, ack_messages_or_raise, is_settled
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.run_source import DEAD_LETTERS, LIVE
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.failure_log import Reasons, forget_trace
from airflow_broadway.core.stages.processor import ChunkResult
from airflow_broadway.core.stages.processor_pool import ProcessorPool
from airflow_broadway.core.stages.rate_limiter import RateLimiter, RateState
from airflow_broadway.core.stages.receiving import Budget, Receiving, demand_of, enqueued_of
from airflow_broadway.core.stages.staged_row import RowConverter
from airflow_broadway.core.stages.stop import STOP_CHECK_INTERVAL, Stop
from airflow_broadway.core.text import pluralize
from airflow_broadway.runs.applied import AppliedMessages
from airflow_broadway.runs.poison.suspects import suspects_of
from airflow_broadway.runs.ports import Ports, open_generation
from airflow_broadway.runs.settle import settle
from airflow_broadway.runs.sinks import claim_interval
from airflow_broadway.runs.sources.pipelines import prepare_sink
from airflow_broadway.staging.run_folder import PUBLISHED, GenerationRecord, StagedRun
from airflow_broadway.staging.store import host_name
from airflow_broadway.staging.writer import NoMessages, ProcessWriter

if TYPE_CHECKING:
    from airflow_broadway.staging.archive.writer import ArchiveWriter
    from airflow_broadway.staging.received import ReceivedWriter

log = logging.getLogger(__name__)


@dataclass
class Process:
    """One execution of a process task.

    :param staged: The run's staging folder.
    :param env: The environment of the producer; names the generation.
    :param isolates: Whether messages that may have crashed an earlier process run in a child.
    """

    staged: StagedRun
    pipeline: Pipeline
    _: KW_ONLY
    env: ProducerEnv
    budget: Budget
    rate_state: RateState | None = None
    ports: Ports = field(default_factory=Ports)
    isolates: bool = True

    def __post_init__(self) -> None:
        #: Whether an interrupt of the host ended it; results until then are published.
        self.timed_out = False
        #: A problem of the settlement here that needs attention; empty if there is none.
        self.trouble = ""
        self._stop = Stop(
            self.env.clock,
            min(self.pipeline.shutdown, self.ports.max_shutdown),
            interrupts=self.ports.interrupts,
        )
        self._source: Source
        self._custodian: Custodian
        self._receiving: Receiving | None = None
        self._applied: AppliedMessages
        self._renewed: Lease | None = None

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
        env, producer = self.env, self.pipeline.producer
        self._started, self._tick = env.clock.now(), env.clock.monotonic()
        with closing(producer.custodian(env)) as self._custodian:  # connects on first use
            source = replace(env, stopping=lambda: bool(self._stop.reason()))
            with closing(producer.source(source)) as self._source:
                record = open_generation(self.staged, self.pipeline, self._source.lease)
                try:
                    claim_interval(self.staged, self.pipeline, record, self.ports.is_over)
                    manifest = self._pull()
                except BaseException:  # also on KeyboardInterrupt and a time-out; re-raised
                    # Nothing of this execution counts: release the messages now, instead of when
                    # the lease lapses.
                    try:
                        self._source.stop()
                    except BroadwayError as error:  # the first error is the one to raise
                        log.warning("The source could not be stopped: %s", error)
                    self._release_all()
                    raise
            # No other task settles a pipeline without batchers or an empty run.
            if not (manifest.received and self.pipeline.batchers):
                self._settle(record, manifest)
        # Messages that the source dead-lettered before any callback are not counted as received.
        dead_lettered = sum(manifest.lease["state"].get("set_aside", {}).values())
        return {**({"set_aside": dead_lettered} if dead_lettered else {}), **manifest.reference()}

    def _pull(self) -> Manifest:
        """Receives, handles and stages messages, and publishes the manifest."""
        with (
            self._renewer() as renewer,
            ProcessWriter(self.staged, self.env.generation, self.pipeline) as writer,
            self._archive_writer() as archive,
            self._received_writer() as self._received,
        ):
            if not self.pipeline.batchers:
                prepare_sink(self.staged, self.pipeline, self.env)
            self._applied = AppliedMessages(
                self.staged, self.pipeline, self.ports, self.env.generation
            )
            stager = ChunkStager(self.pipeline, writer, self._settle_now)
            receiving = self._handle_messages(stager, archive)
            renewer.check()
            lease = self._lease_now()
            written = writer.close()
            if self.pipeline.batchers:
                prepare_sink(self.staged, self.pipeline, self.env)
            return self._publish(lease, written, stager, receiving, archive)

    def _archive_writer(self) -> ArchiveWriter | NoMessages:
        """Returns the archive of received messages, if the source is the live queue."""
        pipeline = self.pipeline
        if pipeline.archive is None or pipeline.run.source.kind not in (LIVE, DEAD_LETTERS):
            return NoMessages()
        from airflow_broadway.staging.archive.writer import ArchiveWriter  # loads pyarrow

        stem = f"{self.env.generation}/archive"
        return ArchiveWriter(self.staged.files, stem, pipeline.producer, pipeline.archive)

    def _received_writer(self) -> ReceivedWriter | NoMessages:
        """Returns the writer of messages as received, for the dead-letter table if there is one."""
        if self.pipeline.dead_letter_table is None:
            return NoMessages()
        from airflow_broadway.staging.received import ReceivedWriter  # loads pyarrow

        stem = f"{self.env.generation}/received"
        return ReceivedWriter(self.staged.files, stem, self.pipeline.producer)

    def _renewer(self) -> LeaseRenewer:
        producer, source = self.pipeline.producer, self._source

        def held() -> list[Lease]:
            receiving = self._receiving
            holds = receiving is not None and bool(receiving.received)
            return [source.lease] if producer.renews and holds else []

        def note_renewed(lease: Lease) -> None:
            self._renewed = lease

        return LeaseRenewer(
            lambda: producer.custodian(self.env), source.lease.seconds, held, renewed=note_renewed
        )

    def _lease_now(self) -> Lease:
        """Returns the lease as last extended, by a receipt or later by the renewer."""
        lease, renewed = self._source.lease, self._renewed
        if renewed is None or renewed.deadline <= lease.deadline:
            return lease
        return replace(lease, deadline=renewed.deadline)

    # -- messages ------------------------------------------------------------------------------

    def _handle_messages(
        self, stager: ChunkStager, archive: ArchiveWriter | NoMessages
    ) -> Receiving:
        # Verdicts are recorded when a result is staged; a result that is dropped has none.
        pool = ProcessorPool(
            self.pipeline,
            ack=lambda successful, failed: None,
            convert=RowConverter,
            stop=self._stop,
            traces=False,
            transformer=self.pipeline.producer.transformer,
            suspects=suspects_of(self.staged, self.pipeline, self.env) if self.isolates else None,
            host=self.ports.child,
        )
        receiving = self._receiving = self._open_receiving(stager, archive)
        sign = LiveSign(self.staged.files, self.env.generation, self.env.clock)
        self._stop.bound(self.budget.max_seconds)
        looked = 0
        try:
            for chunk, result in self._iter_results(pool, receiving):
                if chunk:
                    stager.stage(chunk, result)
                elif self._stop.over():
                    break
                looked = look_after(receiving.received_bytes, looked)
                sign.leave(lambda: self._live_counts(receiving, stager))
        finally:
            done, unhandled = pool.left()
            stager.close()
            pool.close()
        for chunk, result in done:
            stager.stage(chunk, result)
        stager.release([*unhandled, *receiving.stop()])
        if receiving.error is not None:
            raise receiving.error
        run_source = self.pipeline.run.source
        if not run_source.asks_broker and receiving.ended != "empty":
            raise PipelineError(
                f"the source {run_source.kind!r} was not read to its end (stopped by"
                f" {receiving.ended or self._stop.reason()!r}, after"
                f" {pluralize(receiving.received, 'message')}): its results do not count; if the"
                " task has an execution_timeout, increase it"
            )
        self.timed_out = self._stop.reason() == "interrupted"
        return receiving

    def _live_counts(self, receiving: Receiving, stager: ChunkStager) -> LiveCounts:
        return LiveCounts(
            at=self.env.clock.now(),
            received=receiving.received,
            received_bytes=receiving.received_bytes,
            failed=stager.failed,
            batchers=stager.staged,
            deadline=self._lease_now().deadline,
        )

    def _iter_results(
        self, pool: ProcessorPool, receiving: Receiving
    ) -> Iterator[tuple[list[Message], ChunkResult]]:
        """Yields each chunk with its result; a time-out during callbacks ends the loop."""
        try:
            yield from pool.map(receiving, wait=lambda: STOP_CHECK_INTERVAL)
        except self.ports.interrupts:
            if receiving.under_way:  # the messages of the interrupted receive are unknown
                raise
            self._stop.request("interrupted", at_once=True)
            # Other processors end with their current message.
            yield from pool.map([], wait=lambda: STOP_CHECK_INTERVAL)

    def _open_receiving(
        self, stager: ChunkStager, archive: ArchiveWriter | NoMessages
    ) -> Receiving:
        producer = self.pipeline.producer
        # A dead letter's row is committed with the settlement, so none precedes it.
        defers = self.pipeline.dead_letter_table is not None
        acknowledger = RunAcknowledger(producer, stager, defers=defers)

        def accept(messages: Sequence[Message]) -> list[Message]:
            copies, applied, released, others = self._applied.sort(messages)
            archive.add([*applied, *released, *others])
            self._received.add(messages)
            stager.acknowledge([*copies, *applied])
            stager.release(released)
            return acknowledger.attach(others, self.env.generation)

        return Receiving(
            self._source,
            self.budget,
            clock=self.env.clock,
            limiter=RateLimiter(producer.rate_limiting, self.env.clock, self.rate_state),
            demand=demand_of(self.pipeline),
            most=producer.max_fetch,
            accept=accept,
            stop_reason=self._stop.reason,
            enqueued_at=enqueued_of(self.pipeline),
        )

    def _settle_now(self, entries: list[Entry]) -> tuple[SettleReport, list[Entry], list[Entry]]:
        return settle_at_once(self._custodian, self._lease_now(), entries)

    # -- the end -------------------------------------------------------------------------------

    def _publish(
        self,
        lease: Lease,
        written: Staged,
        stager: ChunkStager,
        receiving: Receiving,
        archive: ArchiveWriter | NoMessages,
    ) -> Manifest:
        if written.count != receiving.received:
            raise StagingError(
                f"received {pluralize(receiving.received, 'message')} and staged {written.count}:"
                " all of them are released; this is a bug in airflow-broadway, please report it"
            )
        manifest = Manifest(
            generation=self.env.generation,
            root_id=self.staged.store.root_id(),
            host=host_name(),
            lease=lease.to_json(),
            received=receiving.received,
            received_bytes=receiving.received_bytes,
            failed=stager.failed,
            already_applied=self._applied.already_applied,
            duplicates=self._applied.duplicates,
            without_identity=self._applied.without_identity,
            claims=self._applied.claims,
            settled_now=stager.settled_now.to_json(),
            **asdict(written),
            archived=archive.close(),
            received_files=self._received.close(),
            stopped=receiving.ended or self._stop.reason(),
            started_at=self._started.isoformat(),
            ended_at=self.env.clock.now().isoformat(),
            seconds={
                "receive": round(receiving.seconds, 3),
                "total": round(self.env.clock.monotonic() - self._tick, 3),
                **receiving.lag,
            },
        )
        self.staged.put_lease(lease)
        self.staged.publish(manifest)
        log.info(
            "Received %s (%d bytes) in generation %s; %d failed; to batchers: %s; stopped by %s.",
            pluralize(manifest.received, "message"),
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

    def _settle(self, record: GenerationRecord, manifest: Manifest) -> None:
        record = replace(record, state=PUBLISHED)
        settled = settle(
            self.staged,
            record,
            self.pipeline,
            lambda record: self._custodian,
            batchers=(),
            connections=self.ports.connections,
        )
        report = settled.report
        log.info("%s", settled_line(report))
        for error in report.errors:
            log.error("%s", error)
        self.trouble = settling_trouble(report.lapsed, report.failed, halted=report.halted)

    def _release_all(self) -> None:
        """Releases all messages of this execution."""
        try:
            report = self._release(self._source.lease)
            log.warning("Released %s of this execution.", pluralize(report.released, "message"))
            for error in report.errors:
                log.error("%s", error)
        except (BroadwayError, OSError) as error:
            # The lease lapses by itself; the first error is the one to raise.
            log.error("Could not release messages; their lease will lapse: %s", error)

    def _release(self, lease: Lease) -> SettleReport:
        try:
            record = self.staged.generation(lease.generation)
            self.staged.put_lease(lease)  # unlike the opened lease, it counts its messages
            settled = settle(
                self.staged,
                record,
                self.pipeline,
                lambda record: self._custodian,
                void=True,
                own=True,
                batchers=(),
                connections=self.ports.connections,
            )
            return settled.report
        except (StagingError, OSError) as error:
            # On a full disk there is no journal: the next sweep records the settlement.
            log.warning("Could not record that messages are released: %s", error)
            return self._custodian.settle(
                lease, Settlement(rest=RELEASE, settled_now=SettleReport())
            )


#: Executes verdicts at the broker; returns the report, the entries done and those not done; see
#: :func:`airflow_broadway.core.custody.in_process.settle_at_once`.
SettleAtOnce = Callable[[list[Entry]], tuple[SettleReport, list[Entry], list[Entry]]]


class ChunkStager:
    """Stages chunks from one thread; the sink of the run's acknowledger.

    :param settle_at_once: Executes ``ack_immediately``; called from any callback's thread.
    """

    def __init__(
        self, pipeline: Pipeline, writer: ProcessWriter, settle_at_once: SettleAtOnce
    ) -> None:
        self._pipeline = pipeline
        self._writer = writer
        self._settle_now = settle_at_once
        #: Verdicts settled immediately by callbacks, by message id, until the chunk is staged.
        self._now: dict[str, Verdict] = {}
        #: Held during an immediate settlement and during close, after which there is none.
        self._lock = threading.Lock()
        self._closed = False
        #: The number of messages that failed, and the reasons.
        self.failed = 0
        self.reasons = Reasons()
        #: The report of immediate settlements.
        self.settled_now = SettleReport()

    @property
    def staged(self) -> Mapping[str, int]:
        """Number of messages staged so far, per batcher."""
        return self._writer.counts

    def stage(self, chunk: Sequence[Message], result: ChunkResult) -> None:
        """Stages the result of each message of a chunk.

        :raises StagingError: If a file cannot be written.
        """
        successful, failed = self._marked(result.successful), self._marked(result.failed)
        self.failed += len(failed)
        self.reasons.add(failed)
        # Without batchers successes end here like failures: `record` receives their verdicts.
        ended = [] if self._pipeline.batchers else successful
        ack_messages_or_raise(ended, failed)
        if self._pipeline.batchers:
            self._writer.messages(successful)
        done = [message for message in (*ended, *failed) if is_settled(message)]
        settled = [entry_of(message, self._now.get(message.message_id, ACK)) for message in done]
        self._writer.entries(settled, settled=True)
        if self._now:
            for message in (*successful, *failed):
                self._now.pop(message.message_id, None)
        self.release(_without_result(chunk, successful, failed))
        if self._pipeline.defines("handle_failed"):  # otherwise no code needed the traces
            for message in failed:
                forget_trace(message.status.reason)

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Acknowledges messages that are not handled."""
        self._writer.entries(entry_of(message, ACK) for message in messages)

    def release(self, messages: Iterable[Message]) -> None:
        """Releases messages without an outcome, unless a callback settled them immediately."""
        for message in messages:
            verdict = self._now.pop(message.message_id, None)
            entry = entry_of(message, verdict or RELEASE)
            self._writer.entries([entry], settled=verdict is not None)

    def close(self) -> None:
        """Ends immediate settlement: messages that are not staged will be released."""
        with self._lock:
            self._closed = True

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Stages verdicts; see :class:`~airflow_broadway.core.custody.acknowledger.AckSink`."""
        self._writer.entries(entry_of(*judged) for judged in (*successful, *failed))

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Executes verdicts at the broker, for ``ack_immediately``.

        :raises LeaseLapsed: If the run has ended, or no longer holds some of them.
        :raises ProducerError: If the broker refuses.
        """
        with self._lock:
            if self._closed:
                raise LeaseLapsed("the run has ended and released this message")
            judged = (*successful, *failed)
            entries = [entry_of(*pair) for pair in judged if pair[0].message_id not in self._now]
            report, done, _ = self._settle_now(entries)
            # Executed verdicts count, even if an error is raised to the callback.
            self.settled_now += done_of(report)
            self._now.update((entry.message_id, entry.verdict) for entry in done)
        check_settled(report)

    def _marked(self, messages: list[Message]) -> list[Message]:
        """Marks messages settled by a call that raised because the broker refused others.

        The callback does not know that these are settled.
        """
        if not self._now:
            return messages
        return [
            message.with_acknowledger(NO_ACK) if message.message_id in self._now else message
            for message in messages
        ]


def _without_result(
    chunk: Sequence[Message], successful: Sequence[Message], failed: Sequence[Message]
) -> list[Message]:
    """Returns the messages of a chunk without a result, which must not count as successes."""
    if len(chunk) == len(successful) + len(failed):
        return []  # a stage returns each message at most once
    seen = {message.message_id for message in (*successful, *failed)}
    return [message for message in chunk if message.message_id not in seen]
