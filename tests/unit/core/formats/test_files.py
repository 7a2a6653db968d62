"""Plain files of a run, and the writer of durable files below them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

from airflow_broadway.core.formats.files import TEMPORARY, LocalFiles, create_file, remove_objects


@pytest.fixture
def files(tmp_path):
    return LocalFiles(tmp_path)


def test_write_lines_does_not_overwrite(files):
    files.write_lines("a", ["1"])
    with pytest.raises(FileExistsError):
        files.write_lines("a", ["2"])


def test_driver_files_are_private(files, tmp_path):
    files.create("a/b/c.json", "")
    files.write_lines("a/b/d.jsonl", ["1"])
    assert [(tmp_path / name).stat().st_mode & 0o7777 for name in ("a", "a/b")] == [0o700] * 2
    assert {path.stat().st_mode & 0o7777 for path in (tmp_path / "a/b").iterdir()} == {0o600}


def test_failed_write_leaves_existing_files(files, tmp_path, monkeypatch):
    files.create("old.json", "old")

    monkeypatch.setattr("os.fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "no room")))
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


def test_dot_files_are_not_listed(files, tmp_path):
    files.create("a.json", "")
    (tmp_path / ".DS_Store").write_text("")
    (tmp_path / f"{TEMPORARY}0").write_text("")
    assert files.list("") == ["a.json"]


@pytest.mark.parametrize(
    ("number", "raises"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)]
)
def test_file_system_without_folder_sync_is_supported(tmp_path, monkeypatch, number, raises):
    def refuse(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, "no folders")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="no folders") if raises else nullcontext():
        assert create_file(str(tmp_path / "a"), [b"1", b"2"])
    assert (tmp_path / "a").read_bytes() == b"12"


@pytest.mark.parametrize("own", [True, False])
def test_lost_link_response_is_recognized_by_inode(tmp_path, monkeypatch, own):
    """NFS sends the request again, and the server answers that the name is taken."""
    link = os.link

    def repeated(source, target):
        if own:
            link(source, target)
        else:
            Path(target).write_bytes(b"another's")
        raise FileExistsError(errno.EEXIST, "exists", target)

    monkeypatch.setattr("os.link", repeated)

    assert create_file(str(tmp_path / "a"), [b"mine"]) is own
    assert (tmp_path / "a").read_bytes() == (b"mine" if own else b"another's")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(("code", "error"), [("AccessDenied", PermissionError), ("Slow", OSError)])
def test_refused_removal_of_an_object_is_an_error(code, error):
    fs = mock.Mock(req_kw={}, split_path=lambda path: (*path.split("/", 1), None))
    fs.call_s3.side_effect = [{}, {"Errors": [{"Key": "b", "Code": code, "Message": "no"}]}]

    with pytest.raises(OSError, match=f"^b: {code}: no$") as caught:
        remove_objects(fs, [f"lake/run/{number}" for number in range(1_001)])

    assert type(caught.value) is error
    sizes = [len(call.kwargs["Delete"]["Objects"]) for call in fs.call_s3.call_args_list]
    assert sizes == [1_000, 1]
