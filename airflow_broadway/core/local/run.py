"""A finite run in one process: no Airflow, no Spark, nothing staged, real custody.

    report = run_local(Flights(), max_messages=1000)

Messages are taken within a budget, handled, batched, and settled at their broker in bulk as their
outcomes come.  At the end of the budget, of the queue, or on SIGTERM the run drains in Broadway's
order: stop taking, finish the chunks, deliver the pending batches, settle; what then has no outcome
is released.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.account import (
    REASONS,
)
from airflow_broadway.core.custody.acknowledger import RunAcknowledger, ack_messages, is_settled
from airflow_broadway.core.custody.in_process import Settler, Tally
from airflow_broadway.core.custody.lease_renewer import LeaseRenewer
from airflow_broadway.core.custody.producer import Connection, Connections, ProducerEnv
from airflow_broadway.core.custody.protocol import SettleReport, Source
from airflow_broadway.core.errors import BroadwayError, ConnectionMissing, LeaseLapsed
from airflow_broadway.core.local.engine import Engine, check_engines
from airflow_broadway.core.local.report import RunReport
from airflow_broadway.core.model.message import AckRef, Message
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.core.stages.receiving import Budget, Receiving, demand_of
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.text import many

if TYPE_CHECKING:
    from airflow_broadway.core.model.pipeline import Pipeline

__all__ = ["RunReport", "run_local"]

log = logging.getLogger(__name__)


class _Given:
    """Connections by id, from a mapping."""

    def __init__(self, connections: Mapping[str, Connection]) -> None:
        self._connections = connections

    def get(self, conn_id: str) -> Connection:
        try:
            return self._connections[conn_id]
        except KeyError:
            raise ConnectionMissing(
                f"the connection {conn_id!r} is not among those given: {sorted(self._connections)}"
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
    env: ProducerEnv | None = None,
    limiter: RateLimiter | None = None,
    stop: Callable[[], str] | Stop = lambda: "",
    on_lease: Callable[[Any], None] = lambda lease: None,
    on_end: Callable[[RunReport], None] = lambda report: None,
    on_sigterm: bool = True,
) -> RunReport:
    """Run a pipeline whose batchers are all ``engine="python"`` in this process, to its end.

    :param messages: Messages, or their data, to handle instead of the producer's: no broker is
        asked.  Those without an acknowledger are only counted, by the producer's verdicts.
    :param max_messages: Stop after this many messages.
    :param max_bytes: Stop once payloads of this many bytes were received.
    :param max_seconds: Begin no message after this long; what was taken then goes back, and batches
        are delivered all the same.
    :param wait_seconds: How long to wait for the first message.
    :param idle_seconds: Stop after this long without a message.
    :param connections: Where connection ids are looked up.
    :param env: What the producer is opened in; names the generation.
    :param limiter: Of the producer's ``rate_limiting``; one that forgets with the run, unless
        given.
    :param stop: Asked often: why to stop now, or ``""``.  The run then has the pipeline's
        ``shutdown`` seconds to finish what was handed out; a run that ends by itself has no bound.
    :param on_lease: Called with the lease before the first message is received.
    :param on_end: Called with the report once all is settled or given back, before an error that
        ended the run is raised.
    :param on_sigterm: Whether SIGTERM stops too, in the main thread.
    :returns: What was done; ``report.balanced`` says whether every message is accounted for.
    :raises PipelineError: If a batcher runs on Spark; if the transformer raised, or the processors'
        ``partition_by`` or a custom splitter returned nonsense.  What these two raise is raised
        here.  Messages without an outcome are released then.
    :raises LeaseLapsed: If the run took so long that its messages went to another.
    :raises ProducerError: If the broker fails.
    """
    made = pipeline() if isinstance(pipeline, type) else pipeline
    check_engines(made)
    used = clock or (env.clock if env is not None else SystemClock())
    told = stop if isinstance(stop, Stop) else Stop(used, made.shutdown, stop)
    run = _Run(made, used, told)
    with told.on_sigterm() if on_sigterm else nullcontext():
        if messages is not None:
            return run.given(messages)
        budget = Budget(
            max_messages=max_messages,
            max_bytes=max_bytes,
            max_seconds=max_seconds,
            wait_seconds=wait_seconds,
            idle_seconds=idle_seconds,
        )
        return run.pulled(
            env or _env(made, used, connections),
            budget,
            limiter or RateLimiter(made.producer.rate_limiting, used),
            on_lease,
            on_end,
        )


def _env(
    pipeline: Pipeline,
    clock: Clock,
    connections: Connections | Mapping[str, Connection] | None,
) -> ProducerEnv:
    known = _Given(connections) if isinstance(connections, Mapping) else connections
    about: dict[str, Any] = {} if known is None else {"connections": known}
    return ProducerEnv(
        pipeline=pipeline.name,
        generation=uuid.uuid4().hex,
        owner={"dag_id": "local", "run_id": f"local-{os.getpid()}"},
        clock=clock,
        **about,
    )


class _Run:
    """One call of :func:`run_local`."""

    def __init__(self, pipeline: Pipeline, clock: Clock, stop: Stop) -> None:
        self._pipeline = pipeline
        self._clock = clock
        self._stop = stop
        self._started = time.monotonic()

    def given(self, messages: Iterable[Any]) -> RunReport:
        """Handle messages that no source delivered."""
        tally = Tally()
        acknowledger = RunAcknowledger(self._pipeline.producer, tally)
        given = [_as_message(each, index) for index, each in enumerate(messages)]
        own: set[str] = set()  # ids of messages that somebody else settles

        def counted(successful: list[Message], failed: list[Message]) -> None:
            tally.counts["acked"] += sum(each.message_id in own for each in successful)
            tally.counts["left"] += sum(each.message_id in own for each in failed)

        dispatch = []
        for message in given:
            if is_settled(message):
                message = message.with_acknowledger(
                    AckRef(acknowledger, "given", message.acknowledger.data)
                )
            else:
                own.add(message.message_id)
            dispatch.append(message)
        engine = self._engine()
        if own:
            engine.on_settled = counted
        try:
            engine.run([dispatch])
        finally:
            tally.closed = True
            engine.close()
        released = len(given) - sum(tally.counts.values())
        tally.counts["released"] += max(0, released)
        settled = SettleReport.from_json(tally.counts)
        return self._report("local", engine, settled, len(given), _bytes(given), "given")

    def pulled(
        self,
        env: ProducerEnv,
        budget: Budget,
        limiter: RateLimiter,
        on_lease: Callable[[Any], None],
        on_end: Callable[[RunReport], None],
    ) -> RunReport:
        """Handle messages of the producer's source."""
        engine, stop = self._engine(), self._stop
        try:
            source = self._pipeline.producer.source(
                replace(env, stopping=lambda: bool(stop.reason()))
            )
            try:
                on_lease(source.lease)
                return self._pulled(engine, source, env, budget, limiter, on_end)
            finally:
                source.close()
        finally:
            engine.close()

    def _pulled(
        self,
        engine: Engine,
        source: Source,
        env: ProducerEnv,
        budget: Budget,
        limiter: RateLimiter,
        on_end: Callable[[RunReport], None],
    ) -> RunReport:
        producer, stop = self._pipeline.producer, self._stop
        settler = Settler(
            lambda: producer.custodian(env),
            lambda: source.lease,
            threaded=_is_threaded(self._pipeline),
        )
        keeper = LeaseRenewer(
            lambda: producer.custodian(env),
            source.lease.seconds,
            lambda: [source.lease] if settler.received else [],
        )
        acknowledger = RunAcknowledger(producer, settler)
        intake = Receiving(
            source,
            budget,
            clock=self._clock,
            limiter=limiter,
            demand=demand_of(self._pipeline),
            transformer=producer.transformer,
            accept=lambda taken: _accept(taken, acknowledger, settler, env.generation),
            patience=engine.patience,
            stop=lambda: stop.reason() or ("lapsed" if keeper.lapsed else ""),
        )
        broke = ""
        if producer.renews:
            keeper.start()
        try:
            self._feed(engine, intake, settler, budget)
        except BaseException as error:  # for the report; it is raised all the same
            broke = "error" if isinstance(error, Exception) else "interrupted"
            raise
        finally:
            keeper.stop()
            settled = settler.finish()
            engine.seconds["receive"] = intake.seconds
            engine.seconds["settle"] = settler.seconds
            report = self._report(
                env.generation,
                engine,
                settled,
                intake.received,
                intake.received_bytes,
                intake.ended or broke,
            )
            on_end(report)
        if intake.error is not None:
            raise intake.error
        if keeper.lapsed:
            raise LeaseLapsed(
                f"the lease of {source.lease.seconds} seconds has lapsed; {settled.lapsed} of"
                f" {many(intake.received, 'message')} went to another run, or will"
            )
        return report

    def _feed(self, engine: Engine, intake: Receiving, settler: Settler, budget: Budget) -> None:
        """Handle all that comes; on return, or an error, nothing more does."""
        try:
            self._stop.bound(budget.max_seconds)
            engine.run(_settling(intake, settler))
        except BaseException:  # raised again; before that the source takes nothing more
            with suppress(BroadwayError):  # the first error is the one to show
                intake.stop()
            raise
        finally:
            engine.close()
        intake.stop()

    def _engine(self) -> Engine:
        return Engine(self._pipeline, clock=self._clock, ack=ack_messages, stop=self._stop)

    def _report(
        self,
        generation: str,
        engine: Engine,
        settled: SettleReport,
        received: int,
        size: int,
        ended: str,
    ) -> RunReport:
        engine.reasons.tell(log, "this run")
        if engine.dropped:
            log.warning("Columns that the schema lacks were dropped: %s.", dict(engine.dropped))
        batches: dict[str, dict[str, int]] = {name: {} for name in self._pipeline.batchers}
        for (batcher, trigger), count in engine.batches.items():
            batches[batcher][trigger] = count
        report = RunReport(
            pipeline=self._pipeline.name,
            generation=generation,
            received=received,
            received_bytes=size,
            failed=engine.failed,
            settled=settled,
            batches=batches,
            seconds={**engine.seconds, "total": time.monotonic() - self._started},
            reasons=engine.reasons.most(REASONS),
            ended=self._stop.reason() or ended,
        )
        if telemetry.handlers("run.stop"):
            telemetry.emit(
                "run.stop",
                {"duration": report.seconds["total"], "monotonic_time": time.monotonic()},
                {"topology_name": self._pipeline.name, "report": report},
            )
        return report


def _settling(intake: Receiving, settler: Settler) -> Iterator[list[Message]]:
    """The dispatches; before each next one, acks that have waited are carried out."""
    for dispatch in intake:
        yield dispatch
        settler.tick()


def _accept(
    messages: Sequence[Message], acknowledger: RunAcknowledger, settler: Settler, generation: str
) -> list[Message]:
    """Secured messages with the run's acknowledger."""
    settler.hold(messages)
    return [
        message.with_acknowledger(AckRef(acknowledger, generation, message.acknowledger.data))
        for message in messages
    ]


def _as_message(given: Any, index: int) -> Message:
    message = given if type(given) is Message else Message(given, position=index)
    if message.message_id:
        return message
    return message.with_message_id(f"given-{index}")


def _is_threaded(pipeline: Pipeline) -> bool:
    batch_processors = sum(options.concurrency for options in pipeline.batchers.values())
    return pipeline.processors.concurrency > 1 or batch_processors > 1


def _bytes(messages: list[Message]) -> int:
    return sum(message.size for message in messages)
