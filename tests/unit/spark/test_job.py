"""The driver's entry, as far as it goes without a session."""

from __future__ import annotations

import platform
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.core.formats.parts import record_split
from airflow_broadway.core.formats.work import Work
from airflow_broadway.spark import application, job, launcher
from airflow_broadway.spark.application import open_batches
from airflow_broadway.spark.connect import VARIABLE, ConnectSessions, Server
from airflow_broadway.spark.session import REFUSED
from tests.unit.planned import planned_batch
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows


def work_file(root: Path, class_path: str) -> Work:
    pipeline = {"class": class_path, "options": {}}
    work = Work(name="t", try_number=1, pipeline=pipeline, run={}, plans=[])
    LocalFiles(root).replace(paths.of_try("t", 1), work.dumps())
    return work


@pytest.mark.parametrize("digest", ["of what the task wrote", None])
def test_changed_work_file_imports_nothing(tmp_path, monkeypatch, caplog, digest):
    # Given a work file that was replaced in the staging folder
    (tmp_path / "planted.py").write_text("open('planted.txt', 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    work = work_file(tmp_path / "run", "shop:Orders")
    work_file(tmp_path / "run", "planted:Any")

    # When the driver starts with the digest of the original file, or without one
    arguments = ["--run", f"file://{tmp_path}/run", "--work", paths.of_try("t", 1)]
    code = job.main([*arguments, "--sha256", work.digest] if digest else arguments)

    # Then it refuses before it imports the pipeline
    assert code == REFUSED
    assert "it was changed, and nothing was run" in caplog.text
    assert not (tmp_path / "planted.txt").exists()
    assert "planted" not in sys.modules


def test_spark_connect_without_remote_is_refused(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SPARK_REMOTE", "sc://spark.example")
    work = work_file(tmp_path, "shop:Orders")
    arguments = ["--run", f"file://{tmp_path}", "--work", paths.of_try("t", 1)]
    assert job.main([*arguments, "--sha256", work.digest]) == REFUSED
    assert "SPARK_REMOTE is set for the driver: to use Spark Connect, set remote=" in caplog.text


@pytest.mark.parametrize("known", [True, False, RuntimeError("no global views")])
@pytest.mark.parametrize("error", [None, StagingError("an executor cannot read it")])
def test_executors_are_checked_before_anything_begins_and_python_once_a_day(
    tmp_path, monkeypatch, known, error
):
    # Given a work file for a Spark Connect server, which knows of today's check, or not
    monkeypatch.setenv(VARIABLE, Server(url="sc://host").dumps())
    sessions = Mock()
    sessions.main.catalog.tableExists.side_effect = [known]
    sessions.check_daily = partial(ConnectSessions.check_daily, sessions)
    monkeypatch.setattr(job, "ConnectSessions", lambda *_: sessions)
    # And executors that cannot run Python, or can
    run, check = Mock(return_value=0), Mock(side_effect=[None, error])
    monkeypatch.setattr(application, "run_work", run)
    monkeypatch.setattr(job, "check_executor", check)
    work = work_file(tmp_path, f"{Counting.__module__}:{Counting.__name__}")

    uri, path = f"file://{tmp_path}", paths.of_try("t", 1)
    code = job.main(["--run", uri, "--work", path, "--sha256", work.digest])

    due = known is not True
    assert (code, run.called) == ((REFUSED, False) if due and error else (0, True))
    read, python = call(sessions.main, uri, path, python=False), call(sessions.main, uri, path)
    assert check.call_args_list == ([read, python] if due else [read])
    assert sessions.main.range().createOrReplaceGlobalTempView.called == (due and error is None)


def test_batches_that_an_earlier_try_may_have_in_hand(tmp_path):
    # Given plans with many batches, of which one has an outcome, and one was split since
    staged = Staged(tmp_path)
    one = staged.plan("default", [Planned(f"a{n}", rows(2)) for n in range(4)])
    other = staged.plan("small", [Planned(f"b{n}", rows(2)) for n in range(2)])
    work = staged.work(Counting, one, other)
    staged.files.create(paths.outcome(one.path, "a1"), "{}")
    parts = [planned_batch("a0.0"), planned_batch("a0.1")]
    record_split(staged.files, one.path, "default", planned_batch("a0"), parts, "t")

    # Then the split one, whose jobs may go on, is among them, and each plan has some of the first
    found = list(open_batches(staged.files, work))
    assert sorted(found) == ["a0", "a0.0", "a0.1", "a2", "a3", "b0", "b1"]
    assert {"a0", "b0"} == {*found[:2]}


@pytest.mark.parametrize(("version", "fits"), [("3.4.9", False), ("3.5.0", True)])
def test_old_spark_is_refused_with_the_versions_in_the_first_line(
    tmp_path, monkeypatch, caplog, version, fits
):
    # Given a missing run folder, which is checked right after the versions
    caplog.set_level("INFO")
    monkeypatch.setattr("pyspark.__version__", version)

    arguments = ["--run", f"file://{tmp_path}", "--work", paths.of_try("t", 1), "--sha256", ""]
    assert job.main(arguments) == REFUSED

    first = caplog.messages[0]
    assert f"on Python {platform.python_version()}" in first
    assert f"Spark {version}" in first
    assert ("Spark 3.5 or newer is needed" in first) is not fits
    assert ("is not there for the Spark driver" in caplog.messages[-1]) is fits


@pytest.mark.parametrize(("version", "fits"), [((3, 9, 99), False), ((3, 10, 0), True)])
def test_launcher_refuses_an_old_python(monkeypatch, version, fits):
    monkeypatch.setattr("sys.version_info", version)
    code = compile(Path(launcher.__file__).read_text(), launcher.__file__, "exec")
    if fits:
        exec(code, {"__name__": "launcher"})
        return
    with pytest.raises(SystemExit, match=r"needs Python 3\.10 or newer in the Spark driver"):
        exec(code, {"__name__": "launcher"})
