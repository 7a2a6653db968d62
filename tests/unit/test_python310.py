"""The code that is shipped to Spark drivers runs on Python 3.10."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from airflow_broadway.submit.package import Shipment, check_import, ship
from tests.unit import test_shipped

PIPELINE = """
from airflow_broadway import Batcher, Broadway, failed
from airflow_broadway.producers import {producer}


class Shop(Broadway):
    producer = {producer}({option}="orders")
    batchers = {{"default": Batcher(schema="n bigint")}}
"""

LITERAL = "LiteralString"
#: Names of the standard library that are newer than 3.10.
NEWER = {
    "asyncio": {"Runner", "TaskGroup", "timeout"},
    "builtins": {"BaseExceptionGroup", "ExceptionGroup"},
    "datetime": {"UTC"},
    "enum": {"StrEnum"},
    "hashlib": {"file_digest"},
    "itertools": {"batched"},
    "typing": {"Never", "NotRequired", "Required", "Self", "Unpack", "assert_never", LITERAL},
}


#: Modules that need Spark, or the client of a bucket.
NEEDS_MORE = {
    *("airflow_broadway/staging/bucket.py", "airflow_broadway/staging/store.py"),
    *(
        f"airflow_broadway/spark/{name}.py"
        for name in ("application", "arrow", "batch", "entries", "frame", "unsuccessful")
    ),
}


@pytest.fixture(scope="module")
def shipment(tmp_path_factory):
    """The zip file of a pipeline."""
    return ship("airflow_broadway:Broadway", tmp_path_factory.mktemp("shipped"))


def sources(shipment: Shipment) -> dict[str, str]:
    with zipfile.ZipFile(shipment.zip) as file:
        names = [name for name in file.namelist() if name.endswith(".py")]
        return {name: file.read(name).decode() for name in names}


@pytest.fixture(scope="module")
def python310():
    """A Python 3.10 of this machine."""
    known = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.10.*/bin")
    for path in (shutil.which("python3.10"), *(str(folder / "python") for folder in known)):
        if path is None:
            continue
        command = [path, "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 10))"]
        if not subprocess.run(command, capture_output=True, check=False).returncode:
            return path
    pytest.skip("this machine has no Python 3.10")


def test_shipped_code_is_python_3_10(shipment):
    for name, text in sources(shipment).items():
        tree = ast.parse(text, name, feature_version=(3, 10))
        typed = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            where = f"{name}:{getattr(node, 'lineno', '?')}"
            if node in typed:
                continue
            if isinstance(node, ast.ImportFrom):
                newer = NEWER.get(node.module or "", set()) & {name.name for name in node.names}
                assert not newer, f"{where}: {newer}"
            elif isinstance(node, ast.Import):
                assert "tomllib" not in {name.name for name in node.names}, where
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.attr not in NEWER.get(node.value.id, ()), where
            elif isinstance(node, ast.Name):
                assert node.id not in NEWER["builtins"], where


def test_shipped_modules_load_on_python_3_10(shipment, python310):
    names = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in sources(shipment)
        if name not in NEEDS_MORE
    ]
    result = subprocess.run(
        [python310, "-c", f"import {', '.join(names)}"],
        env={"PYTHONPATH": str(shipment.zip)},
        cwd=shipment.zip.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "airflow_broadway.producers.rabbitmq.receive.source" in names


@pytest.mark.parametrize(
    ("producer", "option"),
    [("RabbitMQProducer", "queue"), ("SqliteProducer", "queue"), ("SqsProducer", "queue_name")],
)
def test_pipeline_of_any_producer_loads_on_python_3_10(
    tmp_path, monkeypatch, python310, producer, option
):
    module = f"shop_of_{producer.lower()}"
    (tmp_path / f"{module}.py").write_text(PIPELINE.format(producer=producer, option=option))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    shipment = ship(f"{module}:Shop", tmp_path / "out")
    ref = {"class": f"{module}:Shop", "options": {}}
    assert check_import(ref, shipment, python=python310) == []


def test_pipelines_and_batches_run_on_python_3_10(shipment, python310, tmp_path):
    result = subprocess.run(
        [python310, "-c", "import test_shipped; test_shipped.run_all()"],
        env={"PYTHONPATH": f"{shipment.zip}{os.pathsep}{Path(__file__).parent}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    tests = [name for name in vars(test_shipped) if name.startswith("test_")]
    assert result.stdout.split() == tests
