from __future__ import annotations

import os

import pytest

from airflow_broadway.core import telemetry
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.processors import ProcessorPool
from airflow_broadway.testing import DummyProducer, PipelineDriver
from tests.unit.core._processes import InProcesses


def test_processors_in_processes_do_what_those_in_threads_do() -> None:
    special = ["odd", "unpicklable", "now", "dead", "wrong"]
    events: list[str] = []
    name = telemetry.attach(
        lambda event, measurements, metadata: events.append(event),
        events=["processor.message.stop", "processor.message.exception"],
    )
    report = InProcesses().run_local([*range(95), *special])
    telemetry.detach(name)
    assert report.received == 100
    assert report.balanced
    assert report.failed == 3
    settled = report.settled
    assert (settled.acked, settled.dead_lettered, settled.requeued) == (96, 1, 3)
    assert len(events) == 100
    assert events.count("processor.message.exception") == 2


def test_results_come_in_order_from_other_processes() -> None:
    driver = PipelineDriver(InProcesses)  # only to make messages
    pool = ProcessorPool(InProcesses())
    try:
        dispatches = [[driver.message(n) for n in range(start, start + 20)] for start in (0, 20)]
        done = [m.data for _, result in pool.map(dispatches) for m in result.successful]
    finally:
        pool.close()
    assert [number for number, _ in done] == list(range(40))
    pids = {pid for _, pid in done}
    assert len(pids) == 2
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("data", "error"), [("die", PipelineError), ("interrupt", KeyboardInterrupt)]
)
def test_what_ends_a_process_ends_the_run(data: str, error: type[BaseException]) -> None:
    with pytest.raises(error, match="exit code 3" if data == "die" else None):
        InProcesses().run_local([data])


def test_a_pipeline_that_other_processes_cannot_import_is_refused_at_once() -> None:
    class Local(InProcesses):
        producer = DummyProducer()

    with pytest.raises(ValueError, match="top level of an importable module"):
        Local().run_local([1])
