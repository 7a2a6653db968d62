"""A sink is read and emptied by the user's functions in other processes."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.testing.crashes.sink import ForkError, prepare, rows_of
from airflow_broadway.testing.crashes.subject import FOLDER


def read(tmp_path: Path, rows: Any, ids: tuple[str, ...] = ()) -> Counter[str]:
    return rows_of(lambda folder: rows, tmp_path, tmp_path / "log.txt", ids)


def test_equal_rows_are_counted(tmp_path):
    rows = [{"b": 1, "a": 2}, {"a": 2, "b": 1}, 3]
    assert read(tmp_path, rows) == {'{"a": 2, "b": 1}': 2, "3": 1}


def test_message_ids_become_numbers(tmp_path):
    rows = ["tag-1", {"id": "tag-12", "file": "tag-2.json"}]
    assert read(tmp_path, rows, ("tag-1", "tag-2", "tag-12")) == {
        '"<message 1>"': 1,
        '{"file": "<message 2>.json", "id": "<message 3>"}': 1,
    }


def test_database_values_are_read(tmp_path):
    db = sqlite3.connect(":memory:")
    db.row_factory = sqlite3.Row
    row = db.execute("SELECT 1 AS n").fetchone()
    rows = [row, Decimal("1.50"), date(2026, 1, 2), {3, 1}]
    assert list(read(tmp_path, rows)) == ['{"n": 1}', '"1.50"', '"2026-01-02"', "[1, 3]"]


def test_sink_runs_in_the_case_folder_and_its_output_is_logged(tmp_path):
    def sink(folder):
        print("reading", flush=True)
        assert folder == Path.cwd()
        return [os.environ[FOLDER]]

    assert rows_of(sink, tmp_path, tmp_path / "log.txt", []) == {f'"{tmp_path}"': 1}
    assert "reading" in (tmp_path / "log.txt").read_text()
    assert Path.cwd() != tmp_path


def test_error_of_the_sink_is_reported_and_logged(tmp_path):
    def sink(folder):
        raise KeyError("table")

    with pytest.raises(ForkError, match="KeyError: 'table'"):
        rows_of(sink, tmp_path, tmp_path / "log.txt", [])
    assert "Traceback" in (tmp_path / "log.txt").read_text()


def test_value_without_json_form_is_refused(tmp_path):
    with pytest.raises(SinkError, match="holds object, which is no JSON value"):
        read(tmp_path, [object()])


def test_dead_sink_process_is_reported(tmp_path):
    with pytest.raises(SinkError, match="died"):
        rows_of(lambda folder: os._exit(3), tmp_path, tmp_path / "log.txt", [])


def test_sink_is_emptied(tmp_path):
    (tmp_path / "rows").touch()
    prepare(lambda folder: (folder / "rows").unlink(), tmp_path, tmp_path / "log.txt")
    assert not (tmp_path / "rows").exists()
    with pytest.raises(ForkError, match="FileNotFoundError"):
        prepare(lambda folder: (folder / "rows").unlink(), tmp_path, tmp_path / "log.txt")
