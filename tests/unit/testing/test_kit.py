from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from airflow_broadway import Batcher, Message, Processors, RateLimiting
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.options import options
from airflow_broadway.testing import (
    DummyProducer,
    PipelineDriver,
    RecordingAcknowledger,
    test_batch,
    test_message,
)
from tests.unit.passing import Passing


class Pipeline(Passing):
    producer = DummyProducer(rate_limiting=RateLimiting(allowed_messages=2, interval=10.0))
    processors = Processors(concurrency=1)
    batchers = {"default": Batcher(engine="python", batch_size=3, batch_timeout=5.0)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed("bad") if message.data == "bad" else message


def test_one_message_is_flushed():
    tested = test_message(PipelineDriver(Pipeline), "good", metadata={"a": 1})
    assert [message.metadata for message in tested.successful] == [{"a": 1}]
    assert [batch.info.trigger.value for batch in tested.batches] == ["flush"]


def test_refs_differ_between_tests():
    driver = PipelineDriver(Pipeline)
    first, second = test_message(driver, "good"), test_message(driver, "bad")
    assert first.ref != second.ref
    assert (len(first.failed), len(second.failed)) == (0, 1)


def test_bulk_batch_waits_for_its_timeout():
    driver = PipelineDriver(Pipeline)
    assert test_batch(driver, [1, 2]).calls == []
    driver.elapse(4.9)
    assert driver.batches == []
    driver.elapse(0.1)
    assert [batch.info.trigger.value for batch in driver.batches] == ["timeout"]


def test_custom_acknowledger():
    recording = RecordingAcknowledger()
    test_message(Pipeline, 1, acknowledger=lambda data, ref: AckRef(recording, ("own", data)))
    assert [call.ref for call in recording.calls] == [("own", 1)]


def test_pytest_collects_fixtures_but_no_helpers(tmp_path):
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(
            """
            from airflow_broadway import Broadway, Processors
            from airflow_broadway.testing import DummyProducer, Tested, test_batch, test_message

            class Pipeline(Broadway):
                producer = DummyProducer()
                processors = Processors(concurrency=1)
                def handle_message(self, processor, message, context):
                    return message

            def test_fixtures(broadway_driver, broadway_clock, broadway_acks, broadway_events):
                driver = broadway_driver(Pipeline)
                assert test_message(driver, 1).successful[0].data == 1
                assert driver.clock is broadway_clock
                assert broadway_acks.calls == []
                assert "processor.stop" in broadway_events
            """
        )
    )
    plugin = "airflow_broadway.testing.plugin"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", plugin, str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""},
    )  # fmt: skip
    assert "1 passed" in result.stdout, result.stdout + result.stderr


@options
class Shut(DummyProducer):
    """Cannot be opened."""

    source = custodian = mock.Mock(side_effect=AssertionError("opened"))


def test_kit_never_opens_a_producer():
    assert len(test_message(Pipeline(producer=Shut()), 1).successful) == 1


def test_listed_messages_are_counted_without_a_broker():
    report = Pipeline(producer=Shut(on_failure="retry")).run_local([1, "bad", 2])
    assert (report.settled.acked, report.settled.requeued) == (2, 1)
    report = Pipeline(producer=Shut(on_failure="dead_letter")).run_local([1, "bad", 2])
    assert (report.settled.acked, report.settled.dead_lettered) == (2, 1)


def test_spark_batches_succeed_without_handle_batch():
    class Sparkish(Pipeline):
        producer = DummyProducer()
        batchers = {"default": Batcher(batch_size=2)}

        handle_batch = mock.Mock(side_effect=AssertionError("called"))

    tested = test_batch(Sparkish, [1, 2, 3])
    closings = [(batch.info.size, batch.info.trigger.value) for batch in tested.batches]
    assert closings == [(2, "size"), (1, "flush")]
    assert [message.data for message in tested.successful] == [1, 2, 3]
    with pytest.raises(PipelineError, match="run on Spark"):
        Sparkish().run_local([1])
