from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.core.formats.plan import PlannedBatch
from airflow_broadway.core.stages.batch_order import BatchOrder


def batch(batch_id: str, key: Any = "default", partition: int | None = None) -> PlannedBatch:
    return PlannedBatch(
        batch_id=batch_id,
        rows=[[0, 0]],
        files=[0],
        batch_key=key,
        keys=1,
        partition=partition,
        size=1,
        bytes=1,
        trigger="size",
        redelivered=0,
        sources={},
    )


def turns(*batches: PlannedBatch, merged: bool = False) -> BatchOrder:
    return BatchOrder(iter(batches), merged=merged)


def take(given: BatchOrder) -> str | None:
    found = given.take()
    return None if found is None else found.batch_id


def test_other_keys_overtake_a_batch_that_waits() -> None:
    given = turns(batch("a1", "a"), batch("a2", "a"), batch("b1", "b"))
    assert [take(given), take(given), take(given)] == ["a1", "b1", None]


def test_batches_of_one_partition_run_in_order_whatever_their_key() -> None:
    given = turns(batch("1", "a", 0), batch("2", "b", 0), batch("3", "c", 1))
    assert [take(given), take(given), take(given)] == ["1", "3", None]


def test_a_batch_does_not_overtake_one_that_waits_for_an_order_they_share() -> None:
    # The second waits for its partition, so the third, of the same key, waits behind it.
    given = turns(batch("1", "a", 0), batch("2", "b", 0), batch("3", "b", 1))
    assert [take(given), take(given)] == ["1", None]


def test_merged_batches_run_one_after_another_unless_partitioned() -> None:
    given = turns(batch("1", None), batch("2", None), merged=True)
    assert [take(given), take(given)] == ["1", None]
    given = turns(batch("1", None, 0), batch("2", None, 1), merged=True)
    assert [take(given), take(given)] == ["1", "2"]


def test_keys_that_look_alike_are_different() -> None:
    given = turns(batch("1", 1), batch("2", "1"), batch("3", [1]), batch("4", None))
    assert [take(given) for _ in range(4)] == ["1", "2", "3", "4"]


def test_a_long_plan_is_not_read_further_than_needed() -> None:
    read = []

    def endless() -> Any:
        n = 0
        while True:
            read.append(n)
            yield batch(str(n), n)
            n += 1

    given = BatchOrder(endless(), merged=False)
    assert [take(given) for _ in range(3)] == ["0", "1", "2"]
    assert len(read) <= 4


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, 0, 1])), max_size=30),
    st.data(),
)
def test_every_batch_runs_once_and_in_the_order_of_its_key(
    plan: list[tuple[str, int | None]], data: st.DataObject
) -> None:
    batches = [batch(str(n), key, partition) for n, (key, partition) in enumerate(plan)]
    given = turns(*batches)
    running: list[PlannedBatch] = []
    order: list[PlannedBatch] = []
    while not given.finished or running:
        found = given.take() if data.draw(st.booleans()) or not running else None
        if found is not None:
            assert all(found.batch_key != each.batch_key for each in running)
            running.append(found)
            order.append(found)
        elif running:
            given.done(running.pop(data.draw(st.integers(0, len(running) - 1))))
    assert sorted(int(each.batch_id) for each in order) == list(range(len(plan)))
    for key in "abc":
        own = [int(each.batch_id) for each in order if each.batch_key == key]
        assert own == sorted(own)
