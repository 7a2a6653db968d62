"""Runs for the tests of the command line: made by the code that the operators run, no scheduler."""

from __future__ import annotations

import json
import textwrap
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.adapters.staging import open_store
from airflow_broadway.cli import main
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.formats.work import Work
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import load_ref
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.runs.ports import Ports, Task, producer_env
from airflow_broadway.runs.process import Process
from airflow_broadway.runs.python_batches import PythonBatches
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import StagedRun

#: A module of pipelines, before ``format(path=…)``.
ORDERS_MODULE = """
from airflow_broadway import Broadway
from airflow_broadway.producers.sqlite import SqliteProducer


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", path={path!r})

    def handle_message(self, processor, message, context):
        return message


class Templated(Orders):
    producer = SqliteProducer(queue="{{{{ params.queue }}}}", path={path!r})
"""

DAG_ID, RUN_ID = "orders", "manual__2026-01-01T00:00:00+00:00"

#: The module next to the Dag files.  What fails is in a file, so that a test can mend the "code".
MODULE = """
import json
from pathlib import Path

from airflow_broadway import Batcher, Broadway, Processors
from airflow_broadway.producers.sqlite import SqliteProducer


class {name}(Broadway):
    producer = SqliteProducer(queue="orders", path="{folder}/queue.db", on_failure="dead_letter")
    processors = Processors(concurrency=1)
    batchers = {{"default": Batcher({options})}}
    context = {{"folder": "{folder}"}}

    def handle_message(self, processor, message, context):
        order = json.loads(message.data)
        if order.get("void"):
            return message.failed("void")
        return message.put_data(order).put_batch_key(order["shop"])

    def handle_batch(self, batcher, messages, batch_info, context):
        folder = Path(context["folder"])
        with open(folder / "calls.jsonl", "a") as file:
            file.write(json.dumps(self.seen(messages, batch_info)) + "\\n")
        bad = json.loads((folder / "bad.json").read_text())
        return self.judged(messages, bad)
"""
PYTHON = """
    def seen(self, messages, batch_info):
        return [self.run.run_id, batch_info.batch_id, [each.data["n"] for each in messages]]

    def judged(self, messages, bad):
        return [m.failed("bad order") if m.data["n"] in bad else m for m in messages]
"""
SPARK = """
    def seen(self, messages, batch_info):
        rows = messages.orderBy("position").select("data.n").collect()
        return [self.run.run_id, batch_info.batch_id, [row.n for row in rows]]

    def judged(self, messages, bad):
        from airflow_broadway.spark import failed

        return failed(messages.where(messages.data.n.isin(bad)), reason="bad order")
"""


@dataclass
class Shop:
    """A pipeline in a module of its own, its queue and its staging root."""

    folder: Path
    module: str
    engine: str = "python"
    root: str = ""

    @property
    def staging(self) -> str:
        return self.root or f"file://{self.folder}/staging"

    @property
    def ref(self) -> str:
        return f"{self.module}:Orders"

    @property
    def queue(self) -> SqliteQueue:
        return SqliteQueue(self.folder / "queue.db", "orders")

    def bad(self, *numbers: int) -> None:
        """The orders that ``handle_batch`` fails from now on."""
        (self.folder / "bad.json").write_text(json.dumps(numbers))

    def calls(self) -> list[tuple[str, str, list[int]]]:
        """Run id, batch id and orders of each call of ``handle_batch`` since the last time."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [(run_id, batch_id, numbers) for run_id, batch_id, numbers in map(json.loads, lines)]

    def send(self, orders: Sequence[dict[str, Any]]) -> list[str]:
        return self.queue.send([json.dumps(order) for order in orders])

    # -- a run, stage by stage -----------------------------------------------------------------

    def load(self) -> Pipeline:
        info = RunInfo(dag_id=DAG_ID, run_id=RUN_ID)
        return load_ref({"class": self.ref, "options": {}}, info)

    def run(self, run_id: str = RUN_ID) -> StagedRun:
        store = open_store(self.staging)
        return StagedRun(store, pipeline="Orders", dag_id=DAG_ID, run_id=run_id)

    def process(self, run_id: str = RUN_ID) -> tuple[StagedRun, BatchPlan]:
        """Receive and stage what the queue has, and plan its batches."""
        run, pipeline = self.run(run_id), self.load()
        self.queue.create()
        owner = Task(dag_id=DAG_ID, run_id=run_id, task_id="process").owner()
        env = producer_env(
            pipeline, Ports(), generation=uuid.uuid4().hex, owner=owner, store=run.store
        )
        reference = Process(run, pipeline, env=env, budget=Budget(max_seconds=30.0)).run()
        plan = plan_batches(run, pipeline, "default", [reference["generation"]], try_label="1")
        return run, plan

    def handle(self, run: StagedRun, plan: BatchPlan) -> None:
        """Handle the batches: in Python; of Spark's only the outcomes are written."""
        if self.engine == "python":
            PythonBatches(run, self.load(), plan).run()
            return
        for planned, _ in Recorded(run).outcomes(plan):
            outcome = Outcome(
                batch_id=planned.batch_id,
                batcher="default",
                plan=plan.path,
                successful=planned.size,
                failed=0,
            )
            run.files.create(paths.outcome(plan.path, planned.batch_id), outcome.dumps())
        work = Work(
            name="handle_batches",
            try_number=1,
            pipeline={"class": self.ref, "options": {}},
            run=RunInfo(dag_id=DAG_ID, run_id=RUN_ID).to_json(),
            plans=[plan.path],
        )
        run.files.create(paths.of_try(work.name, 1), work.dumps())

    def settle(self, run: StagedRun) -> dict[str, Any]:
        settler = RunWatcher(run, self.load())
        settler.settle(final=True)
        report = settler.report(failed_tasks=[])
        settler.close()
        return report

    def settled_run(self, run_id: str = RUN_ID) -> StagedRun:
        """A whole run."""
        run, plan = self.process(run_id)
        self.handle(run, plan)
        self.settle(run)
        return run


def make_shop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, engine: str = "python", size: int = 2
) -> Shop:
    """A shop whose module lies in a folder of Dag files that only Airflow's configuration names."""
    dags = folder / "dags"
    dags.mkdir()
    (folder / "staging").mkdir()
    module = f"orders_{uuid.uuid4().hex[:8]}"
    options = f'engine="python", batch_size={size}'
    if engine == "spark":
        options = f'schema="n bigint, shop string", batch_size={size}'
    text = MODULE.format(name="Orders", folder=folder, options=options)
    methods = {"python": PYTHON, "spark": SPARK}[engine]
    (dags / f"{module}.py").write_text(textwrap.dedent(text) + methods)
    monkeypatch.setenv("AIRFLOW__CORE__DAGS_FOLDER", str(dags))
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{folder}/staging")
    monkeypatch.syspath_prepend(str(dags))
    shop = Shop(folder, module, engine)
    shop.bad()
    return shop


class Ran:
    """The result of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The error, which is the only line there is."""
        assert self.code == 2, (self.out, self.err)
        assert not self.out
        [line] = self.err.splitlines()
        return line


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ran:
    """Run a command in this process."""
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = int(str(exit_.code))
    found = capsys.readouterr()
    return Ran(code, found.out, found.err)
