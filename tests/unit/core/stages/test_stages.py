"""Stages beyond the conformance cases: results, and exceptions that are never swallowed."""

from __future__ import annotations

import asyncio
import logging
import pickle
from typing import Any

import pytest

from airflow_broadway import Batcher, Message, Processors
from airflow_broadway.core import telemetry
from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.custody.in_process import Tally
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.acks import NO_ACK, AckRef, Scope
from airflow_broadway.core.model.message import OK
from airflow_broadway.core.stages.callbacks import Returned
from airflow_broadway.core.stages.processor import ProcessorStage
from airflow_broadway.testing import (
    DummyProducer,
    PipelineDriver,
    RecordingAcknowledger,
    test_batch,
    test_message,
)
from tests.unit.passing import Passing


class Plain(Passing):
    producer = DummyProducer()
    processors = Processors(concurrency=1)


class Batched(Plain):
    batchers = {"default": Batcher(engine="python")}

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


def test_failure_without_a_reason_has_no_text():
    assert Message(1).failed(None).status.text == ""
    assert OK.text == ""  # what handle_failed set back is settled as failed all the same


class TaskTimeout(BaseException):
    """As Airflow's ``AirflowTaskTimeout``."""


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, ValueError])
def test_error_whose_text_raises_is_still_a_failure(kind):
    class Textless(Exception):
        def __str__(self):
            raise kind

    assert Message(1).failed(Textless()).status.text == "Textless: (its text cannot be had)"


def test_password_of_an_address_is_masked_in_reasons():
    error = OSError("cannot reach amqp://guest:hunter2@mq:5672/shop")
    for reason in (error, str(error)):
        text = Message(1).failed(reason).status.text
        assert "hunter2" not in text
        assert text.endswith("cannot reach amqp://***@mq:5672/shop")


def test_recreated_message_without_id_replaces_none_with_id():
    delivered, anew = PipelineDriver(Batched).message(1), Message(b"anew")
    with Scope("process") as scope:
        assert Returned.of([delivered], [anew], scope).own == []
        assert Returned.of([delivered], [delivered, anew], scope).own == [delivered]
        # In the test kit messages may have no id at all
        assert Returned.of([anew], [anew.put_data(1)], scope).own == [anew.put_data(1)]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TaskTimeout])
@pytest.mark.parametrize(
    "callback", ["prepare_messages", "handle_message", "handle_batch", "handle_failed"]
)
def test_interrupt_is_never_swallowed(callback, kind):
    def broken(self, *_):
        raise kind

    callbacks: dict[str, Any] = {callback: broken}
    if callback == "handle_failed":
        callbacks["handle_message"] = lambda self, processor, message, context: message.failed("x")
    driver = PipelineDriver(type("P", (Batched,), callbacks))
    with pytest.raises(kind):
        test_message(driver, 1)
    assert driver.acknowledger.calls == []


#: As the extensions of PyO3 make it, each its own.
RustPanic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, RustPanic])
@pytest.mark.parametrize("callback", ["prepare_messages", "handle_message", "handle_batch"])
def test_cancellation_or_panic_fails_its_message_alone(callback, kind):
    def broken(self, *_):
        raise kind

    driver = PipelineDriver(type("P", (Batched,), {callback: broken}))
    test_message(driver, 1)

    [call] = driver.acknowledger.calls
    assert [message.status.text for message in call.failed] == [f"{kind.__name__}: "]


def test_updates_before_an_exception_are_discarded():
    class Pipeline(Plain):
        def handle_message(self, processor, message, context):
            message.put_data("changed").configure_ack(on_failure="ack")
            raise ValueError("boom")

    [message] = test_message(Pipeline, "original").failed
    assert message.data == "original"
    assert message.status.kind == "error"
    assert message.status.text == "ValueError: boom"
    assert "raise ValueError" in message.status.stacktrace


def test_immediately_settled_message_is_settled_once():
    class Pipeline(Batched):
        def handle_batch(self, batcher, messages, batch_info, context):
            messages[0].ack_immediately()
            raise ValueError("boom")

    tested = test_batch(Pipeline, [1, 2])
    assert [([m.data for m in call.successful], [m.data for m in call.failed])
            for call in tested.calls] == [([1], []), ([], [2])]  # fmt: skip


def test_failing_ack_immediately_fails_the_message():
    class Raising(RecordingAcknowledger):
        def ack(self, ack_ref, successful, failed):
            super().ack(ack_ref, successful, failed)
            if successful:
                raise RuntimeError("broker is gone")

    class Pipeline(Plain):
        def handle_message(self, processor, message, context):
            return message.ack_immediately()

    acknowledger = Raising()
    test_message(Pipeline, 1, acknowledger=lambda data, ref: AckRef(acknowledger, "r"))
    assert [(len(c.successful), len(c.failed)) for c in acknowledger.calls] == [(1, 0), (0, 1)]


def test_failing_acknowledger_does_not_block_other_groups(caplog):
    class Raising:
        def ack(self, ack_ref, successful, failed):
            raise RuntimeError("broker is gone")

    driver = PipelineDriver(Plain)
    refs = [AckRef(Raising(), "a"), None, AckRef(Raising(), "b"), None]
    options = [{} if ref is None else {"acknowledger": ref} for ref in refs]
    driver.push([driver.message(n, **option) for n, option in enumerate(options, 1)])
    assert [[m.data for m in call.successful] for call in driver.acknowledger.calls] == [[2, 4]]
    codes = [getattr(record, "code", None) for record in caplog.records]
    assert codes == ["acknowledger_error", "acknowledger_error"]


def test_failed_message_with_unknown_batcher_keeps_its_reason():
    class Pipeline(Batched):
        def handle_message(self, processor, message, context):
            return message.put_batcher("nowhere").failed("mine")

    [message] = test_message(Pipeline, 1).failed
    assert message.status == ("failed", "mine", "")


def test_another_message_than_the_given_one_is_no_result():
    other = PipelineDriver(Plain).message(1)

    class Pipeline(Batched):
        def handle_message(self, processor, message, context):
            return other if message.data == 1 else message

    tested = test_batch(Pipeline, [1, 2])
    assert [m.data for m in tested.successful] == [2]
    [failed] = tested.failed
    assert failed.status.text.startswith("PipelineError: expected handle_message to return message")


def test_unhashable_batch_key_fails_its_message_only():
    class Pipeline(Batched):
        def handle_message(self, processor, message, context):
            return message.put_batch_key([]) if message.data == 1 else message

    tested = test_batch(Pipeline, [1, 2])
    assert [m.data for m in tested.failed] == [1]
    assert [m.data for m in tested.successful] == [2]


def test_setup_runs_once_and_gives_the_context():
    calls: list[str] = []

    class Pipeline(Batched):
        def setup(self, run):
            calls.append(run.dag_id)
            return {"table": "t"}

        def handle_message(self, processor, message, context):
            return message.put_data(context["table"])

    assert [m.data for m in test_batch(Pipeline, range(30)).successful] == ["t"] * 30
    assert calls == ["local"]


def test_batch_info_has_id_and_redelivered_count():
    driver = PipelineDriver(Batched)
    driver.push([driver.message(1, message_id="a"), driver.message(2, redelivered=True)])
    driver.drain()
    [batch] = driver.batches
    assert batch.info.redelivered == 1
    assert len(batch.info.batch_id) == 32
    assert batch.info.path("s3a://lake/", "d=1") == f"s3a://lake/d=1/batch_id={batch.info.batch_id}"


@pytest.mark.parametrize("options", [{"max_demand": 0}, {"max_demand": 5, "min_demand": 5}])
def test_ineffective_demand_options_are_refused(options):
    with pytest.raises(OptionsError, match=r"m.._demand"):
        Processors(**options)
    assert Processors(max_demand=1, min_demand=0).max_demand == 1


# -- the run's acknowledger ------------------------------------------------------------------------


def test_unknown_ack_option_names_the_valid_ones():
    acknowledger = RunAcknowledger(DummyProducer(), Tally())
    message = Message(1, acknowledger=AckRef(acknowledger, "r", Delivery(receipt="x")))
    assert message.configure_ack(on_failure="ack").acknowledger.data.receipt == "x"
    with pytest.raises(OptionsError, match="did you mean 'on_failure'"):
        message.configure_ack(on_failur="ack")
    with pytest.raises(OptionsError, match=r"one of .*'dead_letter'"):
        message.configure_ack(on_failure="explode")


def test_recorded_failures_use_up_attempts():
    producer = DummyProducer()
    verdicts = [
        producer.verdict(Message(1, attempt=n).failed("x"), failed=True, stage="batch").action
        for n in (1, 4, 5)
    ]
    assert verdicts == [Action.RETRY, Action.RETRY, Action.DEAD_LETTER]


# -- telemetry -------------------------------------------------------------------------------------


def test_handlers_get_messages_as_the_callbacks_know_them():
    stage = ProcessorStage(
        Batched(), convert=lambda pipeline: lambda message: message.put_data("staged")
    )
    stops: list[Any] = []
    name = telemetry.attach(
        lambda event, measurements, metadata: stops.append(metadata), events=["processor.stop"]
    )
    result = stage.handle([Message("raw")])
    assert telemetry.detach(name)
    assert [message.data for message in result.successful] == ["staged"]
    assert [message.data for message in stops[0]["successful_messages_to_forward"]] == ["raw"]


def test_handler_gets_the_traceback_though_failures_drop_it():
    class Raising(Batched):
        def handle_message(self, processor, message, context):
            raise ValueError("why")

    seen: list[Any] = []
    name = telemetry.attach(
        lambda event, measurements, metadata: seen.append(metadata["stacktrace"]),
        events=["processor.message.exception"],
    )
    assert len(ProcessorStage(Raising(), traces=False).handle([Message(1)]).failed) == 1
    assert telemetry.detach(name)
    assert "in handle_message" in seen[0]


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_raising_handler_is_detached(caplog, kind):
    calls: list[str] = []

    def broken(event, measurements, metadata):
        calls.append(event)
        raise kind("handler")

    name = telemetry.attach(broken, handler_id="broken")
    assert len(test_batch(Plain, [1, 2, 3]).successful) == 3
    assert calls == ["topology.init"]
    assert not telemetry.detach(name)
    assert "'broken' raised on 'topology.init' and has been detached" in caplog.text


def test_attach_refuses_unknown_events_and_used_ids():
    with pytest.raises(ValueError, match=r"unknown telemetry events \['processor.begin'\]"):
        telemetry.attach(lambda *_: None, events=["processor.begin"])
    name = telemetry.attach(lambda *_: None)
    with pytest.raises(ValueError, match="attached already"):
        telemetry.attach(lambda *_: None, handler_id=name)
    assert telemetry.detach(name)


def test_log_bridge_writes_counts_and_no_data(caplog):
    name = telemetry.attach(telemetry.log_handler(), events=["batch_processor.stop"])
    with caplog.at_level(logging.INFO, "airflow_broadway.telemetry"):
        test_batch(Batched, ["secret", "secret"])
    telemetry.detach(name)
    [record] = [r for r in caplog.records if r.name == "airflow_broadway.telemetry"]
    assert '"successful_messages_count": 2' in record.getMessage()
    assert "secret" not in record.getMessage()


# -- values ----------------------------------------------------------------------------------------


def test_messages_and_errors_survive_pickling():
    message = Message(b"x", message_id="m", metadata={"a": 1}, acknowledger=NO_ACK).failed("why")
    assert pickle.loads(pickle.dumps(message)).with_acknowledger(NO_ACK) == message
    error = pickle.loads(pickle.dumps(OptionsError("a.b", "a number", "x")))
    assert (str(error), error.path) == (str(OptionsError("a.b", "a number", "x")), "a.b")
