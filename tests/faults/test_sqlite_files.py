"""Unusable queue files raise one clear error and lose no message."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue


def open_calls(path: Path) -> list[Callable[[], object]]:
    """Returns functions that open the file."""
    queue = SqliteQueue(path, "q", busy_timeout=0.1)
    producer = SqliteProducer(queue="q", path=str(path), busy_timeout=0.1)
    return [
        lambda: queue.send([b"x"]),
        lambda: queue.receive("g", 1),
        lambda: queue.renew("g", 1.0),
        lambda: queue.settle("g", Settlement(rest=ACK)),
        queue.depth,
        queue.dead_letters,
        lambda: producer.source(ProducerEnv()),
    ]


def check_all_raise(path: Path, kind: type[ProducerError], *texts: str) -> None:
    for call in open_calls(path):
        with pytest.raises(ProducerError) as error:
            call()
        assert type(error.value) is kind
        for text in (str(path), *texts):
            assert text in str(error.value)


def missing_folder(folder: Path) -> Path:
    return folder / "missing" / "q.db"


def file_as_folder(folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file" / "q.db"


def not_a_database(folder: Path) -> Path:
    (folder / "q.db").write_bytes(b"these are not the messages you are looking for" * 100)
    return folder / "q.db"


def airflow_database(folder: Path) -> Path:
    with closing(sqlite3.connect(folder / "airflow.db")) as db:
        db.execute("CREATE TABLE dag (id)")
    return folder / "airflow.db"


def newer_schema(folder: Path) -> Path:
    with SqliteQueue(folder / "q.db", "q") as queue:
        queue.send([b"x"])
    with closing(sqlite3.connect(folder / "q.db")) as db:
        db.execute("PRAGMA user_version = 2")
    return folder / "q.db"


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (missing_folder, ["does not exist; make it, or correct the path"]),
        (lambda folder: folder, ["is a folder: name a file in it"]),
        (file_as_folder, ["the folder", "does not exist"]),
        (not_a_database, ["is not a database: correct the path"]),
        (airflow_database, ["is another application's database"]),
        (newer_schema, ["has schema 2", "knows schema 1: upgrade it here"]),
    ],
    ids=["missing folder", "folder", "file as folder", "no database", "Airflow's", "newer schema"],
)
def test_an_unusable_file_is_one_clear_error(tmp_path, make, texts):
    path = make(tmp_path)
    before = path.read_bytes() if path.is_file() else path.parent.exists()

    check_all_raise(path, ProducerError, *texts)

    assert before == (path.read_bytes() if path.is_file() else path.parent.exists())


def test_a_damaged_file(tmp_path):
    path = tmp_path / "q.db"
    with SqliteQueue(path, "q") as queue:
        queue.send([b"x" * 500] * 100)
    content = bytearray(path.read_bytes())
    content[4096 : 4096 * 12] = os.urandom(4096 * 11)
    path.write_bytes(content)

    with pytest.raises(ProducerError, match="is damaged"):
        SqliteQueue(path, "q").receive("g", 100)


def test_a_file_locked_by_another_process(tmp_path):
    path = tmp_path / "q.db"
    with SqliteQueue(path, "q", busy_timeout=0.1) as queue:
        queue.send([b"x"])
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")

        for call in (lambda: queue.send([b"y"]), lambda: queue.receive("g", 1)):
            with pytest.raises(ProducerUnavailable, match=r"locked by another process for 0\.1 s"):
                call()
        assert queue.depth().ready == 1  # reading needs no lock

        holder.execute("ROLLBACK")
        holder.close()
        assert len(queue.receive("g", 1)) == 1


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc, which is read-only")
def test_a_read_only_folder(tmp_path):
    path = Path("/proc/q.db")

    with pytest.raises(ProducerError) as error:
        SqliteQueue(path, "q").send([b"x"])

    assert "/proc/q.db cannot be written" in str(error.value)
    assert "let this user write both the file and its folder /proc" in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_without_permission(tmp_path):
    path = tmp_path / "q.db"
    with SqliteQueue(path, "q") as queue:
        queue.send([b"x"])
    path.chmod(0o444)

    with pytest.raises(ProducerError, match="cannot be written"):
        SqliteQueue(path, "q").send([b"y"])


def test_a_full_disk_changes_nothing(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)]
    mounted = shutil.which("mount") and subprocess.run(command, check=False, capture_output=True)
    if not mounted or mounted.returncode:
        pytest.skip("this user cannot mount a small disk")
    try:
        with SqliteQueue(mount / "q.db", "q") as queue:
            queue.send([b"kept"])
            with pytest.raises(ProducerUnavailable, match="no room is left"):
                queue.send([b"x" * 100_000] * 50)

            assert queue.depth().ready == 1
            assert [message.data for message in queue.receive("g", 5)] == [b"kept"]
            assert queue.settle("g", Settlement(rest=ACK)).acked == 1
    finally:
        subprocess.run(["umount", str(mount)], check=True)
