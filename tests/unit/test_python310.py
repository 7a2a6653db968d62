"""What is shipped to Spark drivers runs on Python 3.10, whatever Python the tests have."""

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

#: Names of the standard library that came after 3.10.
NEWER = {
    "asyncio": {"Runner", "TaskGroup", "timeout"},
    "builtins": {"BaseExceptionGroup", "ExceptionGroup"},
    "datetime": {"UTC"},
    "enum": {"StrEnum"},
    "hashlib": {"file_digest"},
    "itertools": {"batched"},
    "typing": {
        "LiteralString",
        "Never",
        "NotRequired",
        "Required",
        "Self",
        "Unpack",
        "assert_never",
    },
}


#: What no Python loads without Spark.
NEEDS_SPARK = {
    f"airflow_broadway/spark/{name}.py"
    for name in ("application", "batch", "entries", "frame", "unsuccessful")
}


@pytest.fixture(scope="module")
def shipment(tmp_path_factory: pytest.TempPathFactory) -> Shipment:
    """What any pipeline is shipped with."""
    return ship("airflow_broadway:Broadway", tmp_path_factory.mktemp("shipped"))


def sources(shipment: Shipment) -> dict[str, str]:
    with zipfile.ZipFile(shipment.zip) as file:
        names = [name for name in file.namelist() if name.endswith(".py")]
        return {name: file.read(name).decode() for name in names}


@pytest.fixture(scope="module")
def python310() -> str:
    """A Python 3.10 of this machine."""
    known = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.10.*/bin")
    for path in (shutil.which("python3.10"), *(str(folder / "python") for folder in known)):
        if path is None:
            continue
        command = [path, "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 10))"]
        if not subprocess.run(command, capture_output=True, check=False).returncode:
            return path
    pytest.skip("this machine has no Python 3.10")


def test_it_is_written_in_the_language_of_3_10(shipment: Shipment) -> None:
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
                newer = NEWER.get(node.module or "", set()) & {each.name for each in node.names}
                assert not newer, f"{where}: {newer}"
            elif isinstance(node, ast.Import):
                assert "tomllib" not in {each.name for each in node.names}, where
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.attr not in NEWER.get(node.value.id, ()), where
            elif isinstance(node, ast.Name):
                assert node.id not in NEWER["builtins"], where


def test_every_module_of_it_loads_on_a_real_3_10(shipment: Shipment, python310: str) -> None:
    names = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in sources(shipment)
        if name not in NEEDS_SPARK
    ]
    done = subprocess.run(
        [python310, "-c", f"import {', '.join(names)}"],
        env={"PYTHONPATH": str(shipment.zip)},
        cwd=shipment.zip.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "airflow_broadway.producers.rabbitmq.receive.source" in names


@pytest.mark.parametrize(
    ("producer", "option"),
    [("RabbitMQProducer", "queue"), ("SqliteProducer", "queue"), ("SqsProducer", "queue_name")],
)
def test_a_pipeline_of_every_producer_loads_on_a_real_3_10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python310: str, producer: str, option: str
) -> None:
    module = f"shop_of_{producer.lower()}"
    (tmp_path / f"{module}.py").write_text(PIPELINE.format(producer=producer, option=option))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    shipment = ship(f"{module}:Shop", tmp_path / "out")
    ref = {"class": f"{module}:Shop", "options": {}}
    assert check_import(ref, shipment, python=python310) == []


def test_pipelines_and_batches_run_on_a_real_3_10(
    shipment: Shipment, python310: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [python310, "-c", "import test_shipped; test_shipped.run_all()"],
        env={"PYTHONPATH": f"{shipment.zip}{os.pathsep}{Path(__file__).parent}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tests = [name for name in vars(test_shipped) if name.startswith("test_")]
    assert done.stdout.split() == tests
