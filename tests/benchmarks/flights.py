"""The demo's pipeline by stage and as a whole, in three sizes; batch keys; fixed costs."""

from __future__ import annotations

import json
import time
from pathlib import Path

from airflow_broadway.producers.sqlite import SqliteQueue
from scripts.airflow_env import airflow_env
from scripts.load_flights import FLIGHTS, flights, load
from scripts.local_airflow import LocalAirflow, free_port
from tests.benchmarks.figures import Figures, duration, memory, rate, temporary_folder, time_dag_run
from tests.benchmarks.stages import run_stage

SIZES = {"10k": 10_000, "100k": 100_000, "336k": FLIGHTS}
KEYS = (10, 1_000, 100_000)
KEYED_MESSAGES = 100_000

#: Maximum number of batches that are run; more are only planned, which saves half an hour.
MOST_BATCHES = 1_000

#: The figures by the figure of the same run with which they are compared.
COMPARED = {
    "run.empty": "run.bare",
    "run.one_message": "run.bare_spark",
    **{f"flights.{label}.run": f"flights.{label}.process" for label in SIZES},
    **{f"flights.{label}.process": "sqlite.receive_settle" for label in SIZES},
    **{f"keys.{keys}.merged.batch": f"keys.{keys}.batch" for keys in KEYS},
    **{f"keys.{keys}.batch": f"keys.{KEYS[0]}.batch" for keys in KEYS[1:]},
}

DAGS = Path(__file__).parent / "dags"


def bench_stages(sizes: dict[str, int]) -> Figures:
    """Measures messages per second and peak memory of each stage."""
    figures: Figures = []
    for label, size in sizes.items():
        with temporary_folder() as folder:
            queue = SqliteQueue(folder / "queue.db", "flights")
            started = time.perf_counter()
            load(queue, flights(size))
            figures.append(rate(f"flights.{label}.load", size, time.perf_counter() - started))
            table = {"sink": {"path": str(folder / "output")}}
            ref = {
                "class": "flights_pipeline:Flights",
                "options": {
                    "producer": {"path": queue.path, "conn_id": None},
                    "batchers": dict.fromkeys(("delayed", "on_time"), table),
                },
            }
            process = run_stage("process", folder=str(folder), ref=ref)
            figures += [rate(f"flights.{label}.process", size, process.seconds)]
            figures += [memory(f"flights.{label}.process", process.peak)]
            plans = [
                run_stage("plan", folder=str(folder), ref=ref, batcher=name)
                for name in ("delayed", "on_time")
            ]
            planned = sum(plan.result["messages"] for plan in plans)
            seconds = sum(plan.seconds for plan in plans)
            figures.append(rate(f"flights.{label}.batch", planned, seconds))
            figures.append(memory(f"flights.{label}.batch", max(plan.peak for plan in plans)))
            paths = [plan.result["plan"] for plan in plans]
            spark = run_stage("spark", folder=str(folder), ref=ref, plans=paths)
            figures.append(rate(f"flights.{label}.spark", planned, spark.seconds))
            figures.append(memory(f"flights.{label}.spark", spark.peak))
            settle = run_stage("settle", folder=str(folder), ref=ref)
            figures.append(rate(f"flights.{label}.settle", size, settle.seconds))
            figures.append(memory(f"flights.{label}.settle", settle.peak))
            queue.close()
    return figures


def bench_keys() -> Figures:
    """Measures planning, and running up to a limit, of distinct batch keys, merged and not."""
    figures: Figures = []
    for keys in KEYS:
        for merged in (False, True):
            name = f"keys.{keys}{'.merged' if merged else ''}"
            with temporary_folder() as folder:
                queue = SqliteQueue(folder / "queue.db", "bench")
                queue.send(
                    json.dumps({"n": n, "key": n % keys}).encode() for n in range(KEYED_MESSAGES)
                )
                ref = {
                    "class": "tests.benchmarks.pipelines:KeyedPipeline",
                    "options": {
                        "producer": {"path": queue.path},
                        "batchers": {"default": {"merge_keys": merged}},
                    },
                }
                run_stage("process", folder=str(folder), ref=ref)
                plan = run_stage("plan", folder=str(folder), ref=ref, batcher="default")
                batches = plan.result["batches"]
                figures.append(rate(f"{name}.batch", KEYED_MESSAGES, plan.seconds))
                figures.append(memory(f"{name}.batch", plan.peak))
                figures.append({"name": f"{name}.batches", "value": batches, "unit": "batches"})
                if batches <= MOST_BATCHES:
                    spark = run_stage(
                        "spark", folder=str(folder), ref=ref, plans=[plan.result["plan"]]
                    )
                    figures.append(rate(f"{name}.spark", KEYED_MESSAGES, spark.seconds))
                queue.close()
    return figures


def bench_runs(sizes: dict[str, int], tries: int) -> Figures:
    """Measures the DAG under a real scheduler, and the fixed cost of a run."""
    figures: Figures = []
    with temporary_folder() as folder:
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
            bare = [time_dag_run(airflow, "bench_bare") for _ in range(tries)]
            bare_spark = [time_dag_run(airflow, "bench_bare_spark") for _ in range(tries)]
            empty = [time_dag_run(airflow, "bench_flights") for _ in range(tries)]
            single = []
            for _ in range(tries):
                load(queue, flights(1))
                single.append(time_dag_run(airflow, "bench_flights"))
            figures += [
                duration("run.bare", bare),
                duration("run.empty", empty),
                duration("run.bare_spark", bare_spark),
                duration("run.one_message", single),
            ]
            for label, size in sizes.items():
                load(queue, flights(size))
                figures.append(
                    rate(f"flights.{label}.run", size, time_dag_run(airflow, "bench_flights"))
                )
        queue.close()
    return figures
