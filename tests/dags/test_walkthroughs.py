"""Every command and file of the first two pages, word by word, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow.dataset as ds
import pytest

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import ROOT, home_of
from scripts.local_airflow import free_port

DOCS = ROOT / "docs"
#: The folder that the tutorial names.
THEIRS = "/var/lib/shop"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A file is announced by its name, at the end of a paragraph.
FILE = re.compile(r"`([\w/]+\.\w+)`:$")
METHOD = "    def handle_message"


class Step(NamedTuple):
    """One code block of a page: its commands, and their expected output."""

    commands: str
    output: list[str]


def steps_of(text: str, folder: Path) -> list[Step]:
    steps: list[Step] = []
    files: dict[str, str] = {}
    text = text.replace(THEIRS, str(folder))
    for match in BLOCK.finditer(text):
        kind, body = match.groups()
        announced = FILE.search(text[: match.start()].rstrip())
        if announced:
            name = announced[1]
            if body.startswith(METHOD):  # the one method, in its file
                body = files[name].partition(METHOD)[0] + body
            files[name] = body
            steps.append(Step(f"printf %s {shlex.quote(body)} >{name}", []))
        elif kind == "sh":
            steps.append(Step(body, []))
        elif kind == "text":
            steps[-1].output.extend(body.splitlines())
    return steps


def follow(steps: list[Step], folder: Path) -> list[str]:
    """Runs the steps in one shell, and returns the output of each."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AIRFLOW", "_AIRFLOW", "PYTHON", "PYTEST"))
    }
    # Where another server has the usual port
    port = free_port()
    env["AIRFLOW__API__HOST"] = "127.0.0.1"
    env["AIRFLOW__API__PORT"] = str(port)
    env["AIRFLOW__API__BASE_URL"] = f"http://127.0.0.1:{port}"
    script = "\n".join(["set -e", *(f"echo '@@@'\n{step.commands}" for step in steps)])
    log = folder / "output.log"
    with log.open("w") as stream:
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(timeout=1_000)
        finally:
            with suppress(ProcessLookupError):  # `airflow standalone` and its children
                os.killpg(shell.pid, signal.SIGKILL)
    text = log.read_text("utf-8")
    assert code == 0, text
    outputs = text.split("@@@\n")[1:]
    assert len(outputs) == len(steps)
    for step, output in zip(steps, outputs, strict=True):
        assert [line for line in step.output if line not in output] == [], output
    return outputs


def seed(folder: Path) -> Step:
    """An AIRFLOW_HOME with the tables that ``airflow db migrate`` makes, if the tests have one."""
    made = home_of(ROOT, "airflow-test")
    if not (made / "migrated").exists():
        return Step("", [])
    return Step(f"mkdir {folder}/airflow && cp {made}/airflow.db {folder}/airflow/", [])


def rows(path: Path) -> list[tuple[int, float]]:
    table = ds.dataset(path, format="parquet").to_table()
    columns = table.to_pydict()
    return sorted(zip(columns[table.column_names[1]], columns["amount"], strict=True))


def section(page: str, title: str) -> tuple[str, str]:
    before, _, after = page.partition(f"## {title}\n")
    return before, after


@pytest.mark.airflow
def test_start_ends_with_rows_in_a_table(tmp_path):
    # Given the package, as the first section installs it
    page = (DOCS / "start.md").read_text("utf-8")
    _, page = section(page, "Create a pipeline")
    page, own = section(page, "Your own rows")
    steps = steps_of(page, tmp_path)

    # When the commands run, and those of the last section; a database made earlier saves time
    steps.insert(1, seed(tmp_path / "orders"))
    outputs = follow([*steps, *steps_of(own, tmp_path)], tmp_path)

    # Then the pipeline is that of the page, and the rows are in the table
    shown = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    created = (tmp_path / "orders" / "dags" / "orders_pipeline.py").read_text("utf-8")
    assert shown
    assert shown[1].replace("/your/folder", str(tmp_path)) == created
    assert rows(tmp_path / "orders" / "rows") == [(1, 2.5), (2, 3.75)]
    depth = SqliteQueue(tmp_path / "orders" / "queue.db", "orders").depth()
    assert (depth.ready + depth.delayed, depth.leased, depth.dead) == (1, 0, 0), outputs
    assert (tmp_path / "orders" / "payments" / "dags" / "payments_dag.py").exists()


#: Seconds that the order of the tutorial's last section may take to its row.
PATIENCE = 240


@pytest.mark.airflow
@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_tutorial_ends_with_a_scheduled_run(tmp_path):
    # Given an environment as on the first page
    page = (DOCS / "tutorial.md").read_text("utf-8")
    steps = steps_of(page, tmp_path)
    steps.insert(1, seed(tmp_path / "shop"))
    assert steps[-1].commands.startswith("airflow standalone &\n")

    # When the commands run, and its reader waits for the last order
    wait = f"SECONDS=0; until python rows.py | grep '^6 '; do test $SECONDS -lt {PATIENCE}; done\n"
    follow([*steps, Step(wait, ["6 DE 20.0 2026-02-01"])], tmp_path)

    # Then each order is a row, once; the third one as soon as its delay has passed
    orders = [order for order, _ in rows(tmp_path / "orders")]
    assert orders == sorted(set(orders))
    assert set(orders) - {3} == {1, 2, 4, 5, 6}
