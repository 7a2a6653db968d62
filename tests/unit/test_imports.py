"""What loading a room brings with it, and that no modules import each other in a ring.

Which room may import which stands in ``pyproject.toml``; ``make lint`` holds it.
"""

from __future__ import annotations

import ast
import os
import pkgutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import airflow_broadway

PACKAGE = Path(airflow_broadway.__file__).parent

#: Room → what its modules must not load, directly or through others.
CLIENTS = ["pika", "boto3", "botocore", "confluent_kafka", "google", "grpc", "s3fs"]
BARRED = {
    "core": [*CLIENTS, "airflow", "pyspark", "pyarrow", "fsspec", "tenacity"],
    "producers": [*CLIENTS, "airflow", "pyspark", "pyarrow"],
    "spark": [*CLIENTS, "airflow", "pyarrow"],
    "staging": [*CLIENTS, "airflow", "pyspark"],
    "testing": [*CLIENTS, "airflow", "pyspark", "pyarrow"],
    "testing.crashes": [*CLIENTS, "airflow", "pyspark"],
    "runs": [*CLIENTS, "airflow", "pyspark"],
    "plugin": [*CLIENTS, "pyspark"],
    "adapters": [*CLIENTS, "pyspark", "pyarrow"],
    "operators": [*CLIENTS, "pyspark", "pyarrow"],
    "sensors": [*CLIENTS, "pyspark", "pyarrow"],
    "triggers": [*CLIENTS, "pyspark", "pyarrow"],
}

#: What tasks need when they work, and no Dag while it is parsed.
AT_WORK = ["runs.account", "runs.backlog", "runs.plans", "runs.tasks", "spark", "staging", "submit"]

#: Modules whose readers may execute what they read.
EXECUTING = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}

SCRIPT = """
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
barred = {barred!r}
found = sorted(m for m in sys.modules if any(m == b or m.startswith(b + ".") for b in barred))
assert not found, found[:5]
"""


def modules(room: str) -> list[str]:
    """The modules of a room, but for those of a room within it that has a line of its own."""
    folder = PACKAGE / room.replace(".", "/")
    found = pkgutil.walk_packages([str(folder)], prefix=f"airflow_broadway.{room}.")
    inner = tuple(f"airflow_broadway.{each}" for each in BARRED if each.startswith(f"{room}."))
    names = (m.name for m in found)
    return [f"airflow_broadway.{room}", *(n for n in names if not (inner and n.startswith(inner)))]


@pytest.mark.parametrize("room", BARRED)
def test_a_room_loads_nothing_that_is_barred_from_it(room: str) -> None:
    script = SCRIPT.format(modules=modules(room), barred=BARRED[room])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_package_itself_loads_neither_airflow_nor_spark() -> None:
    script = SCRIPT.format(
        modules=["airflow_broadway"], barred=[*CLIENTS, "airflow", "pyspark", "pyarrow"]
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_each_process_of_airflow_loads_of_the_plugin_is_light() -> None:
    barred = [*CLIENTS, "fastapi", "pyspark", "pyarrow", "airflow_broadway.staging"]
    script = SCRIPT.format(modules=["airflow_broadway.plugin.broadway_plugin"], barred=barred)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_parsing_a_dag_loads_nothing_that_only_its_tasks_need() -> None:
    # Airflow parses a Dag file again and again, and once more in each task's process.
    dags = PACKAGE.parent / "dags"
    script = SCRIPT.format(
        modules=[path.stem for path in dags.glob("*.py")],
        barred=[*CLIENTS, "pyspark", "pyarrow", *(f"airflow_broadway.{each}" for each in AT_WORK)],
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(dags)},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_modules_import_each_other_in_a_ring() -> None:
    # Lazy imports, and those for types alone, count too.
    graph = grimp.build_graph("airflow_broadway")
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the ring


def test_nothing_that_reads_what_others_wrote_can_execute_it() -> None:
    # Only processors in processes of their own, over their own pipes, exchange pickles.
    readers = [*PACKAGE.rglob("*.py")]
    found = {
        str(path.relative_to(PACKAGE))
        for path in readers
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (isinstance(node, ast.Import) and {each.name for each in node.names} & EXECUTING)
        or (isinstance(node, ast.ImportFrom) and node.module in EXECUTING)
        or (isinstance(node, ast.Name) and node.id in ("eval", "exec"))
    }
    assert found == {"core/stages/subprocess_channel.py"}
