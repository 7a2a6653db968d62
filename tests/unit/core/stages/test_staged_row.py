"""Staged rows of messages, and values that cannot be staged."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.core.errors import ConversionError, PipelineError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.processor import ProcessorStage
from airflow_broadway.core.stages.staged_row import DirectConverter, RowConverter
from airflow_broadway.testing import DummyProducer


class Plain(Pipeline):
    """Without batchers, and with ``handle_message`` alone."""

    producer = DummyProducer()

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


def pipeline_of(batcher: Batcher) -> Pipeline:
    pipeline: Pipeline = type("Batching", (Plain,), {"batchers": {"default": batcher}})()
    return pipeline


def message(position: int, data: Any = b"data", **fields: Any) -> Message:
    return Message(data, position=position, **{"message_id": f"m-{position}", **fields})


def test_data_is_converted_by_the_batcher_schema():
    rows = RowConverter(pipeline_of(Batcher(schema="n double, s string")))
    row = rows(message(1, {"n": 1, "extra": 2})).data
    assert (row.data, row.key, row.partition) == ((1.0, None), '"default"', None)
    assert row.dropped == {"extra": 1}
    assert rows(message(2, {"n": 1})).data.dropped is None


def test_misfit_names_column_and_value():
    rows = RowConverter(pipeline_of(Batcher(schema="n int")))
    with pytest.raises(ConversionError, match=r"n: .*'x'"):
        rows(message(1, {"n": "x"}))


@pytest.mark.parametrize(
    ("data", "staged"), [(b"\xff", b"\xff"), (bytearray(b"a"), b"a"), ("é", '"é"'), (None, None)]
)
def test_unschematized_bytes_stay_bytes_and_the_rest_is_json(data, staged):
    assert RowConverter(pipeline_of(Batcher()))(message(1, data)).data.data == staged


@pytest.mark.parametrize(
    "fields",
    [
        {"data": {1, 2}},
        {"data": float("nan")},
        {"data": "\ud800"},
        {"batch_key": b"bytes"},
        {"batch_key": float("inf")},
        {"metadata": {"x": object()}},
        {"message_id": "\ud800"},
    ],
)
@pytest.mark.parametrize("converter", [RowConverter, DirectConverter])
def test_unserializable_message_fails(converter, fields):
    with pytest.raises(ConversionError):
        converter(pipeline_of(Batcher()))(message(1, batcher="default", **fields))


def test_key_may_be_any_json():
    rows = RowConverter(pipeline_of(Batcher()))
    keys = [rows(message(1, batch_key=key)).data.key for key in ("a", 1, None, ("a", 1), 'q"')]
    assert keys == ['"a"', "1", "null", '["a",1]', '"q\\""']
    keys = [rows(message(1, batch_key=key)).data.key for key in (1, True, (1,), (True,))]
    assert keys == ["1", "true", "[1]", "[true]"]


def test_partition_is_that_of_the_returned_message():
    options = Batcher(partition_by=lambda message: message.data["n"], concurrency=3)
    rows = RowConverter(pipeline_of(options))
    assert rows(message(1, {"n": 7})).data.partition == 1
    with pytest.raises(PipelineError, match="at least 0"):
        rows(message(1, {"n": -1}))
    with pytest.raises(KeyError):
        rows(message(1, {}))


def test_unbatched_pipeline_keeps_its_messages():
    unchanged = message(1, object())
    assert RowConverter(Plain())(unchanged) is unchanged


def test_unconvertible_message_fails_alone():
    # Given a processor that converts as its last step
    pipeline = pipeline_of(Batcher(schema="n int"))
    acked: list[tuple[list[Any], list[Any]]] = []
    stage = ProcessorStage(
        pipeline, convert=RowConverter, ack=lambda good, bad: acked.append((good, bad))
    )

    # When one of three has the wrong data
    result = stage.handle([message(1, {"n": 1}), message(2, {"n": "x"}), message(3, {"n": 3})])

    # Then it is failed with its data as it was, and settled as failed
    assert [m.position for m in result.successful] == [1, 3]
    [failed] = result.failed
    assert failed.data == {"n": "x"}
    assert "n: expected" in failed.status.text
    assert acked == [([], [failed])]
