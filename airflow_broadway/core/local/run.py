"""A finite run in one process: no Airflow, no Spark, no staging, real custody.

    report = run_local(Flights(), max_messages=1000)

Messages are received within a budget, handled, batched, and settled at their broker in bulk as
outcomes arrive.  At the end of the budget, of the queue, or on SIGTERM the run drains in Broadway's
order: stop receiving, finish the chunks, deliver the pending batches, settle; messages without an
outcome are released.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.collector import look_after
from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.custody.in_process import Settler, Tally
from airflow_broadway.core.custody.lease_renewer import LeaseRenewer
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease, Source
from airflow_broadway.core.custody.report import SettleReport, failures_of
from airflow_broadway.core.custody.run_summary import (
    SHOWN_REASONS,
    dropped_line,
    failures_trouble,
    settling_trouble,
    unbalanced_line,
)
from airflow_broadway.core.errors import (
    BroadwayError,
    ConnectionMissing,
    LeaseLapsed,
    PipelineError,
)
from airflow_broadway.core.local.engine import Engine
from airflow_broadway.core.log_context import log_ids
from airflow_broadway.core.model.acks import ack_messages, is_settled
from airflow_broadway.core.model.connections import Connection, Connections, NoConnections
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline, check_engines
from airflow_broadway.core.stages.batch_processor import CommitRows, drop_rows
from airflow_broadway.core.stages.child_host import ChildHost
from airflow_broadway.core.stages.processor import Ack
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.core.stages.receiving import Budget, Receiving, demand_of, enqueued_of
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.stages.suspect_lane import Suspects
from airflow_broadway.core.text import pluralize

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The result of a run.

    :param received: Messages received from the source, or passed to the run.
    :param failed: Messages that a callback failed, in either stage.
    :param settled: Each message in one class: the sum is ``received``.
    :param batches: Batches handled, by batcher and by trigger.
    :param seconds: Seconds of each stage, in the run's own thread: ``receive``, ``process``,
        ``batch``, ``handle_batch``, ``settle``; and ``total``.  ``waited`` is the longest time that
        a message had waited at its broker, if known.
    :param ended: Why it stopped receiving: ``empty``, ``max_messages``, ``max_bytes``,
        ``max_seconds``, ``rate_limiting``, ``given``, ``error``, ``stopped``, or ``interrupted`` by
        an exception that is not a callback's.
    :param reasons: The reasons of failed messages, the most frequent first: ``count``, ``stage``
        (unknown here) and ``reason``.
    """

    pipeline: str
    generation: str
    received: int
    received_bytes: int
    failed: int
    settled: SettleReport
    batches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    ended: str = ""
    reasons: Sequence[Mapping[str, Any]] = ()

    @property
    def balanced(self) -> bool:
        """Whether every message received is accounted for."""
        return self.settled.total == self.received

    def totals(self) -> dict[str, int]:
        """Returns the counts, under the names of every report."""
        totals = self.settled.classes()
        return {
            "received": self.received,
            "failed": failures_of(self.failed, totals),
            **totals,
            "accounted": self.settled.total,
        }

    def trouble(self, fail_when: Any = "all") -> str:
        """Returns what needs attention in this run, as sentences; empty if it succeeded.

        That is: the sum does not balance, messages had lapsed, could not be settled or block those
        behind them, or as many failed as ``fail_when`` specifies: see
        :func:`airflow_broadway.core.custody.run_summary.failures_trouble`.
        """
        settled, totals = self.settled, self.totals()
        sentences = [
            "" if self.balanced else unbalanced_line(totals),
            settling_trouble(settled.lapsed, settled.failed, halted=settled.halted),
            failures_trouble(totals, fail_when),
        ]
        return ".  ".join(sentence for sentence in sentences if sentence)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a JSON value."""
        return {
            **asdict(self),
            "settled": self.settled.to_json(),
            "balanced": self.balanced,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }


class _MappedConnections:
    """Connections by id, from a mapping."""

    def __init__(self, connections: Mapping[str, Connection]) -> None:
        self._connections = connections

    def get(self, conn_id: str) -> Connection:
        try:
            return self._connections[conn_id]
        except KeyError:
            raise ConnectionMissing(
                f"the connection {conn_id!r} is not in `connections`: {sorted(self._connections)}"
            ) from None


class LocalSinks(Protocol):
    """The open sinks of a run."""

    def commit_of(self, batcher: str) -> CommitRows:
        """Returns the commit function of one batch processor."""

    def close(self) -> None:
        """Releases connections."""


def run_local(
    pipeline: Pipeline | type[Pipeline],
    messages: Iterable[Any] | None = None,
    *,
    connections: Connections | Mapping[str, Connection] | None = None,
    clock: Clock | None = None,
    limiter: RateLimiter | None = None,
    stop: Callable[[], str] | Stop = lambda: "",
    open_sinks: Callable[[Pipeline, str, Connections], LocalSinks] | None = None,
    **budget: Any,
) -> RunReport:
    """Runs a pipeline whose batchers are all ``engine="python"`` in this process, to its end.

    In the main thread SIGTERM stops it.

    :param messages: Messages, or their data, to handle instead of the producer's, without a broker.
        Those without an acknowledger are only counted, by the producer's verdicts.
    :param connections: Resolves connection ids.
    :param limiter: The limiter for the producer's ``rate_limiting``; by default one whose state
        ends with the run.
    :param stop: Called often; returns the reason to stop now, or ``""``.  The run then has the
        pipeline's ``shutdown`` seconds to finish what was handed out; a run that ends by itself has
        no limit.
    :param open_sinks: Opens the sinks of a pipeline's batchers, by the run's generation.
    :param budget: The fields of :class:`.Budget`, such as ``max_messages``.  After ``max_seconds``
        no message is begun; the remaining received messages are then released, and batches are
        delivered all the same.
    :returns: The report; ``report.balanced`` is whether every message is accounted for.
    :raises OptionsError: If a callback is missing, or takes other arguments.
    :raises PipelineError: If a batcher runs on Spark; if the transformer raised, or the processors'
        ``partition_by`` or a custom splitter returned an invalid value.  Exceptions of these two
        are re-raised.  Messages without an outcome are released then.
    :raises LeaseLapsed: If the run took so long that its messages were redelivered to another.
    :raises ProducerError: If the broker fails.
    """
    instance = pipeline() if isinstance(pipeline, type) else pipeline
    instance.check_callbacks(instance.batchers)
    run_clock = clock or SystemClock()
    stopping = stop if isinstance(stop, Stop) else Stop(run_clock, instance.shutdown, stop)
    if isinstance(connections, Mapping):
        connections = _MappedConnections(connections)
    env = ProducerEnv(
        pipeline=instance.name,
        generation=uuid.uuid4().hex,
        owner={"dag_id": "local", "run_id": f"local-{os.getpid()}"},
        clock=run_clock,
        connections=connections or NoConnections(),
    )
    sinks = None if open_sinks is None else open_sinks(instance, env.generation, env.connections)
    commit = None if sinks is None else sinks.commit_of
    run = LocalRun(instance, env, limiter=limiter, stop=stopping, commit=commit)
    with closing(sinks) if sinks else nullcontext(), stopping.on_sigterm():
        if messages is not None:
            return run.handle(messages)
        return run.pull(Budget(**budget))


class LocalRun:
    """One finite run in this process, for callers that build the producer's environment.

    :param env: The producer's environment; names the generation.
    :param limiter: As for :func:`run_local`.
    :param stop: Stops the run; signals are the caller's concern.
    :param suspects: Selects the messages that are handled in a child process.
    :param host: Answers requests of callbacks in child processes.
    :param commit: Returns the commit function of one batch processor, by its batcher.
    :raises PipelineError: If a batcher runs on Spark, or has a sink and there is no ``commit``.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        env: ProducerEnv,
        *,
        limiter: RateLimiter | None = None,
        stop: Stop | None = None,
        suspects: Suspects | None = None,
        host: ChildHost | None = None,
        commit: Callable[[str], CommitRows] | None = None,
    ) -> None:
        check_engines(pipeline)
        sinks = [name for name, options in pipeline.batchers.items() if options.sink is not None]
        if sinks and commit is None:
            raise PipelineError(
                f"nothing commits the rows of {sinks}: use {pipeline.name}.run_local"
            )
        self._commit = commit or (lambda batcher: drop_rows)
        self._suspects = suspects
        self._host = host
        self._pipeline = pipeline
        self._env = env
        self._limiter = limiter or RateLimiter(pipeline.producer.rate_limiting, env.clock)
        self._stop = stop or Stop(env.clock, pipeline.shutdown)
        self._started = time.monotonic()
        #: The report, once all messages are settled or released, even if an error ended the run.
        self.report: RunReport | None = None

    def handle(self, messages: Iterable[Any]) -> RunReport:
        """Handles messages, or their data, that no source delivered; see :func:`run_local`."""
        tally = Tally()
        acknowledger = RunAcknowledger(self._pipeline.producer, tally)
        batch = [_as_message(item, index) for index, item in enumerate(messages)]
        # Messages with their own acknowledger are settled by that, and only counted here.
        own = {message.message_id for message in batch if not is_settled(message)}
        own_counts: Counter[str] = Counter()
        lock = threading.Lock()

        def settle(successful: list[Message], failed: list[Message]) -> None:
            ack_messages(successful, failed)
            with lock:
                own_counts["acked"] += sum(message.message_id in own for message in successful)
                own_counts["left"] += sum(message.message_id in own for message in failed)

        engine = self._make_engine(settle if own else ack_messages)
        dispatch = [
            acknowledger.attach([message], "given")[0] if is_settled(message) else message
            for message in batch
        ]
        try:
            engine.run([dispatch])
        finally:
            tally.closed = True
            engine.close()
        counts = own_counts + Counter(tally.counts)
        counts["released"] += max(0, len(batch) - counts.total())
        self.report = self._make_report(
            engine,
            SettleReport.from_json(counts),
            generation="local",
            received=len(batch),
            received_bytes=sum(message.size for message in batch),
            ended="given",
        )
        return self.report

    def pull(
        self, budget: Budget, *, on_lease: Callable[[Lease], object] = lambda lease: None
    ) -> RunReport:
        """Handles messages of the producer's source within ``budget``; see :func:`run_local`.

        :param on_lease: Called with the lease before the first receive.
        :raises PipelineError: If the pipeline has a dead-letter table.
        """
        if self._pipeline.dead_letter_table is not None:
            raise PipelineError(
                f"{self._pipeline.name!r} has a dead_letter_table, whose rows need staged messages,"
                " which a run in one process does not have: run the pipeline's task group, or"
                " override it with dead_letter_table=None"
            )
        env = replace(self._env, stopping=lambda: bool(self._stop.reason()))
        with (
            log_ids(generation=env.generation),
            closing(self._make_engine(ack_messages)) as engine,
            closing(self._pipeline.producer.source(env)) as source,
        ):
            on_lease(source.lease)
            return self._pull_from(source, engine, budget)

    def _pull_from(self, source: Source, engine: Engine, budget: Budget) -> RunReport:
        pipeline, env, producer = self._pipeline, self._env, self._pipeline.producer
        batch_processors = sum(options.concurrency for options in pipeline.batchers.values())
        settler = Settler(
            lambda: producer.custodian(env),
            lambda: source.lease,
            threaded=pipeline.processors.concurrency > 1 or batch_processors > 1,
        )
        lease_renewer = LeaseRenewer(
            lambda: producer.custodian(env),
            source.lease.seconds,
            lambda: [source.lease] if producer.renews and settler.received else [],
        )
        acknowledger = RunAcknowledger(producer, settler)

        def accept(messages: Sequence[Message]) -> list[Message]:
            settler.hold(messages)
            return acknowledger.attach(messages, env.generation)

        receiving = Receiving(
            source,
            budget,
            clock=env.clock,
            limiter=self._limiter,
            demand=demand_of(pipeline),
            most=producer.max_fetch,
            accept=accept,
            next_timeout=engine.next_timeout,
            stop_reason=lambda: self._stop.reason() or ("lapsed" if lease_renewer.lapsed else ""),
            enqueued_at=enqueued_of(pipeline),
        )
        ended = ""
        try:
            with lease_renewer:
                self._feed(engine, receiving, settler, budget)
        except BaseException as error:  # recorded for the report; re-raised
            ended = "error" if isinstance(error, Exception) else "interrupted"
            raise
        finally:
            failed = bool(ended) or receiving.error is not None
            self._end(engine, receiving, settler, ended, failed=failed)
        if receiving.error is not None:
            raise receiving.error
        report = self.report
        if report is None:
            raise RuntimeError("no error occurred, and nothing was settled")
        if lease_renewer.lapsed:
            raise LeaseLapsed(
                f"the lease of {source.lease.seconds} seconds has lapsed; {report.settled.lapsed}"
                f" of {pluralize(receiving.received, 'message')} are redelivered to another run"
            )
        return report

    def _feed(self, engine: Engine, receiving: Receiving, settler: Settler, budget: Budget) -> None:
        """Handles all messages of the source, and stops it, also on an error."""
        try:
            self._stop.bound(budget.max_seconds)
            engine.run(_settling(receiving, settler))
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            with suppress(BroadwayError):  # the first error is the one to raise
                receiving.stop()
            raise
        finally:
            engine.close()
        receiving.stop()

    def _end(
        self, engine: Engine, receiving: Receiving, settler: Settler, ended: str, *, failed: bool
    ) -> None:
        """Settles all messages that the run holds, and creates its report."""
        received = receiving.received
        try:
            settled = settler.finish(unheard=failed)
        except BroadwayError as error:
            if received:
                raise
            # The error that ended the run is the one to raise.
            log.warning("Messages that may have been received could not be released: %s", error)
            return
        # Messages that the broker sent in a lost reply: they were released.
        unheard = min(max(0, settled.total - received), settled.released) if failed else 0
        self.report = self._make_report(
            engine,
            settled,
            generation=self._env.generation,
            received=received + unheard,
            received_bytes=receiving.received_bytes,
            ended=receiving.ended or ended,
            seconds={"receive": receiving.seconds, "settle": settler.seconds, **receiving.lag},
        )

    def _make_engine(self, ack: Ack) -> Engine:
        return Engine(
            self._pipeline,
            clock=self._env.clock,
            ack=ack,
            stop=self._stop,
            transformer=self._pipeline.producer.transformer,
            suspects=self._suspects,
            host=self._host,
            commit=self._commit,
        )

    def _make_report(
        self,
        engine: Engine,
        settled: SettleReport,
        *,
        ended: str,
        seconds: Mapping[str, float] = MappingProxyType({}),
        **received: Any,
    ) -> RunReport:
        engine.reasons.log_table(log, "this run")
        if engine.dropped:
            log.warning("%s", dropped_line(engine.dropped))
        total = time.monotonic() - self._started
        report = RunReport(
            pipeline=self._pipeline.name,
            failed=engine.failed,
            settled=settled,
            batches=engine.batches,
            seconds={**engine.seconds, **seconds, "total": total},
            reasons=engine.reasons.most(SHOWN_REASONS),
            ended=self._stop.reason() or ended,
            **received,
        )
        if telemetry.observed("run.stop"):
            telemetry.emit(
                "run.stop",
                {"duration": total, "monotonic_time": time.monotonic()},
                {"topology_name": self._pipeline.name, "report": report},
            )
        return report


def _settling(receiving: Receiving, settler: Settler) -> Iterator[list[Message]]:
    """Yields the dispatches; before each next one, carries out queued acks."""
    looked = 0
    for dispatch in receiving:
        yield dispatch
        settler.tick()
        looked = look_after(receiving.received_bytes, looked)


def _as_message(item: Any, index: int) -> Message:
    message = item if type(item) is Message else Message(item, position=index)
    return message if message.message_id else message.replace(message_id=f"given-{index}")
