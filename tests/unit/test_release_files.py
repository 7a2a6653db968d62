"""Files that releases wrote are read by the present code; files of a newer one are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import VERSION, check_version
from airflow_broadway.runs.account import kept_report
from airflow_broadway.runs.reading.batches import page_of_batches
from airflow_broadway.runs.reading.overview import overview_of
from airflow_broadway.staging.run_folder import SETTLED, StagedRun
from airflow_broadway.staging.store import Store

RELEASES = sorted((Path(__file__).parents[1] / "fixtures").glob("release-*"))


@pytest.fixture(params=RELEASES, ids=lambda folder: folder.name)
def folder(request, tmp_path):
    return shutil.copytree(request.param, tmp_path / "release")


@pytest.fixture
def run(folder):
    [name] = [path.parent for path in (folder / "staging").rglob("report.json")]
    run_id = json.loads((name / "report.json").read_text())["run_id"]
    store = Store.open((folder / "staging").as_uri())
    return StagedRun(store, pipeline="Smoke", dag_id="smoke", run_id=run_id)


def test_overview_counts_every_message(run):
    overview = overview_of(run)

    assert overview.balanced
    assert (overview.totals["acked"], overview.totals["dead_lettered"]) == (90, 10)
    assert {row.reason: row.count for row in overview.reasons or ()} == {"a tenth": 10}
    assert (kept_report(run) or {})["totals"]["received"] == 100


def test_batches_have_their_outcomes(run):
    rows = page_of_batches(run).rows

    assert sum(row.planned.size for row in rows) == 90
    assert all(row.outcome is not None and not row.outcome.failed for row in rows)


def test_settled_generation_is_not_settled_again(run):
    [generation] = run.generations()

    assert generation.state == run.state(generation.generation) == SETTLED
    assert run.manifest(generation.generation) is not None


def test_file_of_a_newer_format_names_the_release_to_use():
    with pytest.raises(StagingError) as refused:
        check_version({"version": VERSION + 1, "release": "9.8.7"}, "a/manifest.json")

    assert "use airflow-broadway 9.8.7, which wrote it, or a newer one" in str(refused.value)
