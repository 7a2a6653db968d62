"""A run's folder as the Spark driver reaches it; a mock plays the JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.spark.files import HadoopFiles, local_path, open_files


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


@pytest.mark.parametrize("session", [None, object()], ids=["none", "connect"])
def test_others_need_one_with_a_jvm(session: object) -> None:
    with pytest.raises(StagingError, match="only be read within a Spark session that has a JVM"):
        open_files("s3a://bucket/run", session)


def hadoop(uri: str, *, conditional: bool) -> HadoopFiles:
    """The files of a store behind a JVM that is not there."""
    spark = mock.Mock()
    path = spark._jvm.org.apache.hadoop.fs.Path.return_value
    fs = path.getFileSystem.return_value
    fs.hasPathCapability.return_value = conditional
    fs.exists.return_value = False
    spark._jvm.org.apache.hadoop.util.VersionInfo.getVersion.return_value = "3.3.4"
    return HadoopFiles(spark, uri)


def test_an_object_that_is_half_written_is_given_up_and_never_closed() -> None:
    # Given a store that publishes an object once its stream is closed
    files = hadoop("gs://bucket/run", conditional=False)
    stream = files._fs.create.return_value
    writer = files._jvm.java.io.OutputStreamWriter.return_value

    # When the text breaks off
    def broken() -> Iterator[str]:
        yield "half"
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        files.write_lines("a/b.jsonl", broken())

    # Then nothing is published
    stream.abort.assert_called_once_with()
    stream.close.assert_not_called()
    writer.close.assert_not_called()


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
