"""A sink is read and emptied by the user's functions in separate processes."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.testing.crashes.sink import ForkError, count_rows, prepare
from airflow_broadway.testing.crashes.subject import FOLDER


def read(tmp_path: Path, rows: Any, ids: tuple[str, ...] = ()) -> Counter[str]:
    return count_rows(lambda folder: rows, tmp_path, tmp_path / "log.txt", ids)


def test_equal_rows_are_counted(tmp_path: Path) -> None:
    assert read(tmp_path, [{"b": 1, "a": 2}, {"a": 2, "b": 1}, 3]) == {
        '{"a": 2, "b": 1}': 2,
        "3": 1,
    }


def test_message_ids_are_replaced_by_their_positions(tmp_path: Path) -> None:
    rows = ["tag-1", {"id": "tag-12", "file": "tag-2.json"}]
    assert read(tmp_path, rows, ("tag-1", "tag-2", "tag-12")) == {
        '"<message 1>"': 1,
        '{"file": "<message 2>.json", "id": "<message 3>"}': 1,
    }


def test_common_values_of_databases_are_supported(tmp_path: Path) -> None:
    db = sqlite3.connect(":memory:")
    db.row_factory = sqlite3.Row
    row = db.execute("SELECT 1 AS n").fetchone()
    assert read(tmp_path, [row, Decimal("1.50"), date(2026, 1, 2), {3, 1}]) == {
        '{"n": 1}': 1,
        '"1.50"': 1,
        '"2026-01-02"': 1,
        "[1, 3]": 1,
    }


def test_a_sink_runs_in_the_folder_of_the_case_and_its_output_is_logged(tmp_path: Path) -> None:
    def sink(folder: Path) -> list[str]:
        print("reading", flush=True)
        assert folder == Path.cwd()
        return [os.environ[FOLDER]]

    assert count_rows(sink, tmp_path, tmp_path / "log.txt", []) == {f'"{tmp_path}"': 1}
    assert "reading" in (tmp_path / "log.txt").read_text()
    assert Path.cwd() != tmp_path


def test_an_error_of_the_sink_is_raised_and_logged(tmp_path: Path) -> None:
    def sink(folder: Path) -> list[str]:
        raise KeyError("table")

    with pytest.raises(ForkError, match="KeyError: 'table'"):
        count_rows(sink, tmp_path, tmp_path / "log.txt", [])
    assert "Traceback" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("sink", "text"),
    [
        (lambda folder: [object()], "holds object, which is no JSON value"),
        (lambda folder: os._exit(3), "died"),
    ],
)
def test_a_sink_without_json_rows_is_rejected(tmp_path, sink, text):
    with pytest.raises(ForkError, match=text):
        count_rows(sink, tmp_path, tmp_path / "log.txt", [])


def test_a_sink_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "rows").touch()
    prepare(lambda folder: (folder / "rows").unlink(), tmp_path, tmp_path / "log.txt")
    assert not (tmp_path / "rows").exists()
    with pytest.raises(ForkError, match="FileNotFoundError"):
        prepare(lambda folder: (folder / "rows").unlink(), tmp_path, tmp_path / "log.txt")
