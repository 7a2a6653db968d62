from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pyarrow.parquet as pq
import pytest

from airflow_broadway.core.custody.protocol import Delivery, Entry
from airflow_broadway.core.custody.verdicts import ACK, Action, Verdict
from airflow_broadway.core.formats.entries import load_line
from airflow_broadway.core.model.acks import NO_ACK
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.staging import tables
from airflow_broadway.staging import writer as writer_module
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.writer import ProcessWriter
from tests.unit.staging.kit import (
    START,
    Republishing,
    message,
    open_generation,
    open_run,
    pipeline_of,
    stage,
)

SCHEMA = (
    "origin string not null, delay double, at timestamp, price decimal(9,2), tags array<string>"
)


def staged(run: StagedRun, path: str) -> list[dict[str, Any]]:
    table = pq.read_table(run.files.full(path))
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    return rows


def test_row_holds_all_of_a_message(tmp_path):
    run = open_run(tmp_path)
    pipeline = pipeline_of(default=Batcher(schema=SCHEMA, engine="spark"))
    generation = open_generation(run).generation
    data = {"origin": "EWR", "delay": 1, "at": START, "price": 2, "tags": ["a"]}
    messages = message(
        7,
        data,
        at=1.5,
        batch_key=("EWR", 1),
        batch_mode="flush",
        attempt=3,
        redelivered=True,
        metadata={"queue": "q", "n": 1, "é": "ü"},
        size=123,
        delivery=Delivery(receipt="r", on_failure="ack"),
    )

    writer = ProcessWriter(run, generation, pipeline)
    for _ in range(5):
        writer.messages([])
    stage(writer, pipeline, messages)
    written = writer.close()

    assert written.batchers == {"default": 1}
    assert written.configured
    assert written.files == {"default": [f"{generation}/messages/default/part-00000.parquet"]}
    [row] = staged(run, written.files["default"][0])
    assert row.pop("data") | {"price": 2} == {**data, "delay": 1.0, "price": 2}
    assert row == {
        "message_id": "m-7",
        "batch_key": '["EWR",1]',
        "flush": True,
        "partition": None,
        "metadata": {"queue": "q", "n": "1", "é": "ü"},
        "attempt": 3,
        "redelivered": True,
        "received_at": START + timedelta(seconds=1.5),
        "position": 7,
        "chunk": 5,
        "size": 123,
        "_receipt": "r",
        "_on_success": None,
        "_on_failure": "ack",
        "_acked": False,
    }


def test_body_is_kept_only_for_republishing_producers(tmp_path):
    run = open_run(tmp_path)
    delivery = Delivery(payload=b"body", properties='{"a":1}')
    kept = {"_payload": b"body", "_properties": '{"a":1}'}
    for producer, expected in ((None, {}), (Republishing(), kept)):
        pipeline = pipeline_of(producer, default=Batcher())
        writer = ProcessWriter(run, open_generation(run).generation, pipeline)
        stage(writer, pipeline, message(1, delivery=delivery))
        [row] = staged(run, writer.close().files["default"][0])
        assert {name: row[name] for name in row if name in ("_payload", "_properties")} == expected


def test_immediately_settled_message_is_marked(tmp_path):
    run = open_run(tmp_path)
    pipeline = pipeline_of(default=Batcher())
    writer = ProcessWriter(run, open_generation(run).generation, pipeline)
    stage(writer, pipeline, message(1).with_acknowledger(NO_ACK))
    [row] = staged(run, writer.close().files["default"][0])
    assert row["_acked"]
    assert row["_receipt"] == ""


def test_batchers_have_separate_files_and_dropped_keys_are_counted(tmp_path):
    run = open_run(tmp_path)
    pipeline = pipeline_of(a=Batcher(schema="n int"), b=Batcher(schema="n int"), c=Batcher())
    writer = ProcessWriter(run, open_generation(run).generation, pipeline)
    messages = (message(n, {"n": n, "x": 0}, batcher="ab"[n % 2]) for n in range(5))
    stage(writer, pipeline, *messages)
    written = writer.close()
    assert written.batchers == {"a": 3, "b": 2}
    assert written.dropped == {"x": 5}
    assert not written.configured
    assert set(written.files) == {"a", "b"}


def test_files_are_rolled_and_row_groups_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FILE_BYTES", 40_000)
    monkeypatch.setattr(writer_module, "GROUP_ROWS", 100)
    monkeypatch.setattr(writer_module, "GROUP_BYTES", 20_000)
    run = open_run(tmp_path)
    pipeline = pipeline_of(default=Batcher())
    writer = ProcessWriter(run, open_generation(run).generation, pipeline)
    source = random.Random(1)
    sizes = [10] * 250 + [1000] * 100
    for number, size in enumerate(sizes):
        stage(writer, pipeline, message(number, source.randbytes(size)))
    files = writer.close().files["default"]

    assert len(files) > 1
    numbers = [row["position"] for path in files for row in staged(run, path)]
    assert numbers == list(range(350))
    for path in files:
        metadata = pq.ParquetFile(run.files.full(path)).metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        assert all(group.num_rows <= 100 for group in groups)


def test_entry_lines_mark_immediate_settlement(tmp_path):
    run = open_run(tmp_path)
    writer = ProcessWriter(run, open_generation(run).generation, pipeline_of(Republishing()))
    failed = Entry("a", "r", Verdict(Action.DEAD_LETTER, 0.0, "why", "process"), 2, b"\xff", "{}")
    writer.entries([failed])
    writer.entries([Entry("b", "", ACK)], settled=True)
    written = writer.close()
    assert written.count == 2
    lines = [load_line(text) for text in run.files.lines(written.entries[0])]
    assert [(line.entry.message_id, line.settled) for line in lines] == [("a", False), ("b", True)]
    assert lines[0].entry == failed


def test_nothing_staged_is_nothing_written(tmp_path):
    run = open_run(tmp_path)
    generation = open_generation(run).generation
    written = ProcessWriter(run, generation, pipeline_of(default=Batcher())).close()
    assert (written.count, written.batchers, written.files, written.entries) == (0, {}, {}, [])
    assert run.files.list(generation) == []


def test_failed_execution_leaves_no_finished_file(tmp_path):
    run = open_run(tmp_path)
    generation = open_generation(run).generation
    pipeline = pipeline_of(default=Batcher())

    def fail():
        with ProcessWriter(run, generation, pipeline) as writer:
            stage(writer, pipeline, message(1))
            writer.entries([Entry("b", "", ACK)])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert run.files.list(generation) == []
