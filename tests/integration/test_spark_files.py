"""A run's folder through Hadoop's file systems, as on a cluster; here its local one."""

from __future__ import annotations

import time

import pytest

from airflow_broadway.spark.files import CHUNK, HadoopFiles, open_files
from tests.unit.spark.session import spark_session

pytestmark = pytest.mark.spark


@pytest.fixture(params=[True, False], ids=["renames", "writes"])
def files(request, tmp_path):
    return HadoopFiles(spark_session(), f"file://{tmp_path}/run", renames=request.param)


def test_a_file_is_created_once(files):
    assert not files.exists("a/b.json")
    assert files.create("a/b.json", "one ✓")
    assert not files.create("a/b.json", "two")
    assert files.read("a/b.json") == "one ✓"
    assert files.list("a") == ["b.json"]


def test_a_file_is_replaced(files):
    files.replace("a.json", "one")
    files.replace("a.json", "two")
    assert files.read("a.json") == "two"


def test_a_file_has_its_modification_time(files):
    for text in ("one", "two"):
        before = time.time()
        files.replace("a.json", text)
        assert before - 0.1 <= (files.modified("a.json") or 0.0) <= time.time()


def test_missing_files(files):
    with pytest.raises(FileNotFoundError):
        files.read("nothing.json")
    assert files.list("nothing") == []


def test_lines_round_trip(files):
    lines = ["", "ü ✓", "x" * (CHUNK + 1), '{"a": 1}']
    assert files.write_lines("x/y.jsonl", iter(lines)) == 4
    assert list(files.lines("x/y.jsonl")) == lines


def test_other_schemes_go_through_the_jvm():
    class Fake:
        _jvm = spark_session()._jvm
        _jsc = spark_session()._jsc

    with pytest.raises(Exception, match=r"No FileSystem for scheme|UnsupportedFile"):
        open_files("nosuch://bucket/run", Fake())
