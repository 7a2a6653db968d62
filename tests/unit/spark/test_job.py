"""The driver's entry, as far as it goes without a session."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.core.formats.work import Work
from airflow_broadway.spark import job, launcher
from airflow_broadway.spark.session import REFUSED


def work_file(root: Path, class_path: str) -> Work:
    work = Work(
        name="t",
        try_number=1,
        pipeline={"class": class_path, "options": {}},
        run={},
        plans=[],
    )
    LocalFiles(root).replace(paths.of_try("t", 1), work.dumps())
    return work


@pytest.mark.parametrize("digest", ["of what the task wrote", None])
def test_a_work_file_that_somebody_changed_imports_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    digest: str | None,
) -> None:
    # Given a work file that was written anew by somebody who can write into the staging folder
    (tmp_path / "planted.py").write_text("open('planted.txt', 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    work = work_file(tmp_path / "run", "shop:Orders")
    work_file(tmp_path / "run", "planted:Any")

    # When the driver starts with the digest that the task gave, or with none
    given = ["--run", f"file://{tmp_path}/run", "--work", paths.of_try("t", 1)]
    code = job.main([*given, "--sha256", work.digest] if digest else given)

    # Then it refuses before anything that the file names is imported
    assert code == REFUSED
    assert "it was changed, and nothing was run" in caplog.text
    assert not (tmp_path / "planted.txt").exists()
    assert "planted" not in sys.modules


def test_a_driver_that_would_get_a_session_of_spark_connect_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://spark.example")
    work = work_file(tmp_path, "shop:Orders")
    given = ["--run", f"file://{tmp_path}", "--work", paths.of_try("t", 1)]
    assert job.main([*given, "--sha256", work.digest]) == REFUSED
    assert "SPARK_REMOTE is set for the driver: Spark Connect is not supported yet" in caplog.text


@pytest.mark.parametrize(("version", "fits"), [("3.4.9", False), ("3.5.0", True)])
def test_spark_is_refused_below_the_oldest_that_does_and_the_first_line_names_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    fits: bool,
) -> None:
    # Given a driver whose run's folder is not there, which is looked at right after the versions
    caplog.set_level("INFO")
    monkeypatch.setattr("pyspark.__version__", version)

    given = ["--run", f"file://{tmp_path}", "--work", paths.of_try("t", 1), "--sha256", ""]
    assert job.main(given) == REFUSED

    first = caplog.messages[0]
    assert f"on Python {platform.python_version()}" in first
    assert f"Spark {version}" in first
    assert ("Spark 3.5 or newer is needed" in first) is not fits
    assert ("is not there for the Spark driver" in caplog.messages[-1]) is fits


@pytest.mark.parametrize(("version", "fits"), [((3, 9, 99), False), ((3, 10, 0), True)])
def test_the_launcher_says_itself_that_its_python_is_too_old(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], fits: bool
) -> None:
    monkeypatch.setattr("sys.version_info", version)
    code = compile(Path(launcher.__file__).read_text(), launcher.__file__, "exec")
    if fits:
        exec(code, {"__name__": "launcher"})
        return
    with pytest.raises(SystemExit, match=r"needs Python 3\.10 or newer in the Spark driver"):
        exec(code, {"__name__": "launcher"})
