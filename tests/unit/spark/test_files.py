"""A run's folder as the Spark driver reaches it; a mock plays the JVM."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.spark import files
from airflow_broadway.spark.files import (
    HadoopFiles,
    check_executor,
    local_path,
    open_files,
    set_s3a,
)


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
def test_local_paths(uri, path):
    assert local_path(uri) == path


def test_plain_files_need_no_session(tmp_path):
    assert isinstance(open_files(f"file://{tmp_path}"), LocalFiles)


@pytest.mark.parametrize("session", [None, object()], ids=["none", "connect"])
def test_other_files_need_a_session_with_a_jvm(session):
    with pytest.raises(StagingError, match="only be read within a Spark session that has a JVM"):
        open_files("s3a://bucket/run", session)


def test_executor_without_the_staging_root_is_found_before_the_first_batch():
    # Given a cluster whose executors do not see the folder
    spark = mock.Mock()
    spark.sparkContext.master = "spark://host:7077"
    lost = (
        "Job aborted\njava.io.FileNotFoundException: File file:/a/work/t.json does not exist\n at x"
    )
    spark.read.text.return_value.limit.return_value.first.side_effect = RuntimeError(lost)
    expected = (
        r"an executor cannot read file:///a/work/t.json .*does not exist\).*same staging root"
    )
    with pytest.raises(StagingError, match=expected):
        check_executor(spark, "file:///a", "work/t.json")

    # Then only executors of its own process need no look
    spark.sparkContext.master = "local[2]"
    check_executor(spark, "file:///a", "work/t.json")


@pytest.mark.parametrize("python", [True, False])
def test_server_reads_the_file_in_its_python_or_without(monkeypatch, python):
    monkeypatch.setattr(files, "is_remote", lambda spark: True)
    spark = mock.Mock()
    rows = spark.read.text.return_value.limit.return_value
    check_executor(spark, "file:///a", "work/t.json", python=python)
    read = rows.mapInArrow.return_value if python else rows
    read.first.assert_called_once_with()
    assert rows.mapInArrow.called is python


def hadoop(uri: str, *, conditional: bool) -> HadoopFiles:
    """The files of a store behind a mocked JVM."""
    spark = mock.Mock()
    path = spark._jvm.org.apache.hadoop.fs.Path.return_value
    fs = path.getFileSystem.return_value
    fs.hasPathCapability.return_value = conditional
    fs.exists.return_value = False
    spark._jvm.org.apache.hadoop.util.VersionInfo.getVersion.return_value = "3.3.4"
    return HadoopFiles(spark, uri)


def test_failed_write_aborts_the_object():
    # Given a store that publishes an object once its stream is closed
    files = hadoop("gs://bucket/run", conditional=False)
    stream = files._fs.create.return_value
    writer = files._jvm.java.io.OutputStreamWriter.return_value

    # When the text breaks off
    with pytest.raises(ZeroDivisionError):
        files.write_lines("a/b.jsonl", (str(1 // n) for n in (1, 0)))

    # Then nothing is published
    stream.abort.assert_called_once_with()
    stream.close.assert_not_called()
    writer.close.assert_not_called()


@pytest.mark.parametrize("uri", ["s3a://bucket/run", "s3://bucket/run"])
def test_s3_without_exclusive_create_is_refused_below_the_version(uri):
    with pytest.raises(StagingError, match=r"Hadoop \(3\.3\.4\) cannot .*Hadoop 3\.4\.2 or newer"):
        hadoop(uri, conditional=False)
    hadoop(uri, conditional=True)
    hadoop("gs://bucket/run", conditional=False)  # which creates exclusively by itself


@pytest.mark.parametrize(("content", "own"), [("another's", False), ("ours", True)])
def test_create_that_meets_an_object_succeeds_only_if_it_is_equal(content, own):
    # Given a store that refuses on close, since the file exists
    class Refused(Exception):
        java_exception = mock.Mock()

    cause = Refused.java_exception.getCause.return_value
    Refused.java_exception.getClass.return_value.getSimpleName.return_value = "IOException"
    cause.getClass.return_value.getSimpleName.return_value = "RemoteFileChangedException"
    files = hadoop("s3a://bucket/run", conditional=True)
    files._jvm.java.io.OutputStreamWriter.return_value.close.side_effect = Refused
    files._jvm.org.apache.commons.io.IOUtils.toString.return_value = content

    # When a file is created there, or again because the first answer was lost
    assert files.create("a/b.json", "ours") is own

    # Then the request was conditional
    builder = files._fs.createFile.return_value.overwrite.return_value.recursive.return_value
    builder.must.assert_called_once_with("fs.option.create.conditional.overwrite", "true")


OPTIONS = {
    "key": "AKIA",
    "secret": "hush",
    "endpoint_url": "http://minio:9000",
    "client_kwargs": {"region_name": "eu-central-1"},
}


def s3a(options: dict[str, Any], *own: str) -> dict[str, str]:
    """Returns what is set for a bucket, next to the application's own settings."""
    spark = mock.Mock()
    found: dict[str, str] = {}
    spark.sparkContext.getConf.return_value.contains = own.__contains__
    spark._jsc.hadoopConfiguration.return_value.set = found.__setitem__
    set_s3a(spark, "s3a://lake/broadway/run", options)
    assert all(name.startswith("fs.s3a.bucket.lake.") for name in found)
    return {name.removeprefix("fs.s3a.bucket.lake."): value for name, value in found.items()}


def test_s3a_gets_endpoint_and_credentials_of_one_bucket():
    assert s3a(OPTIONS) == {
        "endpoint": "http://minio:9000",
        "path.style.access": "true",
        "connection.ssl.enabled": "false",
        "endpoint.region": "eu-central-1",
        "access.key": "AKIA",
        "secret.key": "hush",
    }
    assert s3a({}) == {}


def test_users_s3a_settings_stay():
    name = "fs.s3a.bucket.lake.endpoint"
    assert "endpoint" not in s3a(OPTIONS, f"spark.hadoop.{name}")


def test_amazon_s3_needs_no_path_style_and_temporary_keys_a_token():
    endpoint = "https://s3.eu-west-1.amazonaws.com"
    found = s3a({"endpoint_url": endpoint, "key": "k", "secret": "s", "token": "t"})
    assert "path.style.access" not in found
    assert found["connection.ssl.enabled"] == "true"
    assert found["session.token"] == "t"
