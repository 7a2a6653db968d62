from __future__ import annotations

from typing import Any

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
    return [(each.key, each.trigger.value, [m.data for m in each.pending]) for each in closed]


def stage(**options: Any) -> BatcherStage:
    return BatcherStage("default", Batcher(**{"engine": "python", **options}))


def test_a_batch_times_out_exactly_its_timeout_after_its_first_message() -> None:
    batcher = stage(batch_size=10, batch_timeout=2.0)
    batcher.add([message(1)], 10.0)
    batcher.add([message(2)], 11.5)
    assert batcher.next_due() == 12.0
    assert batcher.due(11.999) == []
    assert data(batcher.due(12.0)) == [("k", "timeout", [1, 2])]
    assert batcher.next_due() is None


def test_timeouts_come_in_the_order_in_which_they_pass() -> None:
    batcher = stage(batch_size=10, batch_timeout=1.0)
    for number, key in enumerate("cab"):
        batcher.add([message(number, key)], number / 10)
    assert [each.key for each in batcher.due(5.0)] == ["c", "a", "b"]


def test_without_a_timeout_a_batch_waits_for_the_end() -> None:
    batcher = stage(batch_size=10, batch_timeout=None)
    batcher.add([message(1)], 0.0)
    assert batcher.next_due() is None
    assert batcher.due(1e9) == []
    assert data(batcher.flush()) == [("k", "flush", [1])]


def test_a_batch_is_closed_before_it_passes_batch_bytes() -> None:
    batcher = stage(batch_size=100, batch_bytes=10)
    sizes = [4, 4, 4, 30, 1, 9, 2]
    closed = batcher.add([message(i, size=size) for i, size in enumerate(sizes)], 0.0)
    assert data(closed) == [
        ("k", "bytes", [0, 1]),
        ("k", "bytes", [2]),
        ("k", "bytes", [3]),  # larger than the bound: alone
        ("k", "bytes", [4, 5]),  # exactly the bound
    ]
    assert data(batcher.flush()) == [("k", "flush", [6])]


def test_an_accumulator_starts_anew_after_timeout_and_flush() -> None:
    def split(m: Message, acc: int) -> tuple[str, int]:
        return ("cont", acc - 1) if acc > 1 else ("emit", 99)

    batcher = stage(batch_size=(3, split), max_demand=100, batch_timeout=1.0)
    batcher.add([message(1), message(2)], 0.0)
    assert data(batcher.due(1.0)) == [("k", "timeout", [1, 2])]
    closed = batcher.add([message(3), message(4), message(5)], 2.0)
    assert data(closed) == [("k", "size", [3, 4, 5])]


def test_items_whose_splitter_answers_nonsense_fail_together() -> None:
    batcher = stage(batch_size=(0, lambda m, acc: acc), max_demand=10)
    assert batcher.add([message(1), message(2)], 0.0) == []
    (closed,) = batcher.flush()
    assert data([closed]) == [("k", "flush", [1, 2])]
    assert isinstance(closed.error, PipelineError)
    assert "must return ('cont', acc) or ('emit', acc), got: 0" in str(closed.error)
    assert batcher.flush() == []


def test_an_item_on_which_the_splitter_raises_is_in_no_other_batch_and_changes_no_accumulator() -> (
    None
):
    def split(m: Message, acc: list[int]) -> tuple[str, list[int]]:
        if m.data in (1, 3):
            raise ValueError(m.data)
        return ("emit" if len(acc) == 1 else "cont", [*acc, m.data])

    batcher = stage(batch_size=([], split), max_demand=10)
    closed = batcher.add([message(number) for number in range(1, 7)], 0.0)
    assert data(closed) == [("k", "size", [2, 4]), ("k", "size", [5, 6])]
    failed = batcher.flush()
    assert data(failed) == [("k", "flush", [1]), ("k", "flush", [3])]
    assert [str(each.error) for each in failed] == ["1", "3"]


def test_an_interrupt_in_a_splitter_goes_through() -> None:
    def split(m: Message, acc: int) -> tuple[str, int]:
        raise KeyboardInterrupt

    batcher = stage(batch_size=(0, split), max_demand=10)
    with pytest.raises(KeyboardInterrupt):
        batcher.add([message(1)], 0.0)


@pytest.mark.parametrize("value", [-1, 1.5, "1", None, True])
def test_a_partition_must_be_an_integer_of_at_least_0(value: Any) -> None:
    partition = partitioner(Batcher(partition_by=lambda m: value, concurrency=4))
    assert partition is not None
    with pytest.raises(PipelineError, match="partition_by must return an integer"):
        partition(message(1))


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(2, [1] * 6), (3, [2, 2, 2]), (4, [2, 2, 2]), (100, [6])]
)
def test_a_flush_reaches_as_far_as_the_step_that_the_batch_size_makes(
    batch_size: int, sizes: list[int]
) -> None:
    batcher = stage(batch_size=batch_size)
    closed = batcher.add([message(number, mode="flush") for number in range(6)], 0.0)
    assert [(each.size, each.trigger.value) for each in closed] == [(n, "flush") for n in sizes]


def test_at_the_end_batches_come_in_the_order_in_which_they_were_opened() -> None:
    batcher = stage(batch_size=2, batch_timeout=None)
    # The first key's batch is closed by its size, and its next one is opened after the others
    batcher.add([message(number, key) for number, key in enumerate("abcaa")], 0.0)
    assert data(batcher.flush()) == [("b", "flush", [1]), ("c", "flush", [2]), ("a", "flush", [4])]


def test_merged_calls_hold_whole_batches_up_to_batch_size() -> None:
    def closed(key: str, size: int, partition: int | None = None) -> ItemBatch:
        return ItemBatch([None] * size, key, partition, Trigger.FLUSH, size)

    merger = KeyMerger(10)
    full = merger.add([closed("a", 4), closed("b", 4), closed("c", 4), closed("d", 10)])
    assert [[each.key for each in call] for call in full] == [["a", "b"], ["c"], ["d"]]
    assert merger.flush() == []
    merger.add([closed("a", 1, 0), closed("b", 1, 1), closed("c", 1, 0)])
    assert [[each.key for each in call] for call in merger.flush()] == [["a", "c"], ["b"]]


def test_a_batch_id_is_unambiguous() -> None:
    def batch_id(pipeline: str, batcher: str, key: Any, message_ids: list[str]) -> str:
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
    assert all(len(each) == 32 for each in ids)
    assert BatchHash("p", "b", "k").update_all("1").update_all(["23"]).hexdigest() in ids


keys = st.sampled_from("abc")
items = st.lists(
    st.tuples(
        keys,
        st.sampled_from(["bulk", "bulk", "bulk", "flush"]),
        st.integers(0, 9),
        st.sampled_from([0.0, 0.0, 0.1, 0.6]),
    ),
    max_size=60,
)


def run(options: dict[str, Any], stream: list[tuple[str, str, int, float]], step: int) -> Any:
    batcher, now, closed = stage(**options), 0.0, []
    for start in range(0, len(stream), step):
        chunk = stream[start : start + step]
        now += chunk[0][3]
        closed += batcher.due(now)
        closed += batcher.add(
            [message(start + i, key, mode, size) for i, (key, mode, size, _) in enumerate(chunk)],
            now,
        )
    return closed + batcher.flush()


@given(
    stream=items,
    batch_size=st.integers(1, 7),
    batch_bytes=st.none() | st.integers(1, 25),
    timeout=st.none() | st.just(0.5),
    step=st.integers(1, 9),
)
def test_batching_is_pure_loses_nothing_and_keeps_order_and_bounds(
    stream: list[tuple[str, str, int, float]],
    batch_size: int,
    batch_bytes: int | None,
    timeout: float | None,
    step: int,
) -> None:
    options = {"batch_size": batch_size, "batch_bytes": batch_bytes, "batch_timeout": timeout}
    closed = run(options, stream, step)
    # the same stream at the same instants gives the same batches
    assert data(run(options, stream, step)) == data(closed)
    # each message is in exactly one batch, and in order within its key
    for key in "abc":
        got = [m.data for each in closed if each.key == key for m in each.pending]
        assert got == [number for number, item in enumerate(stream) if item[0] == key]
    for each in closed:
        assert 1 <= each.size == len(each.pending) <= batch_size
        assert all(m.batch_key == each.key for m in each.pending)
        if batch_bytes is not None:
            assert each.size == 1 or sum(m.size for m in each.pending) <= batch_bytes
