"""``airflow-broadway init``: what it writes passes its test, parses, and moves messages to rows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import ROOT, airflow_env
from tests.airflow_home import made_home
from tests.cli_runs import ran

TEMPLATES = ROOT / "airflow_broadway" / "cli" / "templates"
PARTS = tomllib.loads((TEMPLATES / "parts.toml").read_text())


def run(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        arguments,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_every_queue_and_sink_passes_its_test_and_parses(tmp_path, monkeypatch, capsys):
    # Given a pipeline for each pair of a queue and a sink
    monkeypatch.chdir(tmp_path)
    names = {f"{queue}_to_{sink}": (queue, sink) for queue, sink in product(*PARTS.values())}
    for name, (queue, sink) in names.items():
        created = ran(capsys, "init", name, "--queue", queue, "--sink", sink)
        assert created.code == 0, created.err
    folders = os.pathsep.join(str(tmp_path / name / "dags") for name in names)

    # Then its tests pass
    paths = " ".join(f"{name}/dags" for name in names)
    options = ("-q", "-p", "no:cacheprovider", "--rootdir=.", "-c", "none.ini")
    (tmp_path / "none.ini").write_text(f"[pytest]\npythonpath = {paths}\n")
    passed = run(sys.executable, "-m", "pytest", *options, *names, cwd=tmp_path)
    assert f"{2 * len(names)} passed" in passed

    # And what keeps dead letters is named and created, without which they are refused or lost
    for name, command in (
        ("sqs_to_delta", "create-queue --queue-name sqs_to_delta-dead\n"),
        ("pubsub_to_delta", "create pubsub_to_delta-dead --topic pubsub_to_delta-dead\n"),
    ):
        assert f'dead_letter="{name}-dead"' in Path(name, f"dags/{name}_pipeline.py").read_text()
        assert command in Path(name, "README.md").read_text()

    # And Airflow finds one DAG in each file, without an error
    env = airflow_env(home=tmp_path / "airflow")
    env["PYTHONPATH"] += os.pathsep + folders
    files = [str(tmp_path / name / "dags" / f"{name}_dag.py") for name in names]
    text = run(sys.executable, str(ROOT / "tests/dags/parse.py"), *files, cwd=tmp_path, env=env)
    parsed = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert {dag_id: dag["errors"] for dag in parsed for dag_id in dag["dags"]} == {
        name: {} for name in names
    }


@pytest.mark.airflow
@pytest.mark.parametrize("sink", ["parquet", "delta"])
def test_commands_of_its_readme_move_a_message_to_a_row(sink, tmp_path, monkeypatch, capsys):
    # Given a new pipeline
    monkeypatch.chdir(tmp_path)
    assert ran(capsys, "init", "orders", "--sink", sink).code == 0
    project = tmp_path / "orders"
    text = (project / "README.md").read_text()
    *blocks, start = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert start == "airflow standalone\n"

    # When the commands of its README run, in order
    made_home(project / "airflow")
    install, *rest = "".join(blocks).splitlines()
    assert install.startswith("pip install")
    env = airflow_env(home=tmp_path / "none")
    env = {k: v for k, v in env.items() if not k.startswith(("AIRFLOW_CONN_", "PYTHONPATH"))}
    env["PYTHONPATH"] = str(ROOT)  # where the package is
    script = "\n".join(["set -e", *rest]).replace('PYTHONPATH="', f'PYTHONPATH="{ROOT}:')
    output = run("bash", "-c", script, cwd=project, env=env)

    # Then the message is a row, and the queue is empty
    assert "2 passed" in output
    [row] = ds.dataset(project / "rows", format="parquet").to_table().to_pylist()
    assert (row["id"], row["item"], row["amount"]) == (1, "tea", 2.5)
    assert row["message_id"]
    depth = SqliteQueue(project / "queue.db", "orders").depth()
    assert (depth.ready, depth.leased, depth.dead) == (0, 0, 0), output


def test_existing_folder_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "README.md").write_text("mine")

    refused = ran(capsys, "init", "orders")

    assert "exists, and is never overwritten" in refused.error
    assert [path.name for path in (tmp_path / "orders").iterdir()] == ["README.md"]
    assert (tmp_path / "orders" / "README.md").read_text() == "mine"


@pytest.mark.parametrize("name", ["Orders", "or-ders", "or/ders", "../x", "1st", "ab", "x" * 41])
def test_invalid_name_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert "lower-case letters, digits and underscores" in ran(capsys, "init", name).error
    assert list(tmp_path.iterdir()) == []


def test_folder_that_files_would_have_to_quote_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "it's").mkdir()
    monkeypatch.chdir(tmp_path / "it's")

    assert "run this in another folder" in ran(capsys, "init", "orders").error
    assert list(Path.cwd().iterdir()) == []


def test_connections_are_readable_by_their_owner_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    written = ran(capsys, "init", "orders", "--sink", "postgres", "--json").json

    assert all(Path(path).is_file() for path in written)
    path = tmp_path / "orders" / "connections.env"
    assert path.stat().st_mode & 0o777 == 0o600
    connections = re.findall(r"(?m)^AIRFLOW_CONN_(\w+)='(.*)'$", path.read_text())
    assert [name for name, _ in connections] == ["ORDERS_QUEUE", "ORDERS_SINK"]
    assert json.loads(connections[1][1])["password"] == "CHANGE-ME"
