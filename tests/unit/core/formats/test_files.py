"""Plain files of a run, and the writer of durable files below them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from airflow_broadway.core.formats.files import TEMPORARY, Files, LocalFiles, create_file


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return LocalFiles(tmp_path)


def test_lines_are_not_written_over(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.write_lines("a", ["1"])
    with pytest.raises(FileExistsError):
        files.write_lines("a", ["2"])


def test_the_driver_makes_files_that_only_their_user_reads(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.create("a/b/c.json", "")
    files.write_lines("a/b/d.jsonl", ["1"])
    assert [(tmp_path / name).stat().st_mode & 0o7777 for name in ("a", "a/b")] == [0o700] * 2
    assert {path.stat().st_mode & 0o7777 for path in (tmp_path / "a/b").iterdir()} == {0o600}


def test_a_write_that_fails_leaves_what_was_there(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.create("old.json", "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("os.fsync", full)
    writes: list[Callable[[], object]] = [
        lambda: files.create("new.json", "text"),
        lambda: files.replace("old.json", "text"),
        lambda: files.write_lines("new.jsonl", ["text"]),
    ]
    for write in writes:
        with pytest.raises(OSError, match="no room"):
            write()
    assert os.listdir(tmp_path) == ["old.json"]
    assert files.read("old.json") == "old"


def test_names_that_begin_with_a_dot_are_not_listed(files: Files, tmp_path: Path) -> None:
    files.create("a.json", "")
    (tmp_path / ".DS_Store").write_text("")
    (tmp_path / f"{TEMPORARY}0").write_text("")
    assert files.list("") == ["a.json"]


@pytest.mark.parametrize(
    ("number", "raises"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)]
)
def test_a_file_system_that_syncs_no_folders_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raises: bool
) -> None:
    def refuse(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, "no folders")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="no folders") if raises else nullcontext():
        assert create_file(str(tmp_path / "a"), [b"1", b"2"])
    assert (tmp_path / "a").read_bytes() == b"12"


@pytest.mark.parametrize("own", [True, False])
def test_a_link_whose_answer_was_lost_is_ours_where_the_name_is_that_of_our_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """NFS sends the request again, and the server answers that the name is taken."""
    link = os.link

    def repeated(source: str, target: str) -> None:
        if own:
            link(source, target)
        else:
            Path(target).write_bytes(b"another's")
        raise FileExistsError(errno.EEXIST, "exists", target)

    monkeypatch.setattr("os.link", repeated)

    assert create_file(str(tmp_path / "a"), [b"mine"]) is own
    assert (tmp_path / "a").read_bytes() == (b"mine" if own else b"another's")
    assert os.listdir(tmp_path) == ["a"]
