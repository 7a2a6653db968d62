"""What spark-submit is given; see also the operator's tests, which look at its command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from airflow_broadway.submit.environment import SparkMissing
from airflow_broadway.submit.submission import Chosen, prepare

REF = {"class": "tests.unit.spark.pipelines:Counting", "options": {}}
CHOSEN = Chosen(master="yarn", deploy_mode="client", binary="spark-submit")


def test_java_is_needed_where_the_driver_of_the_workers_own_spark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker whose Spark is that of its Python, and whose Java is not there
    for name in ("SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))

    # Then no driver can run on it
    with pytest.raises(SparkMissing, match=r"JAVA_HOME is .*nothing"):
        prepare(CHOSEN, REF, "file:///run", tmp_path, check=False)

    # But one of a cluster can be started, on the cluster's Java and Python
    chosen = replace(CHOSEN, deploy_mode="cluster")
    made = prepare(chosen, REF, "file:///run", tmp_path, check=False)
    assert set(made.variables) == {"SPARK_HOME"}
    assert Path(made.application).parent == tmp_path
