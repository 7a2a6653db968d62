"""Preparation of a submission; the operator's tests check the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from airflow_broadway.submit.environment import SparkMissing
from airflow_broadway.submit.submission import Chosen, prepare

REF = {"class": "tests.unit.spark.pipelines:Counting", "options": {}}
CHOSEN = Chosen(master="yarn", deploy_mode="client", binary="spark-submit")


def test_only_drivers_of_the_bundled_spark_need_java(tmp_path, monkeypatch):
    # Given a worker with the Spark of its Python, and without Java
    for name in ("SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))

    # Then no driver can run on it
    with pytest.raises(SparkMissing, match=r"JAVA_HOME is .*nothing"):
        prepare(CHOSEN, REF, "file:///run", tmp_path, check=False)

    # But one of a cluster can be started, on the cluster's Java and Python
    chosen = replace(CHOSEN, deploy_mode="cluster")
    submission = prepare(chosen, REF, "file:///run", tmp_path, check=False)
    assert set(submission.variables) == {"SPARK_HOME"}
    assert Path(submission.application).parent == tmp_path
