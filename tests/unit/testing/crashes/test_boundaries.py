"""Files, statements and sockets are seen, and struck, where the pipeline touches them."""

from __future__ import annotations

import os
import socket
import sqlite3
from pathlib import Path

import pytest

from airflow_broadway.testing.crashes.boundaries import LocalFiles, Sockets, Sqlite
from tests.unit.testing.crashes.struck import Died, calls, striking


def test_files_below_the_folder_are_seen_and_others_are_not(tmp_path: Path) -> None:
    inside = tmp_path / "work"
    inside.mkdir()
    interceptor = striking()
    LocalFiles(inside).install(interceptor)

    (inside / "sub").mkdir()
    (inside / "sub" / "a.txt").write_text("hello")
    os.replace(inside / "sub" / "a.txt", inside / "b.txt")
    assert (inside / "b.txt").read_text() == "hello"
    os.listdir(inside / "sub")
    (inside / "b.txt").unlink()
    (tmp_path / "elsewhere.txt").write_text("not the pipeline's")

    assert calls(interceptor) == [
        "mkdir sub #1",
        "create sub/a.txt #1",
        "replace b.txt #1",
        "read b.txt #1",
        "list sub #1",
        "remove b.txt #1",
    ]


def test_half_of_a_synced_file_is_half_of_its_bytes(tmp_path: Path) -> None:
    LocalFiles(tmp_path).install(striking("write a.txt #1: killed halfway"))

    with open(tmp_path / "a.txt", "w") as file:
        file.write("12345678")
        file.flush()
        with pytest.raises(Died):
            os.fsync(file.fileno())
    assert (tmp_path / "a.txt").read_text() == "1234"


def test_a_full_disk_makes_no_file(tmp_path: Path) -> None:
    LocalFiles(tmp_path).install(striking("create a.txt #1: disk full"))

    with pytest.raises(OSError, match="No space left"):
        (tmp_path / "a.txt").write_text("")
    assert not (tmp_path / "a.txt").exists()


def test_statements_and_commits_are_seen(tmp_path: Path) -> None:
    interceptor = striking()
    Sqlite().install(interceptor)

    db = sqlite3.connect(tmp_path / "rows.db")
    with db:
        db.execute("CREATE TABLE IF NOT EXISTS rows (n)")
        db.executemany("INSERT INTO rows VALUES (?)", [(1,), (2,)])
    assert db.cursor().execute("SELECT n FROM rows").fetchall() == [(1,), (2,)]
    db.close()

    assert calls(interceptor) == [
        "CREATE rows #1",
        "INSERT rows #1",
        "COMMIT #1",
        "SELECT rows #1",
    ]


def test_who_dies_before_its_commit_has_changed_nothing(tmp_path: Path) -> None:
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


def test_what_is_sent_is_seen_and_may_be_sent_by_half() -> None:
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


def test_connecting_is_seen_with_its_address_and_refused_when_struck() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        Sockets().install(striking(f"connect 127.0.0.1:{port} #1: error"))
        with pytest.raises(ConnectionResetError):
            socket.create_connection(("127.0.0.1", port))
        socket.create_connection(("127.0.0.1", port)).close()
