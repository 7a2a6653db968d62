"""``make soak``: it counts lost and doubled rows; a small one ends with each row once."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rabbitmq_fixtures import skip_without_own_server
from tests.soak.__main__ import RowCounter, compare_thirds, group_runs, soak


def test_rows_are_counted_by_message(tmp_path):
    rows = RowCounter(tmp_path, 5)
    for name, numbers in (("a", [0, 1, 1]), ("b", [2, 1])):
        pq.write_table(pa.table({"n": numbers}), tmp_path / f"{name}.parquet")
        rows.update()

    assert rows.update() == 5
    assert rows.compare() == (2, 2)


def test_a_window_is_a_tenth_of_the_runs():
    ended = {
        f"run{number}": {"seconds": 10.0 * (number + 1), "staged": 500.0 * (number + 1), "api": 7.0}
        for number in range(20)
    }
    cost = {"cpu": 0.001, "peak": 2**20, "handled": 100}
    costs = {run_id: {"process": cost, "ack": cost | {"peak": 2**21}} for run_id in ended}

    windows = group_runs(ended, costs)

    assert len(windows) == 10
    expected = {"messages": 200, "msg/s": 10, "cpu us": 20, "staged B": 5, "api": 7}
    assert windows[-1] == pytest.approx(expected | {"process peak": 1, "ack peak": 2})


def test_the_last_windows_are_compared_with_the_first():
    windows = [{"cpu us": value} for value in (10.0, 11.0, 50.0, 12.0, 22.0, 20.0, 33.0)]

    assert compare_thirds(windows) == {"cpu us": 2.0}


@pytest.mark.slow
def test_each_message_of_overlapping_runs_has_one_row():
    skip_without_own_server()

    rows, windows = soak(messages=6_000, per_run=1_000)

    assert rows.compare() == (0, 0)
    assert sum(window["messages"] for window in windows) == 6_000
    assert all(window["cpu us"] > 0 and window["process peak"] > 0 for window in windows)
