"""The zip file for Spark drivers, and the pipelines that are refused."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.submit import package as _shipping
from airflow_broadway.submit.package import check_import, ship

CLASS = """
from airflow_broadway import Batcher, Broadway
from airflow_broadway.core.custody.producer import Producer
{more}

class {name}(Broadway):
    producer = Producer()
    batchers = {{"default": Batcher(schema="n bigint")}}
"""


def write(path: Path, name: str = "Shop", more: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CLASS.format(name=name, more=more))


@pytest.fixture
def code(tmp_path, monkeypatch):
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def names(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as file:
        return {name for name in file.namelist() if not name.endswith("/")}


def in_a_driver(zip_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with nothing but the zip file, and what is installed, on the path."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(zip_path)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


def test_driver_packages_are_in_it(code, tmp_path):
    write(code / "ship_module.py")
    shipment = ship("ship_module:Shop", tmp_path / "out")
    files = names(shipment.zip)
    assert {
        "airflow_broadway/__init__.py",
        "airflow_broadway/types.py",
        "airflow_broadway/core/pipeline.py",
        "airflow_broadway/pipeline.py",
        "airflow_broadway/spark/job.py",
        "airflow_broadway/producers/__init__.py",
        "ship_module.py",
    } <= files
    assert not [name for name in files if "/operators/" in name or ".pyc" in name]
    # Of staging, what opens its root: the rest is not Python 3.10.
    assert {name.rpartition("/")[2] for name in files if "/staging/" in name} == {
        *("__init__.py", "bucket.py", "client.py", "disk.py", "errors.py", "store.py")
    }
    assert shipment.packages == ["airflow_broadway", "ship_module"]


def test_driver_runs_the_shipped_package(code, tmp_path):
    write(code / "ship_own.py")
    shipment = ship("ship_own:Shop", tmp_path / "out")
    result = in_a_driver(
        shipment.zip,
        "import airflow_broadway.spark.job as j, ship_own; print(j.__file__, ship_own.__file__)",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(str(shipment.zip)) == 2


def test_package_is_shipped_without_caches(code, tmp_path):
    write(code / "ship_package" / "deep" / "flights.py")
    (code / "ship_package" / ".git").mkdir()
    for name in ("__init__.py", "deep/__init__.py", "airports.csv", ".secret", ".git/config"):
        (code / "ship_package" / name).write_text("")
    shipment = ship("ship_package.deep.flights:Shop", tmp_path / "out")
    assert {name for name in names(shipment.zip) if name.startswith("ship_package")} == {
        "ship_package/__init__.py",
        "ship_package/airports.csv",
        "ship_package/deep/__init__.py",
        "ship_package/deep/flights.py",
    }


def test_namespace_package_is_shipped(code, tmp_path, monkeypatch):
    write(code / "ship_space" / "inner" / "flights.py")
    other = tmp_path / "elsewhere" / "ship_space"
    other.mkdir(parents=True)
    (other / "unrelated.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other.parent)])
    shipment = ship("ship_space.inner.flights:Shop", tmp_path / "out")
    assert "ship_space/inner/flights.py" in names(shipment.zip)
    assert "ship_space/unrelated.py" not in names(shipment.zip)
    result = in_a_driver(shipment.zip, "import ship_space.inner.flights as f; print(f.Shop().name)")
    assert result.stdout == "Shop\n", result.stderr


def test_equal_files_give_equal_bytes(code, tmp_path):
    write(code / "ship_same.py")
    first = ship("ship_same:Shop", tmp_path / "one").zip.read_bytes()
    os.utime(code / "ship_same.py", (10**9, 10**9))
    assert ship("ship_same:Shop", tmp_path / "two").zip.read_bytes() == first


def test_size_limit_is_inclusive(code, tmp_path, monkeypatch):
    assert _shipping.MAX_BYTES == 32 * 1024 * 1024
    write(code / "ship_edge" / "flights.py")
    (code / "ship_edge" / "data.bin").write_bytes(b"x" * 1_000)
    size = sum(path.stat().st_size for path in (code / "ship_edge").iterdir())
    monkeypatch.setattr(_shipping, "MAX_BYTES", size)
    assert "ship_edge" in ship("ship_edge.flights:Shop", tmp_path / "out").packages
    monkeypatch.setattr(_shipping, "MAX_BYTES", size - 1)
    error = rf"has {size:,} bytes in 2 files; at most {size - 1:,} are .*ship_edge/data.bin \(1,000"
    with pytest.raises(PipelineError, match=error):
        ship("ship_edge.flights:Shop", tmp_path / "out")


def test_compiled_code_must_be_installed_on_the_cluster(code, tmp_path):
    write(code / "ship_native" / "flights.py")
    (code / "ship_native" / "__init__.py").write_text("")
    (code / "ship_native" / "fast.so").write_bytes(b"")
    shipment = ship("ship_native.flights:Shop", tmp_path / "out")
    assert shipment.packages == ["airflow_broadway"]
    assert not [name for name in names(shipment.zip) if name.startswith("ship_native")]


def test_missing_module_is_an_error(tmp_path):
    with pytest.raises(PipelineError, match="no_such_module_at_all"):
        ship("no_such_module_at_all:Shop", tmp_path)


def test_importable_pipeline_passes_quickly(code, tmp_path):
    write(code / "ship_good.py")
    shipment = ship("ship_good:Shop", tmp_path / "out")
    assert check_import({"class": "ship_good:Shop", "options": {}}, shipment) == []


def test_rendered_options_are_on_no_command_line(code, tmp_path, monkeypatch):
    write(code / "ship_secret.py")
    shipment = ship("ship_secret:Shop", tmp_path / "out")
    recorded = mock.Mock(wraps=subprocess, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(_shipping, "subprocess", recorded)
    with pytest.raises(PipelineError, match="unknown option 'hush'"):
        check_import({"class": "ship_secret:Shop", "options": {"hush": "hush"}}, shipment)
    assert "hush" not in str([call.args for call in recorded.run.call_args_list])


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("import helper_of_ship", "No module named 'helper_of_ship'"),
        ("raise RuntimeError('at import')", "RuntimeError: at import"),
    ],
)
def test_pipeline_that_the_driver_cannot_import_is_refused(code, tmp_path, more, text):
    (code / "helper_of_ship.py").write_text("")
    write(code / "ship_bad.py")
    shipment = ship("ship_bad:Shop", tmp_path / "out")
    write(code / "ship_bad.py", more=more)
    own = dict(_shipping._iter_own_files())
    _shipping._write_zip(shipment.zip, dict(_shipping._iter_pipeline_files("ship_bad:Shop")) | own)
    with pytest.raises(PipelineError) as raised:
        check_import({"class": "ship_bad:Shop", "options": {}}, shipment)
    assert text in str(raised.value)
    assert "must be installed in the driver's Python, or be listed in py_files" in str(raised.value)
    assert "Traceback" not in str(raised.value)
    sys.modules.pop("ship_bad", None)


def test_pipeline_that_imports_airflow_gets_a_warning(code, tmp_path):
    write(code / "ship_airflow.py", more="import airflow")
    shipment = ship("ship_airflow:Shop", tmp_path / "out")
    [warning] = check_import({"class": "ship_airflow:Shop", "options": {}}, shipment)
    assert "imports Airflow" in warning
