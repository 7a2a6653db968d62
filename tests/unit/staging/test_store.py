from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.memory import MemoryFileSystem

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import TEMPORARY, LocalFiles
from airflow_broadway.runs.poison.child_process import ChildProcess
from airflow_broadway.staging.errors import cannot
from airflow_broadway.staging.run_folder import iter_unsettled
from airflow_broadway.staging.settling.journal import record_settled
from airflow_broadway.staging.store import Folder, Store
from tests.unit.staging.kit import open_generation, open_run


@pytest.fixture(params=["file", "memory", "driver"])
def folder(request, tmp_path):
    """Folders on the file systems without a server, and that of a Spark driver."""
    if request.param == "driver":
        yield LocalFiles(tmp_path)
        return
    uri = f"file://{tmp_path}/root" if request.param == "file" else f"memory://{tmp_path.name}"
    yield Store.open(uri).folder("p/d/r")
    Store.open("memory://").fs.store.clear()


def left_over(root: Path) -> list[str]:
    return [str(path) for path in root.rglob(f"{TEMPORARY}*")]


def test_file_is_created_once_and_the_first_text_stands(folder):
    assert folder.create("a/b.json", "first")
    assert not folder.create("a/b.json", "second")
    assert folder.read("a/b.json") == "first"


def test_replacing_a_file_leaves_the_last_text(folder):
    folder.replace("a.json", "first")
    folder.replace("a.json", "sécond")
    assert folder.read("a.json") == "sécond"


def test_lines_round_trip(folder):
    lines = ["", "a\u2028b", '{"x": 1}', "é"]
    assert folder.write_lines("a.jsonl", iter(lines)) == 4
    assert list(folder.lines("a.jsonl")) == lines


def test_missing_folder_lists_nothing_and_has_no_files(folder):
    assert folder.list("nowhere") == []
    assert not folder.exists("nowhere/x")
    with pytest.raises(FileNotFoundError):
        folder.read("nowhere/x")
    with pytest.raises(FileNotFoundError):
        list(folder.lines("nowhere/x"))


def test_names_are_listed_in_order(folder):
    for name in ("b", "a", "c"):
        folder.create(f"x/{name}", "")
    assert folder.list("x") == ["a", "b", "c"]


def test_failed_stream_leaves_no_file(folder):
    def lines():
        yield "one"
        raise RuntimeError("halfway")

    with pytest.raises((StagingError, RuntimeError), match="halfway"):
        folder.write_lines("a.jsonl", lines())
    assert folder.list("") == []


@pytest.mark.parametrize("folder", ["file", "memory"], indirect=True)
def test_folder_may_be_removed_twice(folder):
    folder.create("x/y/z", "")
    folder.remove_all()
    folder.remove_all()
    assert folder.list("x/y") == []


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a\\b", "a\0b"])
def test_no_path_leads_out_of_the_folder(folder, tmp_path, path):
    (tmp_path.parent / "x").write_text("another's")
    writes = [(folder.create, "text"), (folder.replace, "text"), (folder.write_lines, ["text"])]
    calls: list[Any] = [folder.read, folder.exists, folder.list, lambda p: list(folder.lines(p))]
    calls += [partial(lambda write, text, p: write(p, text), *write) for write in writes]
    for call in calls:
        with pytest.raises(StagingError, match="is no path below"):
            call(path)
    assert (tmp_path.parent / "x").read_text() == "another's"


@pytest.mark.parametrize("folder", ["file", "driver"], indirect=True)
def test_symbolic_link_out_of_the_root_is_refused(folder, tmp_path):
    # Given links to a file and to a folder elsewhere, and one to a file inside
    folder.create("own", "text")
    [own] = tmp_path.rglob("own")
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret").write_text("hidden")
    (own.parent / "file").symlink_to(elsewhere / "secret")
    (own.parent / "folder").symlink_to(elsewhere)
    (own.parent / "inside").symlink_to("own")

    for path in ("file", "folder/secret"):
        for read in (folder.read, lambda path: list(folder.lines(path))):
            with pytest.raises(StagingError, match=r"leads out of .*: remove the link") as raised:
                read(path)
            assert "hidden" not in str(raised.value)
    assert folder.read("inside") == "text"


@pytest.mark.parametrize("folder", ["file", "driver"], indirect=True)
def test_planted_pipe_blocks_no_read(folder, tmp_path):
    folder.create("own", "text")
    [own] = tmp_path.rglob("own")
    os.mkfifo(own.parent / "pipe")

    for read in (folder.read, lambda path: list(folder.lines(path))):
        with pytest.raises(StagingError, match="is no regular file: remove it"):
            read("pipe")


def test_root_may_be_a_symbolic_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "disk")
    roots: list[Any] = [Store.open(f"file://{tmp_path}/mounted").folder("p")]
    roots.append(LocalFiles(tmp_path / "mounted/p"))
    for root in roots:
        root.replace("a", "text")
        assert root.read("a") == "text"


@pytest.mark.parametrize("folder", ["file", "driver"], indirect=True)
def test_one_of_many_concurrent_writers_creates_the_file(folder, tmp_path):
    start, won = threading.Barrier(8), []

    def write(number):
        start.wait()
        if folder.create("x.json", str(number) * 1000):
            won.append(str(number) * 1000)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(won) == 1
    assert folder.read("x.json") == won[0]
    assert left_over(tmp_path) == []


# --------------------------------------------------------------------------------------------------
# Roots
# --------------------------------------------------------------------------------------------------


def test_root_keeps_its_id(tmp_path):
    first, second = (Store.open(f"file://{tmp_path}") for _ in range(2))
    assert first.root_id() == second.root_id()
    first.check_root(second.root_id(), "here")


def test_root_of_another_host_is_refused_with_both_hosts(tmp_path, monkeypatch):
    # Given one path that is another disk on each of two hosts
    monkeypatch.setattr("airflow_broadway.staging.store.host_name", lambda: "worker-1")
    first_id = Store.open(f"file://{tmp_path}/disk-1").root_id()
    monkeypatch.setattr("airflow_broadway.staging.store.host_name", lambda: "worker-2")
    second = Store.open(f"file://{tmp_path}/disk-2")

    # When the second finds a file of the first
    with pytest.raises(StagingError) as caught:
        second.check_root(first_id, "worker-1")

    # Then the error names both and the setting
    for part in ("'worker-1'", "'worker-2'", "`[broadway] staging`", first_id, second.root_id()):
        assert part in str(caught.value)


def test_root_without_parent_is_not_created(tmp_path):
    with pytest.raises(StagingError, match=r"mnt/lake does not exist; mount or create it"):
        Store.open(f"file://{tmp_path}/mnt/lake/staging").folder("f").create("x", "")
    assert list(tmp_path.iterdir()) == []


def test_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StagingError, match=r"is a file; set `\[broadway\] staging`"):
        Store.open(f"file://{tmp_path}/file").root_id()


def test_root_with_a_foreign_root_file_is_refused(tmp_path):
    (tmp_path / ".broadway-root.json").write_text("[]")
    with pytest.raises(StagingError, match="not a file of airflow-broadway"):
        Store.open(f"file://{tmp_path}").root_id()


def test_relative_root_is_refused():
    with pytest.raises(StagingError, match="not an absolute path"):
        Store.open("staging")


def test_unknown_scheme_is_refused():
    with pytest.raises(StagingError, match="nosuch"):
        Store.open("nosuch://x/y")


def test_vanished_root_is_not_recreated_without_its_parent(tmp_path):
    parent = tmp_path / "mount"
    parent.mkdir()
    folder = Store.open(f"file://{parent}/root").folder("f")
    folder.create("a", "")
    (parent / "root").rename(tmp_path / "elsewhere")
    parent.rmdir()
    with pytest.raises(StagingError, match="does not exist"):
        folder.create("g/b", "")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space is left on its disk; free space there"),
        (errno.EDQUOT, "the disk quota of its user is used up; free space"),
        (errno.EROFS, "its file system is read-only; set"),
        (errno.EACCES, "is not allowed to; change its owner or mode"),
        (errno.ENOENT, "the folder does not exist; mount or create it"),
        (errno.EIO, r"Input/output error; check `\[broadway\] staging`"),
    ],
)
def test_disk_error_names_path_cause_and_cure(tmp_path, monkeypatch, number, words):
    folder = Store.open(f"file://{tmp_path}").folder("f")
    folder.create("x.json", "")

    monkeypatch.setattr("os.fsync", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    writes: list[Callable[[str, str], object]] = [folder.create, folder.replace]
    writes.append(lambda path, text: folder.write_lines(path, [text]))
    for write in writes:
        with pytest.raises(StagingError, match=rf"cannot write y.json in .*{tmp_path}: .*{words}"):
            write("y.json", "text")
    assert folder.list("") == ["x.json"]
    assert left_over(tmp_path) == []


def test_disk_without_hard_links_is_refused_with_the_cure(tmp_path, monkeypatch):
    folder = Store.open(f"file://{tmp_path}").folder("f")
    folder.store.root_id()

    monkeypatch.setattr("os.link", mock.Mock(side_effect=OSError(errno.ENOTSUP, "no")))
    with pytest.raises(StagingError, match="has no hard links"):
        folder.create("x", "")
    assert folder.list("") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StagingError, match="is not allowed to"):
        Store.open(f"file://{tmp_path}").root_id()


# --------------------------------------------------------------------------------------------------
# Addresses
# --------------------------------------------------------------------------------------------------


class _Fs:
    protocol = ("s3", "s3a")


@pytest.mark.parametrize(
    ("uri", "spark"),
    [
        ("s3://bucket/staging", "s3a://bucket/staging/p"),
        ("s3://aws_default@bucket/staging/", "s3a://bucket/staging/p"),
        ("gs://google@bucket/staging", "gs://bucket/staging/p"),
        ("abfs://container@account.dfs.core.windows.net/x", None),
        ("abfs://azure@container/x", "abfs://container/x/p"),
    ],
)
def test_spark_gets_the_scheme_of_its_file_system(uri, spark):
    assert Store(_Fs(), "bucket/staging", uri).spark_uri("p") == (spark or f"{uri}/p")


def test_spark_gets_three_slashes_for_a_disk(tmp_path):
    assert Store.open(str(tmp_path)).spark_uri() == f"file://{tmp_path}"
    assert Store.open(f"file://{tmp_path}").folder("a").spark_uri("b") == f"file://{tmp_path}/a/b"


def test_root_file_names_host_and_time(tmp_path):
    Store.open(f"file://{tmp_path}").root_id()
    document = json.loads((tmp_path / ".broadway-root.json").read_text())
    assert set(document) == {"version", "id", "host", "created_at"}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_staged_files_are_private(tmp_path, umask):
    before = os.umask(umask)
    try:
        folder = Store.open(f"file://{tmp_path}/root").folder("p/d")
        folder.create("x/a.json", "")
        folder.replace("x/b.json", "")
        folder.write_lines("x/c.jsonl", ["1"])
    finally:
        os.umask(before)
    assert modes(tmp_path / "root") == {0o700, 0o600}


def test_existing_root_keeps_its_mode_and_new_files_are_private(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o755)
    (root / "old").mkdir(0o755)
    Store.open(f"file://{root}").folder("old/new").create("a.json", "")
    assert [path.stat().st_mode & 0o7777 for path in (root, root / "old")] == [0o755] * 2
    assert modes(root / "old" / "new") == {0o700, 0o600}


def test_setgid_root_is_shared_with_its_group(tmp_path):
    # Given a root that its owner shares with the group of the Spark driver's user
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o2770)
    before = os.umask(0o077)
    try:
        folder = Store.open(f"file://{root}").folder("p/d")
        folder.create("x/a.json", "")
        folder.write_lines("x/c.jsonl", ["1"])
    finally:
        os.umask(before)
    assert modes(root) == {0o2770, 0o660}


def modes(root: Path) -> set[int]:
    return {path.stat().st_mode & 0o7777 for path in (root, *root.rglob("*"))}


@pytest.mark.parametrize(
    ("uri", "doing", "text"),
    [
        (
            "s3://aws_default@lake/staging",
            "write x.json",
            "connection 'aws_default', bucket 'lake'); allow it s3:PutObject there",
        ),
        ("s3://lake/staging", "remove x", "of this process, bucket 'lake'); allow it s3:Delete"),
        ("gs://g@lake", "read x", "connection 'g', bucket 'lake'); allow it this"),
        ("file:///data", "read x", "change its owner or mode"),
    ],
)
def test_permission_error_names_the_principal_and_the_right(uri, doing, text):
    assert text in str(cannot(doing, uri, PermissionError("Access Denied")))


def test_settlement_succeeds_without_delete_permission(tmp_path, caplog, monkeypatch):
    run = open_run(tmp_path)
    record = open_generation(run)

    def refuse(folder, *paths):
        raise cannot(f"remove {paths[0]}", "s3://lake", PermissionError("Access Denied"))

    monkeypatch.setattr(Folder, "remove", refuse)
    record_settled(run, record, SettleReport(acked=1))
    run.forget_open(record.generation)
    assert run.state(record.generation) == "settled"
    assert list(iter_unsettled(run.store, "Pipeline", "dag")) == []
    assert "are complete but stay on the list" in caplog.text


def test_fork_has_its_own_client(tmp_path):
    # Given a bucket whose client may be used only by the process that created it
    fs = AsyncFileSystemWrapper(MemoryFileSystem(), asynchronous=False)
    folder = Store(fs, f"/{tmp_path.name}", f"memory://{tmp_path.name}").folder("p/d/r")
    folder.create("a.json", "text")
    assert folder.list("") == ["a.json"]

    # When a fork looks at it, then it sees the same
    apart = ChildProcess(lambda: (tmp_path / "seen").write_text(folder.read("a.json")))
    assert (apart.wait(), apart.raised) == ("", "")
    assert (tmp_path / "seen").read_text() == "text"
    # And this process goes on with its own
    assert folder.read("a.json") == "text"
    MemoryFileSystem.store.clear()
