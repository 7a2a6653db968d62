from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import Files, LocalFiles
from airflow_broadway.spark.files import FsspecFiles, HadoopFiles, local_path, open_files


@pytest.fixture(params=["plain", "fsspec"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    made: dict[str, Callable[[], Files]] = {
        "plain": lambda: LocalFiles(tmp_path),
        "fsspec": lambda: FsspecFiles(f"file://{tmp_path}"),
    }
    return made[request.param]()


def test_a_file_is_created_once(files: Files) -> None:
    assert files.create("a/b.json", "one")
    assert not files.create("a/b.json", "two")
    assert files.read("a/b.json") == "one"
    assert files.list("a") == ["b.json"]


def test_a_file_is_replaced(files: Files) -> None:
    files.replace("a.json", "one")
    files.replace("a.json", "zwei ✓")
    assert files.read("a.json") == "zwei ✓"


def test_what_is_not_there(files: Files) -> None:
    with pytest.raises(FileNotFoundError):
        files.read("nothing.json")
    assert not files.exists("nothing.json")
    assert files.list("nothing") == []


def test_lines_come_back_as_they_went(files: Files) -> None:
    lines = ["", "a", "ü\u2028x", '{"a": 1}']
    assert files.write_lines("x/y.jsonl", lines) == 4
    assert list(files.lines("x/y.jsonl")) == lines


def test_lines_are_not_written_over(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.write_lines("a", ["1"])
    with pytest.raises(FileExistsError):
        files.write_lines("a", ["2"])


def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    won: list[str] = []

    def write(name: str) -> None:
        if files.create("one.json", name * 10_000):
            won.append(name)

    threads = [threading.Thread(target=write, args=(chr(97 + n),)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert files.read("one.json") == won[0] * 10_000
    assert files.list("") == ["one.json"]


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///a/b%3Ac", "/a/b%3Ac"),
        ("file:/a", "/a"),
        ("/a/b", "/a/b"),
        ("s3a://bucket/a", None),
        ("hdfs://host:9000/a", None),
    ],
)
def test_local_paths(uri: str, path: str | None) -> None:
    assert local_path(uri) == path


def test_plain_files_need_no_session(tmp_path: Path) -> None:
    assert isinstance(open_files(f"file://{tmp_path}"), LocalFiles)


def test_others_do() -> None:
    with pytest.raises(StagingError, match="only be read within a Spark session"):
        open_files("s3a://bucket/run")


def test_an_object_that_is_half_written_is_given_up_and_never_closed() -> None:
    # Given a store that publishes an object once its stream is closed
    stream = mock.Mock()
    files = object.__new__(HadoopFiles)
    files._jvm = mock.Mock()
    files._renames = False
    writer = files._jvm.java.io.OutputStreamWriter.return_value

    # When the text breaks off
    def broken() -> Iterator[str]:
        yield "half"
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        files._write(stream, broken())

    # Then nothing is published
    stream.abort.assert_called_once_with()
    stream.close.assert_not_called()
    writer.close.assert_not_called()


def hadoop(uri: str, *, conditional: bool) -> HadoopFiles:
    """The files of a store behind a JVM that is not there."""
    spark = mock.Mock()
    path = spark._jvm.org.apache.hadoop.fs.Path.return_value
    fs = path.getFileSystem.return_value
    fs.hasPathCapability.return_value = conditional
    fs.exists.return_value = False
    spark._jvm.org.apache.hadoop.util.VersionInfo.getVersion.return_value = "3.3.4"
    return HadoopFiles(spark, uri)


@pytest.mark.parametrize("uri", ["s3a://bucket/run", "s3://bucket/run"])
def test_an_s3_that_cannot_create_exclusively_is_refused_with_the_version_it_takes(
    uri: str,
) -> None:
    with pytest.raises(StagingError, match=r"Hadoop \(3\.3\.4\) cannot .*Hadoop 3\.4\.2 or newer"):
        hadoop(uri, conditional=False)
    hadoop(uri, conditional=True)
    hadoop("gs://bucket/run", conditional=False)  # which creates exclusively by itself


@pytest.mark.parametrize(("there", "own"), [("another's", False), ("ours", True)])
def test_who_meets_an_object_that_came_up_meanwhile_has_written_it_only_if_it_is_the_same(
    there: str, own: bool
) -> None:
    # Given a store that says when a file is closed that there is one
    class Refused(Exception):
        java_exception = mock.Mock()

    cause = Refused.java_exception.getCause.return_value
    Refused.java_exception.getClass.return_value.getSimpleName.return_value = "IOException"
    cause.getClass.return_value.getSimpleName.return_value = "RemoteFileChangedException"
    files = hadoop("s3a://bucket/run", conditional=True)
    files._jvm.java.io.OutputStreamWriter.return_value.close.side_effect = Refused
    files._jvm.org.apache.commons.io.IOUtils.toString.return_value = there

    # When a file is created there, or created again since the answer to the first try was lost
    assert files.create("a/b.json", "ours") is own

    # Then the store was told that it must refuse
    builder = files._fs.createFile.return_value.overwrite.return_value.recursive.return_value
    builder.must.assert_called_once_with("fs.option.create.conditional.overwrite", "true")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a\\b", "a\0b"])
def test_no_path_leads_out_of_the_folder(files: Files, tmp_path: Path, path: str) -> None:
    (tmp_path.parent / "x").write_text("another's")
    asked: list[Callable[[], object]] = [
        lambda: files.read(path),
        lambda: files.exists(path),
        lambda: files.list(path),
        lambda: files.create(path, "text"),
        lambda: files.replace(path, "text"),
        lambda: files.write_lines(path, ["text"]),
        lambda: list(files.lines(path)),
    ]
    for ask in asked:
        with pytest.raises(StagingError, match="is no path below"):
            ask()
    assert (tmp_path.parent / "x").read_text() == "another's"


def test_the_driver_makes_files_that_only_their_user_reads(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.create("a/b/c.json", "")
    files.write_lines("a/b/d.jsonl", ["1"])
    assert [(tmp_path / name).stat().st_mode & 0o7777 for name in ("a", "a/b")] == [0o700] * 2
    assert {path.stat().st_mode & 0o7777 for path in (tmp_path / "a/b").iterdir()} == {0o600}
