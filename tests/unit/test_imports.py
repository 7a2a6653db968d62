"""Which room may import which: arrows point down only (see the picture in docs/architecture.md)."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import airflow_broadway

PACKAGE = Path(airflow_broadway.__file__).parent

#: Room → what its modules must not load, directly or through others.
CLIENTS = ["pika", "boto3", "botocore", "confluent_kafka", "google.cloud", "s3fs"]
BARRED = {
    "core": [*CLIENTS, "airflow", "pyspark", "pyarrow", "fsspec", "tenacity"],
    "producers": [*CLIENTS, "airflow", "pyspark", "pyarrow"],
    "spark": [*CLIENTS, "airflow", "pyarrow"],
    "staging": [*CLIENTS, "airflow", "pyspark"],
    "testing": [*CLIENTS, "airflow", "pyspark", "pyarrow"],
    "runs": [*CLIENTS, "airflow", "pyspark"],
    "adapters": [*CLIENTS, "pyspark", "pyarrow"],
    "operators": [*CLIENTS, "pyspark", "pyarrow"],
    "sensors": [*CLIENTS, "pyspark", "pyarrow"],
    "triggers": [*CLIENTS, "pyspark", "pyarrow"],
}

#: Rooms of one row never import each other.
ROWS = {
    "core": ["producers", "staging", "spark", "testing", "operators", "sensors", "triggers"],
    "producers": ["staging", "spark", "testing", "operators", "sensors", "triggers"],
    "staging": ["producers", "spark", "testing", "operators", "sensors", "triggers"],
    "spark": ["producers", "staging", "testing", "operators", "sensors", "triggers"],
    "runs": ["spark", "submit", "adapters", "operators", "sensors", "triggers", "hooks", "cli"],
    "testing": ["staging", "spark", "operators", "sensors", "triggers"],
}

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
    folder = PACKAGE / room
    found = pkgutil.walk_packages([str(folder)], prefix=f"airflow_broadway.{room}.")
    return [f"airflow_broadway.{room}", *(m.name for m in found)]


@pytest.mark.parametrize("room", BARRED)
def test_a_room_loads_nothing_that_is_barred_from_it(room: str) -> None:
    barred = BARRED[room] + [f"airflow_broadway.{other}" for other in ROWS.get(room, [])]
    script = SCRIPT.format(modules=modules(room), barred=barred)
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


def test_no_modules_import_each_other_in_a_ring() -> None:
    # Lazy imports, and those for types alone, count too.
    files = {_name(path): path for path in PACKAGE.rglob("*.py")}
    graph = {name: set(_imported(path)) & files.keys() - {name} for name, path in files.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the ring


def _name(path: Path) -> str:
    inside = path.relative_to(PACKAGE.parent).with_suffix("")
    return ".".join(inside.parts).removesuffix(".__init__")


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            members = [f"{node.module}.{each.name}" for each in node.names]
            yield from members
            # Names of a package, and not modules in it, are its __init__'s.
            if not all(_is_module(each) for each in members):
                yield node.module


def _is_module(name: str) -> bool:
    inside = PACKAGE.parent.joinpath(*name.split("."))
    return inside.with_suffix(".py").is_file() or inside.is_dir()


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
