from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway import Batcher, Message
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.batch_info import Trigger
from airflow_broadway.core.stages.batcher import (
    BatcherStage,
    BatchHash,
    ItemBatch,
    KeyMerger,
    partitioner,
)


def message(number: int, key: Any = "k", mode: str = "bulk", size: int = 0) -> Message:
    return Message(number, message_id=str(number), batch_key=key, batch_mode=mode, size=size)


def data(closed: list[ItemBatch]) -> list[tuple[Any, str, list[int]]]:
    return [(batch.key, batch.trigger.value, [m.data for m in batch.pending]) for batch in closed]


def stage(**options: Any) -> BatcherStage:
    return BatcherStage("default", Batcher(**{"engine": "python", **options}))


def test_batch_times_out_exactly_after_its_first_message():
    batcher = stage(batch_size=10, batch_timeout=2.0)
    batcher.add([message(1)], 10.0)
    batcher.add([message(2)], 11.5)
    assert batcher.next_due() == 12.0
    assert batcher.due(11.999) == []
    assert data(batcher.due(12.0)) == [("k", "timeout", [1, 2])]
    assert batcher.next_due() is None


def test_timeouts_are_in_chronological_order():
    batcher = stage(batch_size=10, batch_timeout=1.0)
    for number, key in enumerate("cab"):
        batcher.add([message(number, key)], number / 10)
    assert [batch.key for batch in batcher.due(5.0)] == ["c", "a", "b"]


def test_batch_without_timeout_waits_for_the_end():
    batcher = stage(batch_size=10, batch_timeout=None)
    batcher.add([message(1)], 0.0)
    assert batcher.next_due() is None
    assert batcher.due(1e9) == []
    assert data(batcher.flush()) == [("k", "flush", [1])]


def test_batch_closes_before_exceeding_batch_bytes():
    batcher = stage(batch_size=100, batch_bytes=10)
    sizes = [4, 4, 4, 30, 1, 9]
    closed = batcher.add([message(i, size=size) for i, size in enumerate(sizes)], 0.0)
    assert data(closed) == [
        ("k", "bytes", [0, 1]),
        ("k", "bytes", [2]),
        ("k", "bytes", [3]),  # larger than the bound: alone
        ("k", "bytes", [4, 5]),  # exactly the bound
    ]
    assert batcher.flush() == []


def test_accumulator_restarts_after_timeout_and_flush():
    def split(m, acc):
        return ("cont", acc - 1) if acc > 1 else ("emit", 99)

    batcher = stage(batch_size=(3, split), max_demand=100, batch_timeout=1.0)
    batcher.add([message(1), message(2)], 0.0)
    assert data(batcher.due(1.0)) == [("k", "timeout", [1, 2])]
    closed = batcher.add([message(3), message(4), message(5)], 2.0)
    assert data(closed) == [("k", "size", [3, 4, 5])]


def test_items_with_invalid_splitter_result_fail_together():
    batcher = stage(batch_size=(0, lambda m, acc: acc), max_demand=10)
    assert batcher.add([message(1), message(2)], 0.0) == []
    (closed,) = batcher.flush()
    assert data([closed]) == [("k", "flush", [1, 2])]
    assert isinstance(closed.error, PipelineError)
    assert "must return ('cont', acc) or ('emit', acc), got: 0" in str(closed.error)
    assert batcher.flush() == []


def test_item_failed_by_the_splitter_changes_nothing_else():
    def split(m, acc):
        if m.data in (1, 3):
            raise ValueError(m.data)
        return ("emit" if len(acc) == 1 else "cont", [*acc, m.data])

    batcher = stage(batch_size=([], split), max_demand=10)
    closed = batcher.add([message(number) for number in range(1, 7)], 0.0)
    assert data(closed) == [("k", "size", [2, 4]), ("k", "size", [5, 6])]
    failed = batcher.flush()
    assert data(failed) == [("k", "flush", [1]), ("k", "flush", [3])]
    assert [str(batch.error) for batch in failed] == ["1", "3"]


def test_interrupt_in_a_splitter_propagates():
    interrupted = mock.Mock(side_effect=KeyboardInterrupt)
    batcher = stage(batch_size=(0, interrupted), max_demand=10)
    with pytest.raises(KeyboardInterrupt):
        batcher.add([message(1)], 0.0)


@pytest.mark.parametrize("value", [-1, 1.5, "1", None, True])
def test_partition_must_be_a_non_negative_integer(value):
    partition = partitioner(Batcher(partition_by=lambda m: value, concurrency=4))
    assert partition is not None
    with pytest.raises(PipelineError, match="partition_by must return an integer"):
        partition(message(1))


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(2, [1] * 6), (3, [2, 2, 2]), (4, [2, 2, 2]), (100, [6])]
)
def test_flush_reaches_to_the_end_of_the_step(batch_size, sizes):
    batcher = stage(batch_size=batch_size)
    closed = batcher.add([message(number, mode="flush") for number in range(6)], 0.0)
    assert [(batch.size, batch.trigger.value) for batch in closed] == [(n, "flush") for n in sizes]


def test_flush_is_in_order_of_opening():
    batcher = stage(batch_size=2, batch_timeout=None)
    # The first key's batch is closed by its size, and its next one is opened after the others
    batcher.add([message(number, key) for number, key in enumerate("abcaa")], 0.0)
    assert data(batcher.flush()) == [("b", "flush", [1]), ("c", "flush", [2]), ("a", "flush", [4])]


def test_merged_calls_hold_whole_batches_up_to_batch_size():
    def closed(key, size, partition=None):
        return ItemBatch([None] * size, key, partition, Trigger.FLUSH, size, 10 * size)

    merger = KeyMerger(10)
    full = merger.add([closed("a", 4), closed("b", 4), closed("c", 4), closed("d", 10)])
    assert [[batch.key for batch in call] for call in full] == [["a", "b"], ["c"], ["d"]]
    assert merger.flush() == []
    merger.add([closed("a", 1, 0), closed("b", 1, 1), closed("c", 1, 0)])
    assert [[batch.key for batch in call] for call in merger.flush()] == [["a", "c"], ["b"]]
    assert merger.flush() == []
    full = KeyMerger(10, batch_bytes=50).add([closed("a", 2), closed("b", 3), closed("c", 6)])
    assert [[batch.key for batch in call] for call in full] == [["a", "b"], ["c"]]


def test_batch_id_is_unambiguous():
    def batch_id(pipeline, batcher, key, message_ids):
        return BatchHash(pipeline, batcher, key).update_all(message_ids).hexdigest()

    ids = {
        batch_id("p", "b", "k", ["1", "23"]),
        batch_id("p", "b", "k", ["12", "3"]),
        batch_id("p", "b", "k", ["123"]),
        batch_id("p", "bk", "", ["123"]),
        batch_id("p", "b", 1, ["123"]),
        batch_id("p", "b", "1", ["123"]),
        batch_id("p", "b", None, ["123"]),
    }
    assert len(ids) == 7
    assert all(len(id_) == 32 for id_ in ids)
    assert BatchHash("p", "b", "k").update_all("1").update_all(["23"]).hexdigest() in ids


keys = st.sampled_from("abc")
modes = st.sampled_from(["bulk", "bulk", "bulk", "flush"])
pauses = st.sampled_from([0.0, 0.0, 0.1, 0.6])
items = st.lists(st.tuples(keys, modes, st.integers(0, 9), pauses), max_size=60)


def run(options: dict[str, Any], stream: list[tuple[str, str, int, float]], step: int) -> Any:
    batcher, now, closed = stage(**options), 0.0, []
    for start in range(0, len(stream), step):
        chunk = stream[start : start + step]
        now += chunk[0][3]
        closed += batcher.due(now)
        numbered = enumerate(chunk, start)
        closed += batcher.add([message(i, *item[:3]) for i, item in numbered], now)
    return closed + batcher.flush()


@given(
    stream=items,
    batch_size=st.integers(1, 7),
    batch_bytes=st.none() | st.integers(1, 25),
    timeout=st.none() | st.just(0.5),
    step=st.integers(1, 9),
)
def test_batching_is_pure_and_keeps_order_and_bounds(
    stream, batch_size, batch_bytes, timeout, step
):
    options = {"batch_size": batch_size, "batch_bytes": batch_bytes, "batch_timeout": timeout}
    closed = run(options, stream, step)
    # the same stream at the same instants gives the same batches
    assert data(run(options, stream, step)) == data(closed)
    # each message is in exactly one batch, and in order within its key
    for key in "abc":
        numbers = [m.data for batch in closed if batch.key == key for m in batch.pending]
        assert numbers == [number for number, item in enumerate(stream) if item[0] == key]
    for batch in closed:
        assert 1 <= batch.size == len(batch.pending) <= batch_size
        assert all(m.batch_key == batch.key for m in batch.pending)
        if batch_bytes is not None:
            assert batch.size == 1 or sum(m.size for m in batch.pending) <= batch_bytes
