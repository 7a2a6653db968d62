"""Which messages make up which batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.staging import writer as writer_module
from airflow_broadway.staging.batch_reader import BatchReader
from tests.unit.staging.kit import (
    ids,
    message,
    open_run,
    pipeline_of,
    plan_of,
    publish,
    python_pipeline,
    stream,
)


def sizes_of(run: Any, plan: Any, batches: Any) -> list[tuple[list[int], str]]:
    """The numbers and the trigger of the batches."""
    return [(ids(run, plan, batch), batch.trigger) for batch in batches]


def test_batches_close_by_size_and_the_rest_is_flushed(tmp_path):
    run, pipeline = open_run(tmp_path), python_pipeline()
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, [stream(7)]))
    assert sizes_of(run, plan, batches) == [
        *(([0, 1, 2], "size"), ([3, 4, 5], "size"), ([6], "flush"))
    ]
    assert (plan.messages, plan.batches, plan.triggers) == (7, 3, {"flush": 1, "size": 2})


def test_non_text_key_is_json(tmp_path):
    run, pipeline = open_run(tmp_path), python_pipeline()
    keys: list[Any] = [("EWR", 1), None, 7, "7"]
    messages = [message(n, batcher="b", batch_key=key) for n, key in enumerate(keys)]
    _, batches = plan_of(run, pipeline, publish(run, pipeline, [messages]))
    assert [batch.batch_key for batch in batches] == [["EWR", 1], None, 7, "7"]


def test_batch_timeout_counts_from_receipt(tmp_path):
    # Given chunks received at 0, 1.5 and 4 seconds, and a timeout of 2
    run, pipeline = open_run(tmp_path), python_pipeline(batch_timeout=2.0)
    chunks = [[message(n, batcher="b", at=at)] for n, at in enumerate((0.0, 1.5, 4.0))]
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, chunks))
    assert sizes_of(run, plan, batches) == [([0, 1], "timeout"), ([2], "flush")]


@pytest.mark.parametrize("engine", ["python", "spark"])
def test_splitter_gets_settled_messages_with_their_metadata(tmp_path, engine):
    metadata: list[Any] = []

    def split(settled, so_far):
        metadata.append(settled.ack_immediately().metadata)
        return "cont", so_far

    options: Any = {"engine": engine, "batch_size": (0, split), "max_demand": 10}
    run, pipeline = open_run(tmp_path), python_pipeline(**options)
    plan_of(run, pipeline, publish(run, pipeline, [stream(2, metadata={"key": '{"!":1}'})]))
    assert metadata == [{"key": '{"!":1}'}] * 2


def test_default_timeout_does_not_split_staged_batches(tmp_path):
    # Given messages that came two seconds apart, and Broadway's timeout of one second by default
    run = open_run(tmp_path)
    pipeline = pipeline_of(b=Batcher(engine="python", batch_size=4))
    assert pipeline.batchers["b"].batch_timeout == 1.0
    chunks = [[message(n, batcher="b", at=2.0 * n)] for n in range(6)]

    # When they are batched after the last was staged
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, chunks))

    # Then none of that time counts as waiting
    assert sizes_of(run, plan, batches) == [([0, 1, 2, 3], "size"), ([4, 5], "flush")]


def test_another_override_keeps_the_default_timeout(tmp_path):
    run = open_run(tmp_path)
    pipeline = pipeline_of(b=Batcher(engine="python", batch_size=4))
    changed = type(pipeline)(batchers={"b": {"batch_size": 2}})
    chunks = [[message(n, batcher="b", at=2.0 * n)] for n in range(2)]
    _, batches = plan_of(run, changed, publish(run, changed, chunks))
    assert [batch.size for batch in batches] == [2]


@pytest.mark.parametrize("group_rows", [3, 100], ids=["chunk-in-two-groups", "one-group"])
def test_flush_reaches_to_the_end_of_its_chunk(group_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "GROUP_ROWS", group_rows)
    run, pipeline = open_run(tmp_path), python_pipeline(batch_size=100)
    flush = message(2, batcher="b", batch_mode="flush")
    chunks = [stream(2), [flush, message(3, batcher="b")], [message(4, batcher="b")]]
    plan, batches = plan_of(run, pipeline, publish(run, pipeline, chunks))
    assert sizes_of(run, plan, batches) == [([0, 1, 2, 3], "flush"), ([4], "flush")]


def test_redelivered_messages_and_sources_are_counted(tmp_path):
    run, pipeline = open_run(tmp_path), python_pipeline(batch_size=10)
    first = publish(run, pipeline, [stream(2)])
    again = [message(n, batcher="b", redelivered=True, message_id=f"o-{n}", at=1) for n in range(3)]
    second = publish(run, pipeline, [again], map_index=1)
    _, [batch] = plan_of(run, pipeline, first, second)
    assert batch.redelivered == 3
    assert batch.sources == {first: 2, second: 3}


def test_sources_are_merged_by_receipt_of_their_chunks(tmp_path):
    run, pipeline = open_run(tmp_path), python_pipeline(batch_size=100)
    first = [[message(n, batcher="b", at=n * 2.0)] for n in range(4)]
    second = [[message(10 + n, batcher="b", at=n * 3.0)] for n in range(4)]
    generations = [
        publish(run, pipeline, chunks, map_index=index)
        for index, chunks in enumerate((first, second))
    ]
    plan, [batch] = plan_of(run, pipeline, *generations)
    assert ids(run, plan, batch) == [0, 10, 1, 11, 2, 3, 12, 13]


def test_backward_clock_keeps_the_order_of_arrival(tmp_path):
    run, pipeline = open_run(tmp_path), python_pipeline(batch_size=100, batch_timeout=5.0)
    chunks = [[message(n, batcher="b", at=at)] for n, at in enumerate((10.0, 3.0, 11.0))]
    plan, [batch] = plan_of(run, pipeline, publish(run, pipeline, chunks))
    assert ids(run, plan, batch) == [0, 1, 2]


streams = st.lists(
    st.lists(  # of key, flush and size
        st.tuples(st.sampled_from(["a", "b", "c", 1, None]), st.booleans(), st.integers(0, 50)),
        min_size=1,
        max_size=6,
    ),
    max_size=12,
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sources=st.lists(streams, min_size=1, max_size=3),
    size=st.integers(1, 7),
    limit=st.one_of(st.none(), st.integers(1, 120)),
    timeout=st.one_of(st.none(), st.floats(0.5, 5)),
    merge=st.booleans(),
)
def test_any_messages_are_planned_once_in_order_and_reproducibly(
    tmp_path, sources, size, limit, timeout, merge
):
    # Given generations of chunks, whatever their keys, flushes and sizes
    pipeline = python_pipeline(
        batch_size=size, batch_bytes=limit, batch_timeout=timeout, merge_keys=merge
    )
    generations: list[str] = []
    run = open_run(tmp_path, f"run:{len(list(tmp_path.rglob('generations')))}")
    order: dict[Any, list[str]] = {}
    expected: set[str] = set()
    for index, chunks in enumerate(sources):
        number = 0
        staged: list[list[Message]] = []
        for at, chunk in enumerate(chunks):
            staged.append([])
            for key, flush, bytes_ in chunk:
                name, mode = f"{index}-{number}", "flush" if flush else "bulk"
                fields = {"batcher": "b", "batch_key": key, "batch_mode": mode, "size": bytes_}
                staged[-1].append(message(number, message_id=name, at=float(at), **fields))
                order.setdefault((index, key), []).append(name)
                expected.add(name)
                number += 1
        generations.append(publish(run, pipeline, staged, map_index=index))

    # When they are planned
    plan, batches = plan_of(run, pipeline, *generations)

    # Then every message is in exactly one batch
    with BatchReader(run, plan) as reader:
        rows_by_batch = {batch.batch_id: reader.read(batch) for batch in batches}
    ids_found = [message.message_id for messages in rows_by_batch.values() for message in messages]
    assert len(rows_by_batch) == len(batches) == plan.batches
    assert sorted(ids_found) == sorted(expected)
    assert plan.messages == len(expected)
    # and no batch is larger than allowed
    for batch in batches:
        assert batch.size == len(rows_by_batch[batch.batch_id]) <= size
        assert batch.bytes == sum(message.size for message in rows_by_batch[batch.batch_id])
        assert limit is None or batch.bytes <= limit or batch.size == 1
    # and the messages of a key keep their order, within batches and across them
    for (index, key), wanted in order.items():
        planned = [
            message.message_id
            for messages in rows_by_batch.values()
            for message in messages
            if type(message.batch_key) is type(key)
            and message.batch_key == key
            and message.message_id.startswith(f"{index}-")
        ]
        assert planned == wanted
    # and the same input makes the same batches, wherever it is planned
    run.store.folder(f"{run.path}/batches").remove_all()
    again, batches_again = plan_of(run, pipeline, *generations)
    assert [batch.batch_id for batch in batches] == [batch.batch_id for batch in batches_again]
    assert again.triggers == plan.triggers
