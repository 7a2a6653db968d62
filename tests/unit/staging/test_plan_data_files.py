"""The data files of a plan: content and reading."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.staging import plan_data_files
from airflow_broadway.staging import writer as writer_module
from airflow_broadway.staging.batch_reader import BatchReader
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import ParquetFile
from tests.unit.staging.kit import (
    message,
    open_run,
    pipeline_of,
    plan_of,
    publish,
    python_pipeline,
    stream,
)


def data_of(run: StagedRun, plan: BatchPlan) -> pa.Table:
    return pa.concat_tables(
        pq.read_table(run.files.full(f"{plan.path}/{name}")) for name in plan.data
    )


def test_spark_gets_the_public_columns_in_their_types(tmp_path):
    run = open_run(tmp_path)
    pipeline = pipeline_of(b=Batcher(schema="n int, at timestamp"))
    messages = [
        message(0, {"n": 1}, batcher="b", batch_key='say "hi"', metadata={"a": "b"}),
        message(1, {"n": 2}, batcher="b", batch_key=["x"]),
    ]
    plan, _ = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    table = data_of(run, plan)
    instant = pa.timestamp("us", tz="UTC")
    assert {field.name: field.type for field in table.schema if field.name[0] != "_"} == {
        "message_id": pa.string(),
        "data": pa.struct([("n", pa.int32()), ("at", instant)]),
        "batch_key": pa.string(),
        "metadata": pa.map_(pa.string(), pa.string()),
        "attempt": pa.int32(),
        "redelivered": pa.bool_(),
        "received_at": instant,
        "position": pa.int64(),
        "batch": pa.int64(),
        "source": pa.int32(),
    }
    assert table["batch_key"].to_pylist() == ['say "hi"', '["x"]']
    assert (plan.schema, plan.as_bytes) == ("n int, at timestamp", False)


@pytest.mark.parametrize(
    ("data", "as_bytes", "expected"),
    [
        ([b"a", b"\xff"], True, [b"a", b"\xff"]),
        ([{"n": 1}, "a"], False, ['{"n":1}', '"a"']),
        ([b"a", b"\xff", 1], False, ['"a"', '"base64:/w=="', "1"]),
        # Tombstones of Kafka: next to bytes, alone, beside JSON, text, and what is mixed
        ([b"a", None, b"null"], True, [b"a", None, b"null"]),
        ([None], True, [None]),
        ([None, {"n": None}], False, [None, '{"n":null}']),
        (["null", None], False, ['"null"', None]),
        ([b"a", None, 1], False, ['"a"', None, "1"]),
    ],
)
def test_unschematized_data_is_binary_if_all_bytes_else_json(tmp_path, data, as_bytes, expected):
    run, pipeline = open_run(tmp_path), pipeline_of(b=Batcher())
    messages = [message(n, value, batcher="b") for n, value in enumerate(data)]
    plan, _ = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    assert plan.as_bytes is as_bytes
    assert data_of(run, plan)["data"].to_pylist() == expected


def test_small_batches_share_row_groups_and_large_ones_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_data_files, "OWN_GROUP_ROWS", 10)
    run, pipeline = open_run(tmp_path), python_pipeline(batch_size=100)
    keys = ["small-1"] * 3 + ["large"] * 10 + ["small-2"] * 4 + ["small-3"] * 3 + ["small-4"] * 2
    messages = [message(n, batcher="b", batch_key=key) for n, key in enumerate(keys)]
    plan, _ = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    file = pq.ParquetFile(run.files.full(f"{plan.path}/{plan.data[0]}"))
    rows = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    assert rows == [3, 10, 9]
    assert {file.metadata.row_group(0).column(0).compression} == {"ZSTD"}


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A run of 200 messages in small row groups, its plan, and its batches of 10."""
    monkeypatch.setattr(plan_data_files, "BUFFER_ROWS", 40)
    monkeypatch.setattr(plan_data_files, "OWN_GROUP_ROWS", 5)
    monkeypatch.setattr(writer_module, "GROUP_ROWS", 20)
    run, pipeline = open_run(tmp_path), python_pipeline(batch_size=10)
    return run, *plan_of(run, pipeline, publish(run, pipeline, [stream(200)]))


def spy(kind, name):
    """Counts the calls of a method."""
    return mock.patch.object(kind, name, autospec=True, side_effect=getattr(kind, name))


def test_reader_reads_only_the_row_groups_of_its_batch(planned):
    run, plan, batches = planned
    with spy(ParquetFile, "read") as read, BatchReader(run, plan) as reader:
        assert [m.position for m in reader.read(batches[7])] == list(range(70, 80))
    assert read.call_count == 1


def test_reader_opens_each_file_once_for_all_batches(planned):
    run, plan, batches = planned
    with (
        spy(Folder, "source") as source,
        BatchReader(run, plan) as reader,
        ThreadPoolExecutor(4) as threads,
    ):
        rows_by_batch = list(threads.map(reader.read, batches))
    assert [row.position for rows in rows_by_batch for row in rows] == list(range(200))
    opened = [call.args[1] for call in source.call_args_list]
    assert opened == [f"{plan.path}/{name}" for name in plan.data]
