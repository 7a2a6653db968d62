"""Where a run's files lie, and who says so."""

from __future__ import annotations

from airflow_broadway.adapters.staging import staging_root


def test_argument_precedes_setting_and_that_airflow_home(monkeypatch, tmp_path):
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    monkeypatch.delenv("AIRFLOW__BROADWAY__STAGING", raising=False)
    assert staging_root(None) == f"file://{tmp_path}/broadway"

    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", "s3://aws_default@bucket/broadway")
    assert staging_root(None) == "s3://aws_default@bucket/broadway"
    assert staging_root("file:///own") == "file:///own"
