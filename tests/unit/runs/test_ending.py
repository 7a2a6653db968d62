"""However a run ends, its account is closed only after its source takes nothing more."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message, Processors, RateLimiting
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Source
from airflow_broadway.core.errors import BroadwayError, ProducerError, ProducerUnavailable
from airflow_broadway.core.local.run import LocalRun
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.process import Process
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.testing import ManualClock
from tests.unit.arriving import ArrivingProducer, Broker
from tests.unit.passing import Passing


class Ending(Passing):
    """The test sets the effect of a message on the run."""

    producer = ArrivingProducer()
    processors = Processors(concurrency=1, max_demand=10)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        self.clock.advance(0.1)
        if message.data == b"17":
            self.at_17()
        return message

    clock: Any = ManualClock()
    at_17: Callable[[], None] = staticmethod(lambda: None)


class Batched(Ending):
    batchers = {"default": Batcher(engine="python", batch_size=7)}


class Limited(Ending):
    producer = ArrivingProducer(rate_limiting=RateLimiting(allowed_messages=30, interval=3600.0))


class BreakingProducer(ArrivingProducer):
    """Its broker goes away after some receives."""

    def source(self, env: ProducerEnv) -> Source:
        source: Any = super().source(env)
        whole = source.receive

        def receive(demand: int, *, timeout: float) -> Sequence[Message]:
            if self.broker.secured > 17:
                raise ProducerError("the broker has gone")
            received: Sequence[Message] = whole(demand, timeout=timeout)
            return received

        source.receive = receive
        opened: Source = source
        return opened


class Broken(Ending):
    producer = BreakingProducer()


def _local(pipeline: Broadway, env: ProducerEnv, tmp_path: Path, budget: dict[str, Any]) -> Any:
    stop = Stop(env.clock, pipeline.shutdown)
    with stop.on_sigterm():
        return LocalRun(pipeline, env, stop=stop).pull(Budget(**budget)).to_json()


def _process(pipeline: Broadway, env: ProducerEnv, tmp_path: Path, budget: dict[str, Any]) -> Any:
    staged = StagedRun(
        Store.open(f"file://{tmp_path}/staging"), pipeline="Ending", dag_id="d", run_id="r"
    )
    process = Process(
        staged, pipeline, env=env, budget=Budget(**budget), ports=Ports(max_shutdown=2.0)
    )
    before = signal.signal(signal.SIGTERM, lambda *_: process.stop("signal"))
    try:
        reference = process.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    return reference


def _sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _interrupt() -> None:
    raise KeyboardInterrupt


WAYS: dict[str, tuple[type[Ending], dict[str, Any], Callable[[], None]]] = {
    "empty": (Ending, {}, lambda: None),
    "max_messages": (Ending, {"max_messages": 33}, lambda: None),
    "max_bytes": (Ending, {"max_bytes": 300}, lambda: None),
    "max_seconds": (Ending, {"max_seconds": 2.5}, lambda: None),
    "rate_limiting": (Limited, {}, lambda: None),
    "stopped": (Ending, {"max_messages": 1000}, _sigterm),
    "an exception": (Ending, {}, _interrupt),
    "error": (Broken, {}, lambda: None),
}


@pytest.mark.parametrize("run", [_local, _process])
@pytest.mark.parametrize("way", WAYS)
def test_run_counts_what_its_source_holds_however_it_ends(run, way, tmp_path):
    # Given a source into which messages go on arriving until it is stopped
    kind, budget, at_17 = WAYS[way]
    broker = ArrivingProducer.broker = Broker(supply=40 if way == "empty" else 500)
    clock = ManualClock()
    pipeline = kind()
    pipeline.clock, pipeline.at_17 = clock, at_17
    owner = {"dag_id": "d", "run_id": "r", "task_id": "process", "map_index": 0, "try_number": 1}
    env = ProducerEnv(pipeline="Ending", generation=uuid.uuid4().hex, owner=owner, clock=clock)

    # When the run ends in one of the ways
    report: dict[str, Any] = {}
    if way in ("an exception", "error"):
        with pytest.raises(KeyboardInterrupt if way == "an exception" else BroadwayError):
            run(pipeline, env, tmp_path, budget)
    else:
        report = run(pipeline, env, tmp_path, budget)
        ended = report.get("ended") or report["stopped"]
        assert ended == way or (way, ended) == ("stopped", "signal")
        # Then it received all that the source had secured by its end,
        assert report["received"] == broker.secured

    # the source was stopped before its lease was noted and settled,
    assert broker.events.count("stop") == 1
    assert "lease after stop" in broker.events
    [(leased, expected)] = broker.settled
    assert leased == broker.secured
    assert expected in (None, broker.secured)
    # and what had no outcome was released, not lost.
    assert broker.ahead == []


@pytest.mark.parametrize("run", [_local, _process])
def test_unhandled_messages_are_released_at_the_time_limit(run, tmp_path):
    broker = ArrivingProducer.broker = Broker(supply=500)
    clock = ManualClock()
    pipeline = Ending()
    pipeline.clock = clock
    env = ProducerEnv(pipeline="Ending", generation="b" * 32, owner=_owner(), clock=clock)

    report = run(pipeline, env, tmp_path, {"max_seconds": 2.05})

    if run is _local:
        assert report["settled"]["acked"] == 21
        assert report["settled"]["released"] == broker.secured - 21
    else:
        released = [key for key, action in broker.verdicts.items() if action.value == "release"]
        assert len(released) == broker.secured - 21
    assert broker.secured < 60  # little is taken in vain where messages are slow


def test_unstoppable_source_leaves_no_manifest(tmp_path, monkeypatch):
    ArrivingProducer.broker = Broker(supply=20)

    def fails(self):
        raise ProducerUnavailable("the broker has gone")

    monkeypatch.setattr("tests.unit.arriving._Source.stop", fails)
    monkeypatch.setattr("tests.unit.arriving._Source.close", lambda self: None)
    pipeline = Ending()
    pipeline.clock = ManualClock()
    env = ProducerEnv(pipeline="Ending", generation="c" * 32, owner=_owner(), clock=ManualClock())
    with pytest.raises(ProducerUnavailable):
        _process(pipeline, env, tmp_path, {})
    staged = StagedRun(
        Store.open(f"file://{tmp_path}/staging"), pipeline="Ending", dag_id="d", run_id="r"
    )
    assert staged.manifest("c" * 32) is None


def _owner() -> dict[str, Any]:
    return {"dag_id": "d", "run_id": "r", "task_id": "process", "map_index": 0, "try_number": 1}
