from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.core.formats.plan import PlannedBatch
from airflow_broadway.core.stages.batch_order import BatchOrder
from tests.unit.planned import planned_batch


def batch(batch_id: str, key: Any = "default", partition: int | None = None) -> PlannedBatch:
    return planned_batch(batch_id, batch_key=key, partition=partition)


def turns(*batches: PlannedBatch, merged: bool = False) -> BatchOrder:
    return BatchOrder(iter(batches), merged=merged)


def take(order: BatchOrder) -> str | None:
    taken = order.take()
    return None if taken is None else taken.batch_id


def test_other_keys_overtake_a_waiting_batch():
    order = turns(batch("a1", "a"), batch("a2", "a"), batch("b1", "b"))
    assert [take(order), take(order), take(order)] == ["a1", "b1", None]


def test_batches_of_one_partition_run_in_order():
    order = turns(batch("1", "a", 0), batch("2", "b", 0), batch("3", "c", 1))
    assert [take(order), take(order), take(order)] == ["1", "3", None]


def test_shared_order_prevents_overtaking():
    # The second waits for its partition, so the third, of the same key, waits behind it.
    order = turns(batch("1", "a", 0), batch("2", "b", 0), batch("3", "b", 1))
    assert [take(order), take(order)] == ["1", None]


def test_merged_batches_run_in_sequence_unless_partitioned():
    order = turns(batch("1", None), batch("2", None), merged=True)
    assert [take(order), take(order)] == ["1", None]
    order = turns(batch("1", None, 0), batch("2", None, 1), merged=True)
    assert [take(order), take(order)] == ["1", "2"]


def test_similar_keys_are_different():
    order = turns(batch("1", 1), batch("2", "1"), batch("3", [1]), batch("4", None))
    assert [take(order) for _ in range(4)] == ["1", "2", "3", "4"]


def test_long_plan_is_read_lazily():
    read = []

    def endless():
        n = 0
        while True:
            read.append(n)
            yield batch(str(n), n)
            n += 1

    order = BatchOrder(endless(), merged=False)
    assert [take(order) for _ in range(3)] == ["0", "1", "2"]
    assert len(read) <= 4


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, 0, 1])), max_size=30),
    st.data(),
)
def test_every_batch_runs_once_in_the_order_of_its_key(plan, data):
    batches = [batch(str(n), key, partition) for n, (key, partition) in enumerate(plan)]
    order = turns(*batches)
    running: list[PlannedBatch] = []
    begun: list[PlannedBatch] = []
    while not order.finished or running:
        taken = order.take() if data.draw(st.booleans()) or not running else None
        if taken is not None:
            assert all(taken.batch_key != other.batch_key for other in running)
            running.append(taken)
            begun.append(taken)
        elif running:
            order.done(running.pop(data.draw(st.integers(0, len(running) - 1))))
    assert sorted(int(batch.batch_id) for batch in begun) == list(range(len(plan)))
    for key in "abc":
        own = [int(batch.batch_id) for batch in begun if batch.batch_key == key]
        assert own == sorted(own)
