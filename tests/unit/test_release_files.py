"""Files that releases wrote are read by the present code; files of a newer one are refused."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import VERSION, check_version
from airflow_broadway.runs.account import kept_report
from airflow_broadway.runs.reading.batches import page_of_batches
from airflow_broadway.runs.reading.overview import overview_of
from airflow_broadway.staging.run_folder import SETTLED, StagedRun
from airflow_broadway.staging.store import Store
from tests import release_files
from tests.release_files import COUNT, run_of_release
from tests.unit.runs.steps import Run, balanced
from tests.unit.runs.test_sinks import GOOD, batch, numbers

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


@pytest.fixture(params=RELEASES, ids=lambda folder: folder.name)
def dead_runs(request, tmp_path_factory) -> Iterator[None]:
    """The folder of a release's dead runs, where they wrote it."""
    folder = release_files.FOLDER
    try:
        lock = os.open(folder.with_suffix(".lock"), os.O_RDONLY | os.O_CREAT, 0o666)
    except PermissionError as error:
        pytest.skip(f"another user runs this test: {error}")
    with closing(os.fdopen(lock)):  # another suite of this user waits
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            shutil.rmtree(folder)
        with tarfile.open(request.param / "runs.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        yield
        shutil.rmtree(folder)


@pytest.mark.usefixtures("dead_runs")
def test_dead_runs_of_a_release_are_settled_and_each_row_is_there_once():
    # Given runs of a release: one committed rows that it did not settle, one died at its commits
    # When the present code receives what they left
    in_child(next_batch, in_child(next_process))
    in_child(next_ack)
    run = next_run()

    # Then each message of the three runs has one row, or is one dead letter
    dead = [number for number in range(1, COUNT + 1) if number not in GOOD]
    assert numbers(run) == sorted(GOOD * 3)
    assert run.dead() == sorted(dead * 3)
    assert run.depth() == (0, 0, 0, 3 * len(dead))


def next_run() -> Run:
    return run_of_release("manual__4", ["manual__1", "manual__2", "manual__3"])


def next_process() -> dict[str, Any]:
    return next_run().process()


def next_batch(pulled: dict[str, Any]) -> None:
    batch(next_run(), pulled)


def next_ack() -> None:
    balanced(next_run().ack())


def in_child(step: Callable[..., Any], *args: Any) -> Any:
    """Runs a step in a new process, as Airflow does: deltalake does not survive a fork."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(step, args)


def test_file_of_a_newer_format_names_the_release_to_use():
    with pytest.raises(StagingError) as refused:
        check_version({"version": VERSION + 1, "release": "9.8.7"}, "a/manifest.json")

    assert "use airflow-broadway 9.8.7, which wrote it, or a newer one" in str(refused.value)
