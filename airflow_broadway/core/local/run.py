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
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.custody.in_process import Settler, Tally
from airflow_broadway.core.custody.lease_renewer import LeaseRenewer
from airflow_broadway.core.custody.producer import Connection, Connections, ProducerEnv
from airflow_broadway.core.custody.protocol import Lease, Source
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.run_summary import SHOWN_REASONS, dropped_line
from airflow_broadway.core.errors import BroadwayError, ConnectionMissing, LeaseLapsed
from airflow_broadway.core.local.engine import Engine, check_engines
from airflow_broadway.core.local.report import RunReport
from airflow_broadway.core.log_context import log_ids
from airflow_broadway.core.model.acks import AckRef, is_settled
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.child_host import ChildHost
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.core.stages.receiving import Budget, Receiving, demand_of, enqueued_of
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.stages.suspect_lane import Suspects
from airflow_broadway.core.text import many

__all__ = ["LocalRun", "RunReport", "run_local"]

log = logging.getLogger(__name__)


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


def run_local(
    pipeline: Pipeline | type[Pipeline],
    messages: Iterable[Any] | None = None,
    *,
    max_messages: int | None = None,
    max_bytes: int | None = None,
    max_seconds: float | None = None,
    wait_seconds: float = 0.0,
    idle_seconds: float = 0.0,
    connections: Connections | Mapping[str, Connection] | None = None,
    clock: Clock | None = None,
    limiter: RateLimiter | None = None,
    stop: Callable[[], str] | Stop = lambda: "",
) -> RunReport:
    """Runs a pipeline whose batchers are all ``engine="python"`` in this process, to its end.

    In the main thread SIGTERM stops it.

    :param messages: Messages, or their data, to handle instead of the producer's, without a broker.
        Those without an acknowledger are only counted, by the producer's verdicts.
    :param max_messages: Stop after this many messages.
    :param max_bytes: Stop once payloads of this many bytes were received.
    :param max_seconds: Begin no message after this long; the remaining received messages are then
        released, and batches are delivered all the same.
    :param wait_seconds: How long to wait for the first message.
    :param idle_seconds: Stop after this long without a message.
    :param connections: Resolves connection ids.
    :param limiter: The limiter for the producer's ``rate_limiting``; by default one whose state
        ends with the run.
    :param stop: Called often; returns the reason to stop now, or ``""``.  The run then has the
        pipeline's ``shutdown`` seconds to finish what was handed out; a run that ends by itself has
        no limit.
    :returns: The report; ``report.balanced`` is whether every message is accounted for.
    :raises PipelineError: If a batcher runs on Spark; if the transformer raised, or the processors'
        ``partition_by`` or a custom splitter returned an invalid value.  Exceptions of these two
        are re-raised.  Messages without an outcome are released then.
    :raises LeaseLapsed: If the run took so long that its messages were redelivered to another.
    :raises ProducerError: If the broker fails.
    """
    instance = pipeline() if isinstance(pipeline, type) else pipeline
    run_clock = clock or SystemClock()
    stopping = stop if isinstance(stop, Stop) else Stop(run_clock, instance.shutdown, stop)
    env = _make_env(instance, run_clock, connections)
    run = LocalRun(instance, env, limiter=limiter, stop=stopping)
    with stopping.on_sigterm():
        if messages is not None:
            return run.handle(messages)
        budget = Budget(
            max_messages=max_messages,
            max_bytes=max_bytes,
            max_seconds=max_seconds,
            wait_seconds=wait_seconds,
            idle_seconds=idle_seconds,
        )
        return run.pull(budget)


def _make_env(
    pipeline: Pipeline,
    clock: Clock,
    connections: Connections | Mapping[str, Connection] | None,
) -> ProducerEnv:
    known = _MappedConnections(connections) if isinstance(connections, Mapping) else connections
    options: dict[str, Any] = {} if known is None else {"connections": known}
    return ProducerEnv(
        pipeline=pipeline.name,
        generation=uuid.uuid4().hex,
        owner={"dag_id": "local", "run_id": f"local-{os.getpid()}"},
        clock=clock,
        **options,
    )


class LocalRun:
    """One finite run in this process, for callers that build the producer's environment.

    :param env: The producer's environment; names the generation.
    :param limiter: As for :func:`run_local`.
    :param stop: Stops the run; signals are the caller's concern.
    :param suspects: Selects the messages that are handled in a child process.
    :param host: Answers requests of callbacks in child processes.
    :raises PipelineError: If a batcher runs on Spark.
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
    ) -> None:
        check_engines(pipeline)
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

        def count_own(successful: list[Message], failed: list[Message]) -> None:
            tally.counts["acked"] += sum(message.message_id in own for message in successful)
            tally.counts["left"] += sum(message.message_id in own for message in failed)

        engine = self._make_engine()
        if own:
            engine.on_settled = count_own
        try:
            engine.run([[_settled_by(acknowledger, "given", message) for message in batch]])
        finally:
            tally.closed = True
            engine.close()
        released = len(batch) - sum(tally.counts.values())
        tally.counts["released"] += max(0, released)
        size = sum(message.size for message in batch)
        self.report = self._make_report(
            engine,
            SettleReport.from_json(tally.counts),
            generation="local",
            received=len(batch),
            received_bytes=size,
            ended="given",
        )
        return self.report

    def pull(
        self, budget: Budget, *, on_lease: Callable[[Lease], None] = lambda lease: None
    ) -> RunReport:
        """Handles messages of the producer's source within ``budget``; see :func:`run_local`.

        :param on_lease: Called with the lease before the first receive.
        """
        env = replace(self._env, stopping=lambda: bool(self._stop.reason()))
        with (
            log_ids(generation=env.generation),
            closing(self._make_engine()) as engine,
            closing(self._pipeline.producer.source(env)) as source,
        ):
            on_lease(source.lease)
            return self._pull_from(source, engine, budget)

    def _pull_from(self, source: Source, engine: Engine, budget: Budget) -> RunReport:
        settler = self._make_settler(source)
        lease_renewer = self._make_lease_renewer(source, settler)
        receiving = self._make_receiving(source, engine, budget, settler, lease_renewer)
        ended = ""
        if self._pipeline.producer.renews:
            lease_renewer.start()
        try:
            self._feed(engine, receiving, settler, budget)
        except BaseException as error:  # recorded for the report; re-raised
            ended = "error" if isinstance(error, Exception) else "interrupted"
            raise
        finally:
            lease_renewer.stop()
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
                f" of {many(receiving.received, 'message')} are redelivered to another run"
            )
        return report

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
        self.report = self._make_report(
            engine,
            settled,
            generation=self._env.generation,
            received=received + (_count_unheard(settled, received) if failed else 0),
            received_bytes=receiving.received_bytes,
            ended=receiving.ended or ended,
            seconds={"receive": receiving.seconds, "settle": settler.seconds, **receiving.lag},
        )

    def _make_settler(self, source: Source) -> Settler:
        batch_processors = sum(options.concurrency for options in self._pipeline.batchers.values())
        return Settler(
            lambda: self._pipeline.producer.custodian(self._env),
            lambda: source.lease,
            threaded=self._pipeline.processors.concurrency > 1 or batch_processors > 1,
        )

    def _make_lease_renewer(self, source: Source, settler: Settler) -> LeaseRenewer:
        return LeaseRenewer(
            lambda: self._pipeline.producer.custodian(self._env),
            source.lease.seconds,
            lambda: [source.lease] if settler.received else [],
        )

    def _make_receiving(
        self,
        source: Source,
        engine: Engine,
        budget: Budget,
        settler: Settler,
        lease_renewer: LeaseRenewer,
    ) -> Receiving:
        producer, generation = self._pipeline.producer, self._env.generation
        acknowledger = RunAcknowledger(producer, settler)

        def accept(messages: Sequence[Message]) -> list[Message]:
            settler.hold(messages)
            return [
                message.with_acknowledger(
                    AckRef(acknowledger, generation, message.acknowledger.data)
                )
                for message in messages
            ]

        return Receiving(
            source,
            budget,
            clock=self._env.clock,
            limiter=self._limiter,
            demand=demand_of(self._pipeline),
            most=producer.most_at_once,
            accept=accept,
            next_timeout=engine.next_timeout,
            stop=lambda: self._stop.reason() or ("lapsed" if lease_renewer.lapsed else ""),
            enqueued_at=enqueued_of(self._pipeline),
        )

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

    def _make_engine(self) -> Engine:
        transformer = self._pipeline.producer.transformer
        return Engine(
            self._pipeline,
            clock=self._env.clock,
            stop=self._stop,
            transformer=transformer,
            suspects=self._suspects,
            host=self._host,
        )

    def _make_report(
        self,
        engine: Engine,
        settled: SettleReport,
        *,
        generation: str,
        received: int,
        received_bytes: int,
        ended: str,
        seconds: Mapping[str, float] | None = None,
    ) -> RunReport:
        engine.reasons.log_table(log, "this run")
        if engine.dropped:
            log.warning("%s", dropped_line(engine.dropped))
        total = time.monotonic() - self._started
        report = RunReport(
            pipeline=self._pipeline.name,
            generation=generation,
            received=received,
            received_bytes=received_bytes,
            failed=engine.failed,
            settled=settled,
            batches=engine.batches,
            seconds={**engine.seconds, **(seconds or {}), "total": total},
            reasons=engine.reasons.most(SHOWN_REASONS),
            ended=self._stop.reason() or ended,
        )
        if telemetry.handlers("run.stop"):
            telemetry.emit(
                "run.stop",
                {"duration": total, "monotonic_time": time.monotonic()},
                {"topology_name": self._pipeline.name, "report": report},
            )
        return report


def _settling(receiving: Receiving, settler: Settler) -> Iterator[list[Message]]:
    """Yields the dispatches; before each next one, carries out queued acks."""
    for dispatch in receiving:
        yield dispatch
        settler.tick()


def _count_unheard(settled: SettleReport, received: int) -> int:
    """Returns the number of messages that the broker sent in a lost reply: they were released."""
    return min(max(0, settled.total - received), settled.released)


def _as_message(item: Any, index: int) -> Message:
    message = item if type(item) is Message else Message(item, position=index)
    if message.message_id:
        return message
    return message.with_message_id(f"given-{index}")


def _settled_by(acknowledger: RunAcknowledger, ref: str, message: Message) -> Message:
    """Returns the message with an acknowledger: its own, or else this one."""
    if not is_settled(message):
        return message
    return message.with_acknowledger(AckRef(acknowledger, ref, message.acknowledger.data))
