from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.stages.processor_pool import ProcessorPool
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.stages.subprocess_channel import PipeChannel
from airflow_broadway.core.stages.subprocess_processor import SubprocessProcessor
from airflow_broadway.testing import DummyProducer, PipelineDriver
from tests.unit.core.stages._processes import InProcesses, WithoutBatchers


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
    assert events.count("processor.message.exception") == 3


def test_a_result_that_cannot_be_pickled_fails_its_message_alone() -> None:
    report = WithoutBatchers().run_local([1, "unpicklable", 2])
    assert report.failed == 1
    assert (report.settled.acked, report.settled.requeued) == (2, 1)


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


def test_an_interrupt_in_a_process_ends_the_run() -> None:
    with pytest.raises(KeyboardInterrupt):
        InProcesses().run_local(["interrupt"])


def test_a_message_that_ends_its_process_is_dead_lettered_and_the_others_are_handled() -> None:
    report = InProcesses().run_local([*range(20), "die", *range(20, 40)])
    assert (report.received, report.failed, report.balanced) == (41, 1, True)
    assert (report.settled.acked, report.settled.dead_lettered) == (40, 1)


def test_a_pipeline_that_other_processes_cannot_import_is_refused_at_once() -> None:
    class Local(InProcesses):
        producer = DummyProducer()

    with pytest.raises(ValueError, match="top level of an importable module"):
        Local().run_local([1])


def test_a_callback_in_another_process_has_nothing_to_read() -> None:
    driver = PipelineDriver(InProcesses)
    pool = ProcessorPool(InProcesses())
    try:
        [(_, result)] = pool.map([[driver.message("stdin")]])
    finally:
        pool.close()
    assert [message.data for message in result.successful] == [("", b"")]


def test_what_callbacks_start_has_no_end_of_the_pipe() -> None:
    driver = PipelineDriver(InProcesses)
    processor = SubprocessProcessor(InProcesses())
    try:
        result = processor.handle([driver.message("descriptors")])
        # In the child: standard input, output and error, and the folder that is listed
        assert [message.data for message in result.successful] == [4]
        # In the parent
        process = processor._process
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            assert not os.get_inheritable(pipe.fileno())
    finally:
        processor.close()


def test_a_fork_of_the_process_has_no_end_of_the_pipe() -> None:
    # The parent would wait for the fork, too, after the process has died
    processor = SubprocessProcessor(InProcesses())
    try:
        result = processor.handle([PipelineDriver(InProcesses).message("forked")])
    finally:
        processor.close()
    assert [message.data for message in result.successful] == [[]]


def test_after_a_signal_to_the_process_alone_another_goes_on() -> None:
    # Given what looks for memory, and sends SIGTERM first; the run is not stopped
    driver = PipelineDriver(InProcesses)
    processor = SubprocessProcessor(InProcesses(), stop=Stop(SystemClock(), 0.0))
    try:
        first = processor.handle([driver.message("terminated"), driver.message(1)])
        second = processor.handle([driver.message(2)])
    finally:
        processor.close()
    assert [message.data[0] for message in first.successful] == ["terminated"]
    assert [message.data[0] for message in second.successful] == [2]


def test_a_process_that_dies_while_it_writes_is_gone() -> None:
    # Given a value of which the last bytes never came
    channel = PipeChannel(io.BytesIO(struct.pack("!Q", 100) + b"\x80"), io.BytesIO())
    with pytest.raises(EOFError):
        channel.receive()


def test_another_process_imports_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "planted"
    (tmp_path / "pickle.py").write_text(f"open({str(planted)!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    assert InProcesses().run_local([1]).failed == 0
    assert not planted.exists()


@pytest.mark.parametrize(("code", "text"), [(None, "0"), (0, "0"), (3, "3"), ("no", "no")])
@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_an_exit_is_told_as_one_with_its_code(executor: str, code: Any, text: str) -> None:
    pipeline = InProcesses(processors={"executor": executor})
    driver = PipelineDriver(InProcesses)
    pool = ProcessorPool(pipeline)
    try:
        [(_, result)] = pool.map([[driver.message("exit", metadata={"code": code})]])
    finally:
        pool.close()
    [message] = result.failed
    assert (message.status.kind, message.status.text) == ("exit", f"SystemExit: {text}")
