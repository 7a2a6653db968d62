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
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_broadway.core import telemetry
from airflow_broadway.core.acknowledger import RunAcknowledger, ack_messages, is_settled
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody import SettleReport
from airflow_broadway.core.engine import Engine, check_engines
from airflow_broadway.core.errors import ConnectionMissing, LeaseLapsed
from airflow_broadway.core.intake import Budget, Intake
from airflow_broadway.core.keeper import Keeper
from airflow_broadway.core.message import AckRef, Message
from airflow_broadway.core.producer import Connection, Connections, ProducerEnv
from airflow_broadway.core.rate_limiter import RateLimiter
from airflow_broadway.core.settler import Settler, Tally

if TYPE_CHECKING:
    from airflow_broadway.core.broadway import Broadway

__all__ = ["RunReport", "run_local"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run did.

    :param received: Messages taken from the source, or given.
    :param failed: Messages that a callback failed, at either stage.
    :param settled: Each message in one class: the sum is ``received``.
    :param batches: Batches handled, by batcher and by trigger.
    :param seconds: Of each stage, in the run's own thread: ``receive``, ``process``, ``batch``,
        ``handle_batch``, ``settle``; and ``total``.
    :param ended: Why it stopped taking messages: ``empty``, ``max_messages``, ``max_bytes``,
        ``max_seconds``, ``rate_limiting``, ``given``, ``error`` or ``stopped``.
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

    @property
    def balanced(self) -> bool:
        """Whether every message received is accounted for."""
        return self.settled.total == self.received

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON value."""
        return {
            **asdict(self),
            "settled": self.settled.to_json(),
            "balanced": self.balanced,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }


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


class _Stop:
    """Whether the run is told to stop, and until when it may finish."""

    def __init__(
        self, clock: Clock, shutdown: float, asked: Callable[[], str], signals: bool
    ) -> None:
        self._signals = signals
        self._clock = clock
        self._shutdown = shutdown
        self._asked = asked
        self._reason = ""
        self._deadline: float | None = None

    def reason(self) -> str:
        """Why to stop, or ``""``."""
        reason = self._reason or self._asked()
        if reason and self._deadline is None:
            self._deadline = self._clock.monotonic() + self._shutdown
        self._reason = reason
        return reason

    def late(self) -> bool:
        """Whether the time for finishing is over."""
        self.reason()
        return self._deadline is not None and self._clock.monotonic() >= self._deadline

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Stop on SIGTERM, where signals can be handled: in the main thread."""
        if not self._signals or threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: object) -> None:
            self._reason = "stopped"

        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


def run_local(
    pipeline: Broadway | type[Broadway],
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
    stop: Callable[[], str] = lambda: "",
    on_lease: Callable[[Any], None] = lambda lease: None,
    on_sigterm: bool = True,
) -> RunReport:
    """Run a pipeline whose batchers are all ``engine="python"`` in this process, to its end.

    :param messages: Messages, or their data, to handle instead of the producer's: no broker is
        asked.  Those without an acknowledger are only counted, by the producer's verdicts.
    :param max_messages: Stop after this many messages.
    :param max_bytes: Stop once payloads of this many bytes were received.
    :param max_seconds: Stop taking messages after this long, even if there are more.
    :param wait_seconds: How long to wait for the first message.
    :param idle_seconds: Stop after this long without a message.
    :param connections: Where connection ids are looked up.
    :param env: What the producer is opened in; names the generation.
    :param limiter: Of the producer's ``rate_limiting``; one that forgets with the run, unless
        given.
    :param stop: Asked often: why to stop now, or ``""``.  The run then has the pipeline's
        ``shutdown`` seconds to finish; a run that ends by itself has no bound.
    :param on_lease: Called with the lease before the first message is received.
    :param on_sigterm: Whether SIGTERM stops too, in the main thread.
    :returns: What was done; ``report.balanced`` says whether every message is accounted for.
    :raises PipelineError: If a batcher runs on Spark; if the transformer, ``partition_by`` or a
        custom splitter broke: messages without an outcome have then been released.
    :raises LeaseLapsed: If the run took so long that its messages went to another.
    :raises ProducerError: If the broker fails.
    """
    made = pipeline() if isinstance(pipeline, type) else pipeline
    check_engines(made)
    used = clock or (env.clock if env is not None else SystemClock())
    run = _Run(made, used, _Stop(used, made.shutdown, stop, on_sigterm))
    if messages is not None:
        return run.given(messages)
    if env is None:
        known = _Given(connections) if isinstance(connections, Mapping) else connections
        about: dict[str, Any] = {} if known is None else {"connections": known}
        env = ProducerEnv(
            pipeline=made.name,
            generation=uuid.uuid4().hex,
            owner={"dag_id": "local", "run_id": f"local-{os.getpid()}"},
            clock=used,
            **about,
        )
    budget = Budget(
        max_messages=max_messages,
        max_bytes=max_bytes,
        max_seconds=max_seconds,
        wait_seconds=wait_seconds,
        idle_seconds=idle_seconds,
    )
    return run.pulled(
        env, budget, limiter or RateLimiter(made.producer.rate_limiting, used), on_lease
    )


class _Run:
    """One call of :func:`run_local`."""

    def __init__(self, pipeline: Broadway, clock: Clock, stop: _Stop) -> None:
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
            with self._stop.on_sigterm():
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
    ) -> RunReport:
        """Handle messages of the producer's source."""
        producer = self._pipeline.producer
        source = producer.source(env)
        try:
            on_lease(source.lease)
            settler = Settler(
                lambda: producer.custodian(env),
                lambda: source.lease,
                threaded=_is_threaded(self._pipeline),
            )
            keeper = Keeper(
                lambda: producer.custodian(env),
                source.lease.seconds,
                lambda: [source.lease] if settler.received else [],
            )
            if producer.renews:
                keeper.start()
            acknowledger = RunAcknowledger(producer, settler)
            try:
                engine = self._engine()
                intake = Intake(
                    source,
                    budget,
                    clock=self._clock,
                    limiter=limiter,
                    demand=_demand(self._pipeline),
                    transformer=producer.transformer,
                    accept=lambda taken: _accept(taken, acknowledger, settler, env.generation),
                    patience=engine.patience,
                    stop=lambda: self._stop.reason() or ("lapsed" if keeper.lapsed else ""),
                )
                try:
                    with self._stop.on_sigterm():
                        engine.run(_settling(intake, settler))
                finally:
                    engine.close()
            finally:
                keeper.stop()
                settled = settler.finish()
        finally:
            source.close()
        engine.seconds["receive"] = intake.seconds
        engine.seconds["settle"] = settler.seconds
        report = self._report(
            env.generation, engine, settled, intake.received, intake.received_bytes, intake.ended
        )
        if intake.error is not None:
            raise intake.error
        if keeper.lapsed:
            raise LeaseLapsed(
                f"the lease of {source.lease.seconds} seconds has lapsed; {settled.lapsed} of"
                f" {intake.received} messages are with another run, or will be"
            )
        return report

    def _engine(self) -> Engine:
        return Engine(self._pipeline, clock=self._clock, ack=ack_messages, late=self._stop.late)

    def _report(
        self,
        generation: str,
        engine: Engine,
        settled: SettleReport,
        received: int,
        size: int,
        ended: str,
    ) -> RunReport:
        batches: dict[str, dict[str, int]] = {name: {} for name in self._pipeline.batchers}
        for (batcher, trigger), count in engine.batches.items():
            batches[batcher][trigger] = count
        report = RunReport(
            pipeline=self._pipeline.name,
            generation=generation,
            received=received,
            received_bytes=size,
            failed=engine.counts["failed"],
            settled=settled,
            batches=batches,
            seconds={**engine.seconds, "total": time.monotonic() - self._started},
            ended=self._stop.reason() or ended,
        )
        if telemetry.handlers("run.stop"):
            telemetry.emit(
                "run.stop",
                {"duration": report.seconds["total"], "monotonic_time": time.monotonic()},
                {"topology_name": self._pipeline.name, "report": report},
            )
        return report


def _settling(intake: Intake, settler: Settler) -> Iterator[list[Message]]:
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


def _is_threaded(pipeline: Broadway) -> bool:
    batch_processors = sum(options.concurrency for options in pipeline.batchers.values())
    return pipeline.processors.concurrency > 1 or batch_processors > 1


def _demand(pipeline: Broadway) -> int:
    """Messages to ask for at a time: what the processors can take, and not too few."""
    options = pipeline.processors
    taken: int = options.concurrency * options.max_demand
    return max(taken, 100)


def _bytes(messages: list[Message]) -> int:
    return sum(message.size for message in messages)
