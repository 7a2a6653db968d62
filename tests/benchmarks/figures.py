"""Helpers that measure the figures of ``make bench``."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from scripts.airflow_env import airflow_env
from scripts.local_airflow import LocalAirflow, free_port

_DAGS = Path(__file__).parent / "dags"

#: ``{"name", "value", "unit"}``, and optionally ``"ratio"`` to the figure ``"of"``.
Figures = list[dict[str, Any]]


class Measurement(NamedTuple):
    """The measured cost of one try."""

    messages: int
    seconds: float
    cpu: float
    requests: int = 0

    @property
    def rate(self) -> float:
        """Messages per second."""
        return self.messages / self.seconds

    @property
    def cpu_per_message(self) -> float:
        """CPU time per message in microseconds."""
        return 1e6 * self.cpu / self.messages


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Creates a folder that is removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="broadway-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def measure(module: str, *arguments: str, **options: Any) -> Any:
    """Runs a benchmark module in a separate process; returns its last output line, JSON."""
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", *arguments, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join([module, *arguments])} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def print_measurement(name: str, measurement: Measurement) -> None:
    """Prints the measurement of a try as progress."""
    print(
        f"  {name}: {measurement.rate:,.0f} msg/s in {measurement.seconds:.1f} s",
        file=sys.stderr,
        flush=True,
    )


def airflow_for(folder: Path, conn_id: str, connection: Any) -> LocalAirflow:
    """Creates a real Airflow with the benchmarks' DAGs and a connection."""
    env = airflow_env(port=free_port(), home=folder / "airflow", dags=_DAGS)
    env["PYTHONPATH"] += f":{_DAGS.parents[2] / 'dags'}"
    env[f"AIRFLOW_CONN_{conn_id.upper()}"] = json.dumps(connection)
    parts = ("api-server", "scheduler", "dag-processor")
    return LocalAirflow(env, folder / "logs", components=parts)


def rate(name: str, messages: int, seconds: float) -> dict[str, Any]:
    """Returns a figure in messages per second."""
    return {"name": name, "value": round(messages / seconds), "unit": "msg/s"}


def memory(name: str, peak: int) -> dict[str, Any]:
    """Returns a figure of peak memory, given in bytes."""
    return {"name": f"{name}.peak", "value": round(peak / 2**20), "unit": "MiB"}


def duration(name: str, tries: Sequence[float]) -> dict[str, Any]:
    """Returns a figure with the median of seconds."""
    return {"name": name, "value": round(statistics.median(tries), 2), "unit": "s"}


def median(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    digits: int | None = None,
    of: str = "",
    ratios: Sequence[float] = (),
) -> dict[str, Any]:
    """Returns a figure with the median of tries, and optionally of their ratios."""
    figure = {"name": name, "value": round(statistics.median(values), digits), "unit": unit}
    if ratios:
        figure |= {"ratio": round(statistics.median(ratios), 2), "of": of}
    return figure


def time_dag_run(airflow: LocalAirflow, dag_id: str) -> float:
    """Runs a DAG; returns the seconds from the run's start to its end."""
    run = airflow.trigger(dag_id)
    state = airflow.wait_for_run(dag_id, run, timeout=1_800)
    if state != "success":
        raise RuntimeError(f"{dag_id} ended as {state}")
    dag_run = airflow.dag_run(dag_id, run)
    started, ended = (datetime.fromisoformat(dag_run[name]) for name in ("start_date", "end_date"))
    return (ended - started).total_seconds()
