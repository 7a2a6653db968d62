"""How long a task works: its budgets, where they come from, and what bounds a stop."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.adapters.host import Host
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.pull import BUDGET_DEFAULTS, budget_of
from airflow_broadway.runs.process import Process
from airflow_broadway.runs.python_batches import PythonBatches
from airflow_broadway.runs.sources.choice import PARAMS
from airflow_broadway.task_group import make_params
from tests.unit.operators.context import task_context
from tests.unit.runs.steps import Run, Sums

GUIDE = Path(__file__).parents[3] / "docs" / "operators.md"

#: What each budget is set to, as an argument and as a param.
SET: dict[str, tuple[Any, Any]] = {
    "max_messages": (7, 5),
    "max_bytes": (70, 50),
    "max_seconds": (7.0, 5.0),
    "wait_seconds": (7.0, 5.0),
    "idle_seconds": (7.0, 5.0),
}


def budget(params: dict[str, Any] | None = None, **options: Any) -> Budget:
    """The budget of a process task."""
    operator = BroadwayProcessorOperator(task_id="process", pipeline=Sums, **options)
    context: Any = {**task_context(), "params": params or {}}
    return budget_of(operator, Host(context))


def test_guide_names_each_budget_with_its_default():
    rows = re.findall(r"^\| `(\w+_\w+)` \| (\w+) \|", GUIDE.read_text("utf-8"), re.MULTILINE)

    documented = {name: None if default == "none" else float(default) for name, default in rows}

    assert documented == dict(BUDGET_DEFAULTS)
    assert budget() == Budget(**BUDGET_DEFAULTS)


#: The choice of dead letters is in a run's conf alone.
FORM = [name for name in PARAMS if name != "dead_letters"]


def test_budget_params_override_arguments():
    arguments = {name: argument for name, (argument, _) in SET.items()}
    unset = {name: param.value for name, param in make_params().items()}
    assert unset == {**dict.fromkeys([*SET, *FORM]), "dry_run": False}

    assert budget(unset, **arguments) == Budget(**arguments)
    for name, (_, param) in SET.items():
        expected = {**arguments, name: param}
        assert budget({**unset, name: param}, **arguments) == Budget(**expected)


@pytest.mark.parametrize(
    ("options", "params", "seconds"),
    [
        ({}, {}, 80.0),
        ({"max_seconds": 80.5}, {}, 80.0),
        ({"max_seconds": 79.5}, {}, 79.5),
        ({"max_seconds": None, "max_messages": 5}, {}, 80.0),
        ({}, {"max_seconds": 3600.0}, 80.0),
    ],
)
def test_no_message_begins_after_four_fifths_of_execution_timeout(options, params, seconds):
    budgets = budget(params, execution_timeout=timedelta(seconds=100), **options)

    assert budgets.max_seconds == seconds


@pytest.mark.parametrize(("shutdown", "seconds"), [(30.0, 2.0), (2.5, 2.0), (1.5, 1.5)])
def test_stopped_task_has_two_seconds_at_most(tmp_path, shutdown, seconds):
    run = Run(tmp_path, shutdown=shutdown)
    owner = {"task_id": "process", "map_index": 0, "try_number": 1}
    plan: Any = SimpleNamespace(batcher="default", generations=[], path="batches/default/p")

    process = Process(
        run.staged, run.pipeline, env=run.env("a" * 32, owner), budget=Budget(), ports=run.ports
    )
    batches = PythonBatches(run.staged, run.pipeline, plan, ports=run.ports)

    assert (process._stop.shutdown, batches._stop.shutdown) == (seconds, seconds)
