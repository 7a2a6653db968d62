"""The demo's input: every flight of the data file, typed, in the embedded queue."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.demo_report import Expected
from scripts.load_flights import FLIGHTS, flights, load


def test_a_row_is_typed_and_na_is_null() -> None:
    rows = list(islice(flights(), 1_000))

    assert (rows[0]["dep_delay"], rows[0]["carrier"], rows[0]["flight"]) == (2, "UA", 1545)
    assert rows[0]["time_hour"] == "2013-01-01T10:00:00Z"
    cancelled = next(row for row in rows if row["dep_time"] is None)
    assert cancelled["dep_delay"] is None
    assert not any(value == "NA" for row in rows for value in row.values())


def test_the_data_is_what_the_demo_says_it_is() -> None:
    expected = Expected()
    for _ in expected.count(flights()):
        pass

    assert expected.sent == FLIGHTS == 336_776
    assert expected.never_departed == 8_255
    assert expected.rows["delayed", "EWR"] == 28_942
    assert expected.rows["delayed", "JFK"] == 22_650
    assert expected.rows["delayed", "LGA"] == 19_182
    by_batcher = Counter[str]()
    for (batcher, _), count in expected.rows.items():
        by_batcher[batcher] += count
    assert by_batcher == {"delayed": 70_774, "on_time": 257_747}


def test_a_seed_chooses_the_same_flights_each_time() -> None:
    chosen = list(flights(50, seed=7))

    assert chosen == list(flights(50, seed=7))
    assert len(chosen) == 50
    assert chosen != list(flights(50, seed=8))
    assert chosen != list(flights(50))


def test_flights_are_sent_in_the_order_of_the_file(tmp_path: Path) -> None:
    # Given an empty queue
    queue = SqliteQueue(tmp_path / "queue.db", "flights")

    # When the first flights are loaded into it
    result: list[int] = []
    assert load(queue, flights(30), progress=result.append) == 30

    # Then they are its messages, and the progress was told
    messages = queue.receive("test", 100)
    assert [json.loads(message.data) for message in messages] == list(flights(30))
    assert result == [30]
