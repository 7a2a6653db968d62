"""The demo's pipeline, stage by stage and as a whole, at three sizes; batch keys; fixed costs."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import airflow_env
from scripts.load_flights import FLIGHTS, flights, load
from scripts.local_airflow import LocalAirflow, free_port
from tests.benchmarks.stages import run_stage

SIZES = {"10k": 10_000, "100k": 100_000, "336k": FLIGHTS}
KEYS = (10, 1_000, 100_000)
KEYED_MESSAGES = 100_000

#: Beyond so many batches their calls are not run, only planned: half an hour of one bench.
MOST_BATCHES = 1_000

#: Figure → the figure of the same run that it is compared with.
COMPARED = {
    "run.empty": "run.bare",
    "run.one_message": "run.bare_spark",
    **{f"flights.{label}.run": f"flights.{label}.process" for label in SIZES},
    **{f"flights.{label}.process": "sqlite.receive_settle" for label in SIZES},
    **{f"keys.{keys}.merged.batch": f"keys.{keys}.batch" for keys in KEYS},
    **{f"keys.{keys}.batch": f"keys.{KEYS[0]}.batch" for keys in KEYS[1:]},
}

DAGS = Path(__file__).parent / "dags"

Figures = list[dict[str, Any]]


@contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="broadway-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _rate(
    name: str, messages: int, seconds: float, of: tuple[str, float] | None = None
) -> dict[str, Any]:
    figure = {"name": name, "value": round(messages / seconds), "unit": "msg/s"}
    if of is not None:
        figure |= {"ratio": round(messages / seconds / of[1], 3), "of": of[0]}
    return figure


def _peak(name: str, peak: int) -> dict[str, Any]:
    return {"name": f"{name}.peak", "value": round(peak / 2**20), "unit": "MiB"}


def bench_stages(sizes: dict[str, int]) -> Figures:
    """Messages per second and peak memory of each stage alone."""
    made: Figures = []
    for label, size in sizes.items():
        with _folder() as folder:
            queue = SqliteQueue(folder / "queue.db", "flights")
            begun = time.perf_counter()
            load(queue, flights(size))
            made.append(_rate(f"flights.{label}.load", size, time.perf_counter() - begun))
            ref = {
                "class": "flights_pipeline:Flights",
                "options": {
                    "producer": {"path": queue.path, "conn_id": None},
                    "context": {"output": str(folder / "output")},
                },
            }
            process = run_stage("process", folder=str(folder), ref=ref)
            made += [_rate(f"flights.{label}.process", size, process.seconds)]
            made += [_peak(f"flights.{label}.process", process.peak)]
            plans = [
                run_stage("plan", folder=str(folder), ref=ref, batcher=name)
                for name in ("delayed", "on_time")
            ]
            planned = sum(plan.result["messages"] for plan in plans)
            seconds = sum(plan.seconds for plan in plans)
            made.append(_rate(f"flights.{label}.batch", planned, seconds))
            made.append(_peak(f"flights.{label}.batch", max(plan.peak for plan in plans)))
            paths = [plan.result["plan"] for plan in plans]
            spark = run_stage("spark", folder=str(folder), ref=ref, plans=paths)
            made.append(_rate(f"flights.{label}.spark", planned, spark.seconds))
            made.append(_peak(f"flights.{label}.spark", spark.peak))
            settle = run_stage("settle", folder=str(folder), ref=ref)
            made.append(_rate(f"flights.{label}.settle", size, settle.seconds))
            made.append(_peak(f"flights.{label}.settle", settle.peak))
            queue.close()
    return made


def bench_keys() -> Figures:
    """What distinct batch keys cost, merged and not: planning always, the calls where they end."""
    made: Figures = []
    for keys in KEYS:
        for merged in (False, True):
            name = f"keys.{keys}{'.merged' if merged else ''}"
            with _folder() as folder:
                queue = SqliteQueue(folder / "queue.db", "bench")
                queue.send(
                    json.dumps({"n": n, "key": n % keys}).encode() for n in range(KEYED_MESSAGES)
                )
                ref = {
                    "class": "tests.benchmarks.pipelines:Keyed",
                    "options": {
                        "producer": {"path": queue.path},
                        "batchers": {"default": {"merge_keys": merged}},
                    },
                }
                run_stage("process", folder=str(folder), ref=ref)
                plan = run_stage("plan", folder=str(folder), ref=ref, batcher="default")
                batches = plan.result["batches"]
                made.append(_rate(f"{name}.batch", KEYED_MESSAGES, plan.seconds))
                made.append(_peak(f"{name}.batch", plan.peak))
                made.append({"name": f"{name}.batches", "value": batches, "unit": "batches"})
                if batches <= MOST_BATCHES:
                    spark = run_stage(
                        "spark", folder=str(folder), ref=ref, plans=[plan.result["plan"]]
                    )
                    made.append(_rate(f"{name}.spark", KEYED_MESSAGES, spark.seconds))
                queue.close()
    return made


def bench_runs(sizes: dict[str, int], tries: int) -> Figures:
    """The whole DAG under a real scheduler, and what a run costs that has nothing to do."""
    made: Figures = []
    with _folder() as folder:
        queue = SqliteQueue(folder / "queue.db", "flights")
        env = {
            **airflow_env(port=free_port(), home=folder / "airflow", dags=DAGS),
            "AIRFLOW_CONN_FLIGHTS_QUEUE": json.dumps(
                {"conn_type": "broadway_sqlite", "host": queue.path}
            ),
            "BENCH_OUTPUT": str(folder / "output"),
        }
        env["PYTHONPATH"] += f":{Path(__file__).parents[2] / 'dags'}"
        parts = ("api-server", "scheduler", "dag-processor")
        with LocalAirflow(env, folder / "logs", components=parts) as airflow:
            for dag_id in ("bench_flights", "bench_bare", "bench_bare_spark"):
                airflow.wait_for_dag(dag_id)
            bare = [_run(airflow, "bench_bare") for _ in range(tries)]
            bare_spark = [_run(airflow, "bench_bare_spark") for _ in range(tries)]
            empty = [_run(airflow, "bench_flights") for _ in range(tries)]
            single = []
            for _ in range(tries):
                load(queue, flights(1))
                single.append(_run(airflow, "bench_flights"))
            made += [
                _seconds("run.bare", bare),
                _seconds("run.empty", empty),
                _seconds("run.bare_spark", bare_spark),
                _seconds("run.one_message", single),
            ]
            for label, size in sizes.items():
                load(queue, flights(size))
                made.append(_rate(f"flights.{label}.run", size, _run(airflow, "bench_flights")))
        queue.close()
    return made


def _run(airflow: LocalAirflow, dag_id: str) -> float:
    """Seconds from the start to the end of one run."""
    run = airflow.trigger(dag_id)
    state = airflow.wait_for_run(dag_id, run, timeout=1_800)
    if state != "success":
        raise RuntimeError(f"{dag_id} ended as {state}")
    found = airflow.dag_run(dag_id, run)
    begun, ended = (datetime.fromisoformat(found[name]) for name in ("start_date", "end_date"))
    return (ended - begun).total_seconds()


def _seconds(
    name: str, tries: list[float], of: tuple[str, list[float]] | None = None
) -> dict[str, Any]:
    value = statistics.median(tries)
    figure: dict[str, Any] = {"name": name, "value": round(value, 2), "unit": "s"}
    if of is not None:
        figure |= {"ratio": round(value / statistics.median(of[1]), 3), "of": of[0]}
    return figure
