from __future__ import annotations

import io
import os
import struct
from contextlib import closing
from unittest import mock

import pytest

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.stages.processor_pool import ProcessorPool
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.stages.subprocess_channel import PipeChannel
from airflow_broadway.core.stages.subprocess_processor import SubprocessProcessor
from airflow_broadway.testing import DummyProducer, PipelineDriver
from tests.unit.core.stages._processes import InProcesses, WithoutBatchers


def test_process_executor_matches_thread_executor():
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


def test_unpicklable_result_fails_its_message_alone():
    report = WithoutBatchers().run_local([1, "unpicklable", 2])
    assert report.failed == 1
    assert (report.settled.acked, report.settled.requeued) == (2, 1)


def test_results_of_processes_are_in_order():
    driver = PipelineDriver(InProcesses)  # only to make messages
    with closing(ProcessorPool(InProcesses())) as pool:
        dispatches = [[driver.message(n) for n in range(start, start + 20)] for start in (0, 20)]
        done = [m.data for _, result in pool.map(dispatches) for m in result.successful]
    assert [number for number, _ in done] == list(range(40))
    pids = {pid for _, pid in done}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_interrupt_in_a_process_ends_the_run():
    with pytest.raises(KeyboardInterrupt):
        InProcesses().run_local(["interrupt"])


def test_killing_message_is_dead_lettered_and_others_handled():
    report = InProcesses().run_local([*range(20), "die", *range(20, 40)])
    assert (report.received, report.failed, report.balanced) == (41, 1, True)
    assert (report.settled.acked, report.settled.dead_lettered) == (40, 1)


def test_unimportable_pipeline_is_refused_immediately():
    class Local(InProcesses):
        producer = DummyProducer()

    with pytest.raises(ValueError, match="top level of an importable module"):
        Local().run_local([1])


def test_callback_in_a_child_has_empty_stdin():
    driver = PipelineDriver(InProcesses)
    with closing(ProcessorPool(InProcesses())) as pool:
        [(_, result)] = pool.map([[driver.message("stdin")]])
    assert [message.data for message in result.successful] == [("", b"")]


def test_subprocesses_of_callbacks_inherit_no_pipe():
    driver = PipelineDriver(InProcesses)
    with closing(SubprocessProcessor(InProcesses())) as processor:
        result = processor.handle([driver.message("descriptors")])
        # In the child: standard input, output and error, and the folder that is listed
        assert [message.data for message in result.successful] == [4]
        # In the parent
        process = processor._process
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            assert not os.get_inheritable(pipe.fileno())


def test_fork_of_the_child_holds_no_pipe():
    # The parent would wait for the fork, too, after the process has died
    with closing(SubprocessProcessor(InProcesses())) as processor:
        result = processor.handle([PipelineDriver(InProcesses).message("forked")])
    assert [message.data for message in result.successful] == [[]]


def test_child_is_replaced_after_a_signal():
    # Given what looks for memory, and sends SIGTERM first; the run is not stopped
    driver = PipelineDriver(InProcesses)
    with closing(SubprocessProcessor(InProcesses(), stop=Stop(SystemClock(), 0.0))) as processor:
        first = processor.handle([driver.message("terminated"), driver.message(1)])
        second = processor.handle([driver.message(2)])
    assert [message.data[0] for message in first.successful] == ["terminated"]
    assert [message.data[0] for message in second.successful] == [2]


def test_stop_before_the_first_message_signals_no_child(monkeypatch):
    stop = Stop(SystemClock(), 0.0)
    with closing(SubprocessProcessor(InProcesses(), stop=stop)):
        monkeypatch.setattr(os, "kill", kill := mock.Mock())
        stop.request("before the first message")
    kill.assert_not_called()


def test_truncated_value_is_end_of_file():
    # Given a value of which the last bytes never came
    channel = PipeChannel(io.BytesIO(struct.pack("!Q", 100) + b"\x80"), io.BytesIO())
    with pytest.raises(EOFError):
        channel.receive()


def test_child_imports_nothing_from_the_working_folder(tmp_path, monkeypatch):
    planted = tmp_path / "planted"
    (tmp_path / "pickle.py").write_text(f"open({str(planted)!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    assert InProcesses().run_local([1]).failed == 0
    assert not planted.exists()


@pytest.mark.parametrize(("code", "text"), [(None, "0"), (0, "0"), (3, "3"), ("no", "no")])
@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_exit_is_reported_with_its_code(executor, code, text):
    pipeline = InProcesses(processors={"executor": executor})
    driver = PipelineDriver(InProcesses)
    with closing(ProcessorPool(pipeline)) as pool:
        [(_, result)] = pool.map([[driver.message("exit", metadata={"code": code})]])
    [message] = result.failed
    assert (message.status.kind, message.status.text) == ("exit", f"SystemExit: {text}")
