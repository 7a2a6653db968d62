from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.message import Status
from airflow_broadway.spark import Failed, failed
from airflow_broadway.spark.results import read


def test_ids_and_a_reason() -> None:
    made = failed(["a", "b"], reason="bad")
    assert [tuple(part) for part in made.parts] == [(("a", "b"), "bad")]


def test_several_combine() -> None:
    both = failed(["a"], reason="one") | failed(["b"], reason="two")
    listed = read([failed(["a"], reason="one"), failed(["b"], reason="two")])
    assert isinstance(listed, Failed)
    assert both.parts == listed.parts


@pytest.mark.parametrize(
    ("returned", "code"),
    [("oops", "handle_batch_bad_return"), ([failed(["a"]), "oops"], "handle_batch_bad_element")],
)
def test_a_wrong_return_has_the_code_of_one(returned: Any, code: str) -> None:
    with pytest.raises(PipelineError, match=r"handle_batch returned .*'oops'") as raised:
        read(returned)
    assert raised.value.code == code


@pytest.mark.parametrize("rows", ["m1", b"m1", {"m1": 1}, 7, None])
def test_what_is_no_set_of_ids_is_refused(rows: Any) -> None:
    with pytest.raises(PipelineError, match="takes a DataFrame or an iterable of message ids"):
        failed(rows)


def test_ids_that_are_no_text_are_refused() -> None:
    with pytest.raises(PipelineError, match="message ids as text, got: int 1"):
        failed([1, 2])


def test_a_reason_that_is_no_text_is_refused() -> None:
    with pytest.raises(PipelineError, match="takes text or a Column, got: 5"):
        failed(["a"], reason=5)


@pytest.mark.parametrize("value", [True, 0, "ok", ["a"], {"a": 1}, (1,), object()])
def test_any_other_return_is_refused(value: Any) -> None:
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
def test_of_wrong_columns_a_reason_has_the_fault_and_the_cure_before_a_report_cuts_it(
    columns: list[str], fault: str
) -> None:
    frame = type("DataFrame", (), {"__module__": "pyspark.sql.frame", "columns": columns * 20})()

    with pytest.raises(PipelineError) as caught:
        read(frame)

    kept = Status("error", caught.value).text[:200]
    assert fault in kept
    assert "return None if all succeeded, failed(rows, reason=…), or message_id, ok and reason" in (
        kept
    )


def test_importing_it_loads_neither_spark_nor_airflow() -> None:
    code = (
        "import sys, airflow_broadway.spark, airflow_broadway.core.formats.ownership;"
        "import airflow_broadway.spark.files, airflow_broadway.spark.job;"
        "bad = {'pyspark', 'airflow', 'pyarrow', 'fsspec', 'pandas'} & set(sys.modules);"
        "sys.exit(', '.join(bad) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
