from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A folder on each kind of file system that needs no server, and that of a Spark driver."""
    if request.param == "driver":
        yield LocalFiles(tmp_path)
        return
    uri = f"file://{tmp_path}/root" if request.param == "file" else f"memory://{tmp_path.name}"
    yield Store.open(uri).folder("p/d/r")
    Store.open("memory://").fs.store.clear()


def left_over(root: Path) -> list[str]:
    return [str(path) for path in root.rglob(f"{TEMPORARY}*")]


def test_a_file_is_created_once_and_the_first_text_stands(folder: Folder) -> None:
    assert folder.create("a/b.json", "first")
    assert not folder.create("a/b.json", "second")
    assert folder.read("a/b.json") == "first"


def test_replacing_a_file_leaves_the_last_text(folder: Folder) -> None:
    folder.replace("a.json", "first")
    folder.replace("a.json", "sécond")
    assert folder.read("a.json") == "sécond"


def test_lines_come_back_as_they_were_written(folder: Folder) -> None:
    lines = ["", "a\u2028b", '{"x": 1}', "é"]
    assert folder.write_lines("a.jsonl", iter(lines)) == 4
    assert list(folder.lines("a.jsonl")) == lines


def test_a_folder_that_is_not_there_lists_nothing_and_its_files_are_not_found(
    folder: Folder,
) -> None:
    assert folder.list("nowhere") == []
    assert not folder.exists("nowhere/x")
    with pytest.raises(FileNotFoundError):
        folder.read("nowhere/x")
    with pytest.raises(FileNotFoundError):
        list(folder.lines("nowhere/x"))


def test_names_are_listed_in_order(folder: Folder) -> None:
    for name in ("b", "a", "c"):
        folder.create(f"x/{name}", "")
    assert folder.list("x") == ["a", "b", "c"]


def test_a_stream_that_fails_leaves_no_file(folder: Folder) -> None:
    def lines() -> Iterator[str]:
        yield "one"
        raise RuntimeError("halfway")

    with pytest.raises((StagingError, RuntimeError), match="halfway"):
        folder.write_lines("a.jsonl", lines())
    assert folder.list("") == []


@pytest.mark.parametrize("folder", ["file", "memory"], indirect=True)
def test_a_removed_folder_is_gone_and_may_be_removed_again(folder: Folder) -> None:
    folder.create("x/y/z", "")
    folder.remove_all()
    folder.remove_all()
    assert folder.list("x/y") == []


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a\\b", "a\0b"])
def test_no_path_leads_out_of_the_folder(folder: Folder, tmp_path: Path, path: str) -> None:
    (tmp_path.parent / "x").write_text("another's")
    asked: list[Callable[[], object]] = [
        lambda: folder.read(path),
        lambda: folder.exists(path),
        lambda: folder.list(path),
        lambda: folder.create(path, "text"),
        lambda: folder.replace(path, "text"),
        lambda: folder.write_lines(path, ["text"]),
        lambda: list(folder.lines(path)),
    ]
    for ask in asked:
        with pytest.raises(StagingError, match="is no path below"):
            ask()
    assert (tmp_path.parent / "x").read_text() == "another's"


@pytest.mark.parametrize("folder", ["file", "driver"], indirect=True)
def test_a_planted_symbolic_link_is_not_followed_out_of_the_root(
    folder: Folder, tmp_path: Path
) -> None:
    # Given links of a file and of a folder that lie elsewhere, and one of a file inside
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
def test_a_planted_pipe_blocks_no_read(folder: Folder, tmp_path: Path) -> None:
    folder.create("own", "text")
    [own] = tmp_path.rglob("own")
    os.mkfifo(own.parent / "pipe")

    for read in (folder.read, lambda path: list(folder.lines(path))):
        with pytest.raises(StagingError, match="is no regular file: remove it"):
            read("pipe")


def test_a_root_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "disk")
    roots: list[Any] = [Store.open(f"file://{tmp_path}/mounted").folder("p")]
    roots.append(LocalFiles(tmp_path / "mounted/p"))
    for root in roots:
        root.replace("a", "text")
        assert root.read("a") == "text"


@pytest.mark.parametrize("folder", ["file", "driver"], indirect=True)
def test_of_many_writers_at_once_exactly_one_creates_the_file(
    folder: Folder, tmp_path: Path
) -> None:
    start, won = threading.Barrier(8), []

    def write(number: int) -> None:
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


def test_the_root_keeps_its_id(tmp_path: Path) -> None:
    first, second = (Store.open(f"file://{tmp_path}") for _ in range(2))
    assert first.root_id() == second.root_id()
    first.check_root(second.root_id(), "here")


def test_another_hosts_root_is_refused_with_both_hosts_and_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given one path that is another disk on each of two hosts
    monkeypatch.setattr("airflow_broadway.staging.store.host_name", lambda: "worker-1")
    first = Store.open(f"file://{tmp_path}/disk-1")
    first_id = first.root_id()
    monkeypatch.setattr("airflow_broadway.staging.store.host_name", lambda: "worker-2")
    second = Store.open(f"file://{tmp_path}/disk-2")

    # When the second meets what the first wrote
    with pytest.raises(StagingError) as caught:
        second.check_root(first_id, "worker-1")

    # Then the error names both and the setting
    for part in ("'worker-1'", "'worker-2'", "`[broadway] staging`", first_id, second.root_id()):
        assert part in str(caught.value)


def test_a_root_whose_parent_is_missing_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match=r"mnt/lake does not exist; mount or create it"):
        Store.open(f"file://{tmp_path}/mnt/lake/staging").folder("f").create("x", "")
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StagingError, match=r"is a file; set `\[broadway\] staging`"):
        Store.open(f"file://{tmp_path}/file").root_id()


def test_a_root_that_holds_a_foreign_file_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".broadway-root.json").write_text("[]")
    with pytest.raises(StagingError, match="not a file of airflow-broadway"):
        Store.open(f"file://{tmp_path}").root_id()


def test_a_relative_root_is_refused() -> None:
    with pytest.raises(StagingError, match="not an absolute path"):
        Store.open("staging")


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(StagingError, match="nosuch"):
        Store.open("nosuch://x/y")


def test_a_root_that_vanished_in_mid_run_is_not_made_anew_without_its_parent(
    tmp_path: Path,
) -> None:
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
        (errno.EIO, r"Input/output error; check `\[broadway\] staging`"),
    ],
)
def test_an_error_of_the_disk_names_the_path_the_cause_and_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    folder = Store.open(f"file://{tmp_path}").folder("f")
    folder.create("x.json", "")

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", refuse)
    writes: list[Callable[[str, str], object]] = [folder.create, folder.replace]
    writes.append(lambda path, text: folder.write_lines(path, [text]))
    for write in writes:
        with pytest.raises(StagingError, match=rf"cannot write y.json in .*{tmp_path}: .*{words}"):
            write("y.json", "text")
    assert folder.list("") == ["x.json"]
    assert left_over(tmp_path) == []


def test_a_disk_without_hard_links_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Store.open(f"file://{tmp_path}").folder("f")
    folder.store.root_id()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "no")

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(StagingError, match="has no hard links"):
        folder.create("x", "")
    assert folder.list("") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
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
    ],
)
def test_spark_gets_the_scheme_of_its_own_file_system(uri: str, spark: str | None) -> None:
    store = Store(_Fs(), "bucket/staging", uri)
    assert store.spark_uri("p") == (spark or f"{uri}/p")


def test_spark_gets_three_slashes_for_a_disk(tmp_path: Path) -> None:
    assert Store.open(str(tmp_path)).spark_uri() == f"file://{tmp_path}"
    assert Store.open(f"file://{tmp_path}").folder("a").spark_uri("b") == f"file://{tmp_path}/a/b"


def test_the_root_file_says_who_made_it(tmp_path: Path) -> None:
    store = Store.open(f"file://{tmp_path}")
    store.root_id()
    made = json.loads((tmp_path / ".broadway-root.json").read_text())
    assert set(made) == {"version", "id", "host", "created_at"}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_their_user_reads_what_lies_in_staging(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = Store.open(f"file://{tmp_path}/root").folder("p/d")
        folder.create("x/a.json", "")
        folder.replace("x/b.json", "")
        folder.write_lines("x/c.jsonl", ["1"])
    finally:
        os.umask(before)
    assert modes(tmp_path / "root") == {0o700, 0o600}


def test_a_root_that_was_there_keeps_its_mode_and_what_is_made_in_it_is_private(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o755)
    (root / "old").mkdir(0o755)
    Store.open(f"file://{root}").folder("old/new").create("a.json", "")
    assert [path.stat().st_mode & 0o7777 for path in (root, root / "old")] == [0o755] * 2
    assert modes(root / "old" / "new") == {0o700, 0o600}


def test_a_root_with_the_set_group_id_bit_is_shared_with_its_group(tmp_path: Path) -> None:
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
    ("uri", "doing", "told"),
    [
        (
            "s3://aws_default@lake/staging",
            "write x.json",
            "connection 'aws_default', bucket 'lake'); allow it s3:PutObject there",
        ),
        ("s3://lake/staging", "remove x", "finds by itself, bucket 'lake'); allow it s3:Delete"),
        ("gs://g@lake", "read x", "connection 'g', bucket 'lake'); allow it this"),
        ("file:///data", "read x", "change its owner or mode"),
    ],
)
def test_a_refusal_names_who_was_refused_and_what(uri: str, doing: str, told: str) -> None:
    assert told in str(cannot(doing, uri, PermissionError("Access Denied")))


def test_who_may_not_delete_settles_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(tmp_path)
    record = open_generation(run)

    def refused(folder: Folder, path: str) -> None:
        raise cannot(f"remove {path}", "s3://lake", PermissionError("Access Denied"))

    monkeypatch.setattr(Folder, "remove", refused)
    record_settled(run, record, SettleReport(acked=1))
    run.forget_open(record.generation)
    assert run.state(record.generation) == "settled"
    assert list(iter_unsettled(run.store, "Pipeline", "dag")) == []
    assert "is complete but stays on the list" in caplog.text


def test_a_fork_has_a_client_of_its_own(tmp_path: Path) -> None:
    # Given a bucket whose client may be used by the process alone that made it
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
