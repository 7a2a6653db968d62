"""What the conformance cases leave open: the sane outcomes, and what must never be swallowed."""

from __future__ import annotations

import asyncio
import logging
import pickle
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message, Processors
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


def test_a_failure_without_a_reason_has_no_text() -> None:
    assert Message(1).failed(None).status.text == ""
    assert OK.text == ""  # what handle_failed set back is settled as failed all the same


class TaskTimeout(BaseException):
    """As Airflow's ``AirflowTaskTimeout``."""


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, ValueError])
def test_an_error_whose_text_raises_is_a_failure_all_the_same(kind: type[BaseException]) -> None:
    class Textless(Exception):
        def __str__(self) -> str:
            raise kind

    assert Message(1).failed(Textless()).status.text == "Textless: (its text cannot be had)"


def test_a_reason_has_no_password_of_an_address() -> None:
    error = OSError("cannot reach amqp://guest:hunter2@mq:5672/shop")
    for reason in (error, str(error)):
        text = Message(1).failed(reason).status.text
        assert "hunter2" not in text
        assert text.endswith("cannot reach amqp://***@mq:5672/shop")


def test_a_message_made_anew_without_an_id_stands_for_none_that_has_one() -> None:
    given, anew = PipelineDriver(Batched).message(1), Message(b"anew")
    with Scope("process") as scope:
        assert Returned.of([given], [anew], scope).own == []
        assert Returned.of([given], [given, anew], scope).own == [given]
        # In the test kit messages may have no id at all
        assert Returned.of([anew], [anew.put_data(1)], scope).own == [anew.put_data(1)]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TaskTimeout])
@pytest.mark.parametrize(
    "callback", ["prepare_messages", "handle_message", "handle_batch", "handle_failed"]
)
def test_what_ends_the_task_is_never_swallowed(callback: str, kind: type[BaseException]) -> None:
    def broken(self: Broadway, *_: object) -> Any:
        raise kind

    def failing(self: Broadway, processor: str, message: Message, context: Any) -> Message:
        return message.failed("so that handle_failed is called")

    callbacks: dict[str, Any] = {callback: broken}
    if callback == "handle_failed":
        callbacks["handle_message"] = failing
    driver = PipelineDriver(type("P", (Batched,), callbacks))
    with pytest.raises(kind):
        test_message(driver, 1)
    assert driver.acknowledger.calls == []


#: As the extensions of PyO3 make it, each its own.
RustPanic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, RustPanic])
@pytest.mark.parametrize("callback", ["prepare_messages", "handle_message", "handle_batch"])
def test_a_cancelled_or_closed_coroutine_or_a_panic_fails_its_message_alone(
    callback: str, kind: type[BaseException]
) -> None:
    def broken(self: Broadway, *_: object) -> Any:
        raise kind

    driver = PipelineDriver(type("P", (Batched,), {callback: broken}))
    test_message(driver, 1)

    [call] = driver.acknowledger.calls
    assert [message.status.text for message in call.failed] == [f"{kind.__name__}: "]


def test_updates_made_before_an_exception_are_forgotten() -> None:
    class Pipeline(Plain):
        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
            message.put_data("changed").configure_ack(on_failure="ack")
            raise ValueError("boom")

    [message] = test_message(Pipeline, "original").failed
    assert message.data == "original"
    assert message.status.kind == "error"
    assert message.status.text == "ValueError: boom"
    assert "raise ValueError" in message.status.stacktrace


def test_a_message_settled_at_once_is_not_settled_again_when_the_callback_raises() -> None:
    class Pipeline(Batched):
        def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
            messages[0].ack_immediately()
            raise ValueError("boom")

    tested = test_batch(Pipeline, [1, 2])
    assert [([m.data for m in call.successful], [m.data for m in call.failed])
            for call in tested.calls] == [([1], []), ([], [2])]  # fmt: skip


def test_an_acknowledger_that_raises_in_ack_immediately_fails_the_message() -> None:
    class Raising(RecordingAcknowledger):
        def ack(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
            super().ack(ack_ref, successful, failed)
            if successful:
                raise RuntimeError("broker is gone")

    class Pipeline(Plain):
        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
            return message.ack_immediately()

    acknowledger = Raising()
    test_message(Pipeline, 1, acknowledger=lambda data, ref: AckRef(acknowledger, "r"))
    assert [(len(c.successful), len(c.failed)) for c in acknowledger.calls] == [(1, 0), (0, 1)]


def test_groups_are_settled_although_another_groups_acknowledger_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Raising:
        def ack(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
            raise RuntimeError("broker is gone")

    driver = PipelineDriver(Plain)
    driver.push(
        [
            driver.message(1, acknowledger=AckRef(Raising(), "a")),
            driver.message(2),
            driver.message(3, acknowledger=AckRef(Raising(), "b")),
            driver.message(4),
        ]
    )
    assert [[m.data for m in call.successful] for call in driver.acknowledger.calls] == [[2, 4]]
    codes = [getattr(record, "code", None) for record in caplog.records]
    assert codes == ["acknowledger_error", "acknowledger_error"]


def test_a_failed_message_with_an_unknown_batcher_keeps_its_reason() -> None:
    class Pipeline(Batched):
        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
            return message.put_batcher("nowhere").failed("mine")

    [message] = test_message(Pipeline, 1).failed
    assert message.status == ("failed", "mine", "")


def test_an_unhashable_batch_key_fails_its_message_only() -> None:
    class Pipeline(Batched):
        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
            return message.put_batch_key([]) if message.data == 1 else message

    tested = test_batch(Pipeline, [1, 2])
    assert [m.data for m in tested.failed] == [1]
    assert [m.data for m in tested.successful] == [2]


def test_setup_is_called_once_and_gives_the_context() -> None:
    calls: list[str] = []

    class Pipeline(Batched):
        def setup(self, run: Any) -> Any:
            calls.append(run.dag_id)
            return {"table": "t"}

        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
            return message.put_data(context["table"])

    assert [m.data for m in test_batch(Pipeline, range(30)).successful] == ["t"] * 30
    assert calls == ["local"]


def test_a_batch_info_tells_ids_and_what_was_redelivered() -> None:
    driver = PipelineDriver(Batched)
    driver.push([driver.message(1, message_id="a"), driver.message(2, redelivered=True)])
    driver.drain()
    [batch] = driver.batches
    assert batch.info.redelivered == 1
    assert len(batch.info.batch_id) == 32
    assert batch.info.path("s3a://lake/", "d=1") == f"s3a://lake/d=1/batch_id={batch.info.batch_id}"


@pytest.mark.parametrize("options", [{"max_demand": 0}, {"max_demand": 5, "min_demand": 5}])
def test_options_by_which_nothing_would_be_processed_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match=r"m.._demand"):
        Processors(**options)
    assert Processors(max_demand=1, min_demand=0).max_demand == 1


# -- the run's acknowledger ------------------------------------------------------------------------


def test_an_unknown_ack_option_names_the_valid_ones() -> None:
    acknowledger = RunAcknowledger(DummyProducer(), Tally())
    message = Message(1, acknowledger=AckRef(acknowledger, "r", Delivery(receipt="x")))
    assert message.configure_ack(on_failure="ack").acknowledger.data.receipt == "x"
    with pytest.raises(OptionsError, match="did you mean 'on_failure'"):
        message.configure_ack(on_failur="ack")
    with pytest.raises(OptionsError, match=r"one of .*'dead_letter'"):
        message.configure_ack(on_failure="explode")


def test_attempts_are_used_up_by_recorded_failures() -> None:
    producer = DummyProducer()
    verdicts = [
        producer.verdict(Message(1, attempt=n).failed("x"), failed=True, stage="batch").action
        for n in (1, 4, 5)
    ]
    assert verdicts == [Action.RETRY, Action.RETRY, Action.DEAD_LETTER]


# -- telemetry -------------------------------------------------------------------------------------


def test_handlers_get_messages_as_the_callbacks_know_them() -> None:
    stage = ProcessorStage(
        Batched(), convert=lambda pipeline: lambda message: message.put_data("staged")
    )
    told: list[Any] = []
    name = telemetry.attach(
        lambda event, measurements, metadata: told.append(metadata), events=["processor.stop"]
    )
    result = stage.handle([Message("raw")])
    assert telemetry.detach(name)
    assert [message.data for message in result.successful] == ["staged"]
    assert [message.data for message in told[0]["successful_messages_to_forward"]] == ["raw"]


def test_a_handler_gets_the_traceback_where_failures_keep_none() -> None:
    class Raising(Batched):
        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
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
def test_a_handler_that_raises_is_detached_and_hurts_nobody(
    caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    calls: list[str] = []

    def broken(event: str, measurements: Any, metadata: Any) -> None:
        calls.append(event)
        raise kind("handler")

    name = telemetry.attach(broken, handler_id="broken")
    tested = test_batch(Plain, [1, 2, 3])
    assert len(tested.successful) == 3
    assert calls == ["topology.init"]
    assert not telemetry.detach(name)
    assert "'broken' raised on 'topology.init' and has been detached" in caplog.text


def test_attach_refuses_unknown_events_and_used_ids() -> None:
    with pytest.raises(ValueError, match=r"unknown telemetry events \['processor.begin'\]"):
        telemetry.attach(lambda *_: None, events=["processor.begin"])
    name = telemetry.attach(lambda *_: None)
    with pytest.raises(ValueError, match="attached already"):
        telemetry.attach(lambda *_: None, handler_id=name)
    assert telemetry.detach(name)


def test_the_log_bridge_writes_counts_and_no_data(caplog: pytest.LogCaptureFixture) -> None:
    name = telemetry.attach(telemetry.log_handler(), events=["batch_processor.stop"])
    with caplog.at_level(logging.INFO, "airflow_broadway.telemetry"):
        test_batch(Batched, ["secret", "secret"])
    telemetry.detach(name)
    [record] = [r for r in caplog.records if r.name == "airflow_broadway.telemetry"]
    assert '"successful_messages_count": 2' in record.getMessage()
    assert "secret" not in record.getMessage()


# -- values ----------------------------------------------------------------------------------------


def test_messages_and_errors_survive_pickling() -> None:
    message = Message(b"x", message_id="m", metadata={"a": 1}, acknowledger=NO_ACK).failed("why")
    again = pickle.loads(pickle.dumps(message))
    assert again.with_acknowledger(NO_ACK) == message
    error = pickle.loads(pickle.dumps(OptionsError("a.b", "a number", "x")))
    assert (str(error), error.path) == (str(OptionsError("a.b", "a number", "x")), "a.b")
