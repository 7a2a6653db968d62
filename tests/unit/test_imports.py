"""Modules that an import must not load, and the absence of import cycles.

The permitted imports between rooms are in ``pyproject.toml``; ``make lint`` checks them.
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
# Not google.auth: with the Kubernetes provider Airflow itself loads it.
GOOGLE = ["google.api_core", "google.cloud", "google.pubsub_v1", "grpc"]
CLIENTS = ["pika", "boto3", "botocore", "confluent_kafka", *GOOGLE, "s3fs"]
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
    "operators": [*CLIENTS, "pyspark", "pyarrow", "kubernetes", "kubernetes_asyncio"],
    "sensors": [*CLIENTS, "pyspark", "pyarrow"],
    "triggers": [*CLIENTS, "pyspark", "pyarrow"],
}

#: Modules that tasks need, and no Dag while it is parsed.
AT_WORK = ["runs.account", "runs.backlog", "runs.plans", "runs.tasks", "spark", "staging", "submit"]

#: Modules whose readers may execute what they read.
EXECUTING = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}

SCRIPT = """
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
barred = {barred!r}
loaded = sorted(m for m in sys.modules if any(m == b or m.startswith(b + ".") for b in barred))
assert not loaded, loaded[:5]
"""


def modules(room: str) -> list[str]:
    """The modules of a room without those of an inner room with its own entry."""
    folder = PACKAGE / room.replace(".", "/")
    packages = pkgutil.walk_packages([str(folder)], prefix=f"airflow_broadway.{room}.")
    inner = tuple(f"airflow_broadway.{name}" for name in BARRED if name.startswith(f"{room}."))
    names = (m.name for m in packages)
    return [f"airflow_broadway.{room}", *(n for n in names if not (inner and n.startswith(inner)))]


def check_imports(modules: list[str], barred: list[str], **env: str) -> None:
    """Import modules in a process of its own, which fails if a barred one was loaded."""
    command = [sys.executable, "-c", SCRIPT.format(modules=modules, barred=barred)]
    env = {**os.environ, **env}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env=env
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("room", BARRED)
def test_package_loads_no_barred_module(room):
    check_imports(modules(room), BARRED[room])


def test_top_package_loads_neither_airflow_nor_spark():
    check_imports(["airflow_broadway"], [*CLIENTS, "airflow", "pyspark", "pyarrow"])


def test_plugin_loads_no_heavy_module_in_airflow_processes():
    barred = [*CLIENTS, "fastapi", "pyspark", "pyarrow", "airflow_broadway.staging"]
    check_imports(["airflow_broadway.plugin.broadway_plugin"], barred)


def test_parsing_a_dag_loads_no_module_of_tasks():
    # Airflow parses a Dag file again and again, and once more in each task's process.
    dags = PACKAGE.parent / "dags"
    rooms = [f"airflow_broadway.{room}" for room in AT_WORK]
    barred = [*CLIENTS, "pyspark", "pyarrow", *rooms]
    check_imports([path.stem for path in dags.glob("*.py")], barred, PYTHONPATH=str(dags))


#: A run on an empty queue: the work of ``process`` and ``ack``, and that of a run in one task.
EMPTY_RUN = """
from airflow_broadway import Batcher, Broadway
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.tasks import ProcessTask, UnstagedTask
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store


class Empty(Broadway):
    producer = SqliteProducer(queue="empty", path="{folder}/queue.db")
    batchers = {{"default": Batcher(engine="python")}}

    def handle_message(self, processor, message, context):
        return message

    def handle_batch(self, batcher, messages, batch_info, context):
        return messages


with SqliteQueue("{folder}/queue.db", "empty") as queue:
    queue.create()
for kind, run_id in ((ProcessTask, "staged"), (UnstagedTask, "unstaged")):
    store = Store.open("file://{folder}/staging")
    run = StagedRun(store, pipeline="Empty", dag_id="empty", run_id=run_id, airflow="")
    task = Task(dag_id="empty", run_id=run_id, task_id="process")
    budget = Budget(idle_seconds=0.0)
    assert kind(run, Empty(), task, Ports(), budget=budget).run().reference["received"] == 0
    assert RunWatcher(run, Empty()).look(over=True)["balanced"]
"""


def test_a_run_without_messages_loads_no_arrow(tmp_path):
    # It takes longer to load than all of this package.
    (tmp_path / "empty_run.py").write_text(EMPTY_RUN.format(folder=tmp_path))
    check_imports(["empty_run"], ["numpy", "pandas", "pyarrow"], PYTHONPATH=str(tmp_path))


def test_local_staging_loads_no_file_systems_of_providers(tmp_path):
    opening = tmp_path / "opening.py"
    opening.write_text(
        "from airflow_broadway.adapters.staging import open_store\n"
        f"assert open_store({tmp_path.as_uri()!r}).local\n"
    )
    barred = [*CLIENTS, "airflow.providers.amazon.aws"]
    check_imports(["opening"], barred, PYTHONPATH=str(tmp_path), AIRFLOW_HOME=str(tmp_path))


def test_imports_have_no_cycle():
    # Lazy imports, and those for types alone, count too.
    graph = grimp.build_graph("airflow_broadway")
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the ring


def test_no_reader_of_stored_files_can_execute_them():
    # Only processors in processes of their own, over their own pipes, exchange pickles.
    executing = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (isinstance(node, ast.Import) and {name.name for name in node.names} & EXECUTING)
        or (isinstance(node, ast.ImportFrom) and node.module in EXECUTING)
        or (isinstance(node, ast.Name) and node.id in ("eval", "exec"))
    }
    assert executing == {"core/stages/subprocess_channel.py"}
