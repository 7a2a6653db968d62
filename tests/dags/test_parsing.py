"""Every DAG file parses by itself alone: no network, no client library, the same each time."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scripts.airflow_env import ROOT, airflow_env

#: As in ``dags/.airflowignore``: what is named so is imported by DAG files, and is none itself.
FILES = sorted(
    path for path in (ROOT / "dags").glob("*.py") if not path.name.endswith("_pipeline.py")
)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("airflow")


@cache
def parsed(home: Path, hash_seed: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Parses each file in a new process; returns its output, and the parsed result."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("parse.py")), *map(str, FILES)],
        env={**airflow_env(home=home), "PYTHONHASHSEED": str(hash_seed)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"clients"')]
    return {result["file"]: (line, result) for line in lines if (result := json.loads(line))}


def parse(path: Path, home: Path, hash_seed: int) -> tuple[str, dict[str, Any]]:
    return parsed(home, hash_seed)[str(path)]


def test_there_are_dag_files() -> None:
    assert "flights.py" in {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_dag_file_parses_without_network(path: Path, home: Path) -> None:
    _, result = parse(path, home, 1)

    assert result["errors"] == {}
    assert result["dags"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_parsing_imports_no_client_library(path: Path, home: Path) -> None:
    _, result = parse(path, home, 1)

    assert result["clients"] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_follows_a_pipeline_follows_its_sensor_alone(path: Path, home: Path) -> None:
    _, result = parse(path, home, 1)
    for dag in result["dags"].values():
        tasks = [task["__var"] for task in dag["dag"]["tasks"]]
        leaves = {item["task_id"] for item in tasks if not item.get("downstream_task_ids")}
        sensors = [item for item in tasks if item["task_type"] == "BroadwayAckSensor"]
        assert leaves == {item["task_id"] for item in sensors}
        # "poke" would hold a worker of whoever copies the file.
        assert {item.get("mode", "reschedule") for item in sensors} == {"reschedule"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_dag_is_serialized_the_same_in_two_processes(path: Path, home: Path) -> None:
    # Given two parses in processes that order their sets and hashes differently
    first, _ = parse(path, home, 1)
    second, _ = parse(path, home, 2)

    # Then a third party sees one version of the DAG, not two
    assert first == second


def test_the_pipeline_module_imports_neither_airflow_nor_spark() -> None:
    # The Spark driver imports it where there is no Airflow, and the parser where there is no Spark.
    program = (
        "import sys, flights_pipeline;"
        "print([m for m in ('airflow', 'pyspark', 'pyarrow', 'sqlite3') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=airflow_env(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.strip() in ("[]", "['sqlite3']")
