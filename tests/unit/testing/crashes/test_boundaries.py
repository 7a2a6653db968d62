"""Calls of files, SQLite and sockets are intercepted, and faults are injected into them."""

from __future__ import annotations

import os
import socket
import sqlite3
from pathlib import Path

import pytest

from airflow_broadway.testing.crashes.boundaries import LocalFiles, Sockets, Sqlite
from tests.unit.testing.crashes.injection import Died, inject, observed_calls


def test_only_files_below_the_folder_are_intercepted(tmp_path: Path) -> None:
    inside = tmp_path / "work"
    inside.mkdir()
    interceptor = inject()
    LocalFiles(inside).install(interceptor)

    (inside / "sub").mkdir()
    (inside / "sub" / "a.txt").write_text("hello")
    os.replace(inside / "sub" / "a.txt", inside / "b.txt")
    assert (inside / "b.txt").read_text() == "hello"
    os.listdir(inside / "sub")
    (inside / "b.txt").unlink()
    (tmp_path / "elsewhere.txt").write_text("not the pipeline's")

    assert observed_calls(interceptor) == [
        "mkdir sub #1",
        "create sub/a.txt #1",
        "replace b.txt #1",
        "read b.txt #1",
        "list sub #1",
        "remove b.txt #1",
    ]


def test_half_of_a_synced_file_is_half_of_its_bytes(tmp_path: Path) -> None:
    LocalFiles(tmp_path).install(inject("write a.txt #1: killed halfway"))

    with open(tmp_path / "a.txt", "w") as file:
        file.write("12345678")
        file.flush()
        with pytest.raises(Died):
            os.fsync(file.fileno())
    assert (tmp_path / "a.txt").read_text() == "1234"


def test_a_full_disk_creates_no_file(tmp_path: Path) -> None:
    LocalFiles(tmp_path).install(inject("create a.txt #1: disk full"))

    with pytest.raises(OSError, match="No space left"):
        (tmp_path / "a.txt").write_text("")
    assert not (tmp_path / "a.txt").exists()


def test_statements_and_commits_are_intercepted(tmp_path: Path) -> None:
    interceptor = inject()
    Sqlite().install(interceptor)

    db = sqlite3.connect(tmp_path / "rows.db")
    with db:
        db.execute("CREATE TABLE IF NOT EXISTS rows (n)")
        db.executemany("INSERT INTO rows VALUES (?)", [(1,), (2,)])
    assert db.cursor().execute("SELECT n FROM rows").fetchall() == [(1,), (2,)]
    db.close()

    assert observed_calls(interceptor) == [
        "CREATE rows #1",
        "INSERT rows #1",
        "COMMIT #1",
        "SELECT rows #1",
    ]


def test_a_kill_before_the_commit_changes_nothing(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "rows.db") as db:
        db.execute("CREATE TABLE rows (n)")
    db.close()
    Sqlite().install(inject("COMMIT #1: killed before"))

    db = sqlite3.connect(tmp_path / "rows.db")
    db.execute("INSERT INTO rows VALUES (1)")
    with pytest.raises(Died):
        db.commit()
    db.close()  # as the operating system does
    assert sqlite3.connect(tmp_path / "rows.db").execute("SELECT * FROM rows").fetchall() == []


def test_sends_are_intercepted_and_can_be_halved() -> None:
    interceptor = inject("send #2: killed halfway")
    Sockets().install(interceptor)
    local, remote = socket.socketpair()

    local.sendall(b"whole")
    with pytest.raises(Died):
        local.sendall(b"12345678")
    local.close()
    assert remote.recv(100) + remote.recv(100) == b"whole1234"
    remote.close()
    assert observed_calls(interceptor) == ["send #1", "send #2"]


def test_connects_are_intercepted_and_can_fail() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        Sockets().install(inject(f"connect 127.0.0.1:{port} #1: error"))
        with pytest.raises(ConnectionResetError):
            socket.create_connection(("127.0.0.1", port))
        socket.create_connection(("127.0.0.1", port)).close()
