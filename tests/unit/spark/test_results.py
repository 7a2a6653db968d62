from __future__ import annotations

import subprocess
import sys

import pytest

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.message import Status
from airflow_broadway.spark import Failed, failed
from airflow_broadway.spark.results import read


def test_ids_with_a_reason():
    failure = failed(["a", "b"], reason="bad")
    assert [tuple(part) for part in failure.parts] == [(("a", "b"), "bad")]


def test_results_combine():
    both = failed(["a"], reason="one") | failed(["b"], reason="two")
    listed = read([failed(["a"], reason="one"), failed(["b"], reason="two")])
    assert isinstance(listed, Failed)
    assert both.parts == listed.parts


@pytest.mark.parametrize(
    ("returned", "code"),
    [("oops", "handle_batch_bad_return"), ([failed(["a"]), "oops"], "handle_batch_bad_element")],
)
def test_wrong_return_has_its_code(returned, code):
    with pytest.raises(PipelineError, match=r"handle_batch returned .*'oops'") as raised:
        read(returned)
    assert raised.value.code == code


@pytest.mark.parametrize("rows", ["m1", b"m1", {"m1": 1}, 7, None])
def test_failed_takes_only_collections_of_ids(rows):
    with pytest.raises(PipelineError, match="takes a DataFrame or an iterable of message ids"):
        failed(rows)


def test_ids_must_be_text():
    with pytest.raises(PipelineError, match="message ids as text, got: int 1"):
        failed([1, 2])


def test_reason_must_be_text():
    with pytest.raises(PipelineError, match="takes text or a Column, got: 5"):
        failed(["a"], reason=5)


@pytest.mark.parametrize("value", [True, 0, "ok", ["a"], {"a": 1}, (1,), object()])
def test_other_returns_are_refused(value):
    with pytest.raises(PipelineError, match="on Spark it returns None when all messages succeeded"):
        read(value)


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        (["customer", "amount"], "without the column message_id"),
        (["message_id", "amount"], "with neither of the columns ok and status"),
        (["message_id", "ok", "status"], "with both of the columns ok and status"),
    ],
)
def test_reason_of_wrong_columns_begins_with_fault_and_cure(columns, fault):
    frame = type("DataFrame", (), {"__module__": "pyspark.sql.frame", "columns": columns * 20})()

    with pytest.raises(PipelineError) as caught:
        read(frame)

    shortened = Status("error", caught.value).text[:200]
    cure = "return None if all succeeded, failed(rows, reason=…), or message_id, ok and reason"
    assert fault in shortened
    assert cure in shortened


def test_results_load_neither_spark_nor_airflow():
    code = (
        "import sys, airflow_broadway.spark, airflow_broadway.core.formats.ownership;"
        "import airflow_broadway.spark.files, airflow_broadway.spark.job;"
        "bad = {'pyspark', 'airflow', 'pyarrow', 'fsspec', 'pandas'} & set(sys.modules);"
        "sys.exit(', '.join(bad) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
