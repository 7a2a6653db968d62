"""What stays of a run in the staging folder, and where that is."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_broadway.adapters.staging import staging_root
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.staging.settlement_journal import record_settled
from tests.unit.runs.steps import Run


def files(run: Run) -> set[str]:
    folder = Path(run.staged.files.full(""))
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def send(run: Run, count: int) -> None:
    run.send(range(1, count + 1))


def test_of_a_run_that_received_nothing_only_its_report_stays(tmp_path: Path) -> None:
    run = Run(tmp_path)
    send(run, 0)
    run.process()
    assert run.ack()["balanced"]
    assert files(run) == {"report.json"}
    assert len(run.staged.dag.list("_balanced")) == 1


def test_a_run_whose_sum_is_not_right_is_on_no_list_of_runs_to_remove(tmp_path: Path) -> None:
    # Given a run that received three messages, and a journal that knows of two
    run = Run(tmp_path)
    send(run, 3)
    run.batch(run.process())
    [record] = run.staged.generations()
    record_settled(run.staged, record, SettleReport(acked=2))

    # Then its report says so, and retention never comes to it
    assert not run.ack()["balanced"]
    assert run.staged.dag.list("_balanced") == []


def test_the_staging_root_is_the_operators_or_the_settings_or_below_airflows_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIRFLOW_HOME", "/opt/airflow")
    monkeypatch.delenv("AIRFLOW__BROADWAY__STAGING", raising=False)
    assert staging_root(None) == "file:///opt/airflow/broadway"
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", "s3://lake/broadway")
    assert staging_root(None) == "s3://lake/broadway"
    assert staging_root("file:///mnt/own") == "file:///mnt/own"
