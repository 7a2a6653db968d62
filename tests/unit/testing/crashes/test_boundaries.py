"""Calls on files, databases and sockets are intercepted and can fail."""

from __future__ import annotations

import os
import socket
import sqlite3

import pytest

from airflow_broadway.testing.crashes.boundaries import LocalFiles, Sockets, Sqlite
from tests.unit.testing.crashes.struck import Died, calls, striking


def test_only_files_in_the_folder_are_intercepted(tmp_path):
    inside = tmp_path / "work"
    inside.mkdir()
    interceptor = striking()
    LocalFiles(inside).install(interceptor)

    sub, moved = inside / "sub", inside / "b.txt"
    sub.mkdir()
    (sub / "a.txt").write_text("hello")
    os.replace(sub / "a.txt", moved)
    assert moved.read_text() == "hello"
    os.listdir(sub)
    moved.unlink()
    (tmp_path / "outside.txt").write_text("")

    assert calls(interceptor) == [
        "mkdir sub #1",
        "create sub/a.txt #1",
        "replace b.txt #1",
        "read b.txt #1",
        "list sub #1",
        "remove b.txt #1",
    ]


def test_half_of_a_synced_file_is_half_of_its_bytes(tmp_path):
    LocalFiles(tmp_path).install(striking("write a.txt #1: killed halfway"))

    with open(tmp_path / "a.txt", "w") as file:
        file.write("12345678")
        file.flush()
        with pytest.raises(Died):
            os.fsync(file.fileno())
    assert (tmp_path / "a.txt").read_text() == "1234"


def test_full_disk_creates_no_file(tmp_path):
    LocalFiles(tmp_path).install(striking("create a.txt #1: disk full"))

    with pytest.raises(OSError, match="No space left"):
        (tmp_path / "a.txt").write_text("")
    assert not (tmp_path / "a.txt").exists()


def test_statements_and_commits_are_intercepted(tmp_path):
    interceptor = striking()
    Sqlite().install(interceptor)

    db = sqlite3.connect(tmp_path / "rows.db")
    with db:
        db.execute("CREATE TABLE IF NOT EXISTS rows (n)")
        db.executemany("INSERT INTO rows VALUES (?)", [(1,), (2,)])
    assert db.cursor().execute("SELECT n FROM rows").fetchall() == [(1,), (2,)]
    db.close()

    assert calls(interceptor) == ["CREATE rows #1", "INSERT rows #1", "COMMIT #1", "SELECT rows #1"]


def test_crash_before_commit_changes_nothing(tmp_path):
    with sqlite3.connect(tmp_path / "rows.db") as db:
        db.execute("CREATE TABLE rows (n)")
    db.close()
    Sqlite().install(striking("COMMIT #1: killed before"))

    db = sqlite3.connect(tmp_path / "rows.db")
    db.execute("INSERT INTO rows VALUES (1)")
    with pytest.raises(Died):
        db.commit()
    db.close()  # as the system does
    assert sqlite3.connect(tmp_path / "rows.db").execute("SELECT * FROM rows").fetchall() == []


def test_sends_are_intercepted_and_can_be_halved():
    interceptor = striking("send #2: killed halfway")
    Sockets().install(interceptor)
    here, there = socket.socketpair()

    here.sendall(b"whole")
    with pytest.raises(Died):
        here.sendall(b"12345678")
    here.close()
    assert there.recv(100) + there.recv(100) == b"whole1234"
    there.close()
    assert calls(interceptor) == ["send #1", "send #2"]


def test_connects_are_intercepted_and_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        Sockets().install(striking(f"connect 127.0.0.1:{port} #1: error"))
        with pytest.raises(ConnectionResetError):
            socket.create_connection(("127.0.0.1", port))
        socket.create_connection(("127.0.0.1", port)).close()
