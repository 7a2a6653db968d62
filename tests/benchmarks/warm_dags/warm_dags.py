"""The DAGs of ``make bench ARGS="--only warm"``, which are started by backlog events.

``<shape>_<queue>_<table>``: ``run`` is one task; ``staged`` has the tasks process, batch and ack;
``connect`` runs its batch on a Spark Connect server; ``bare`` is trivial.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import product
from typing import Any

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG
from warm_connect import ConnectPipeline  # type: ignore[import-not-found]

from airflow_broadway import Batcher, Broadway, Message, Processors, backlog
from airflow_broadway.producers import RabbitMQProducer, SqliteProducer
from airflow_broadway.sinks import DeltaTable, ParquetFolder

PRODUCERS: dict[str, Any] = {"sqlite": SqliteProducer, "rabbitmq": RabbitMQProducer}
SINKS: dict[str, Any] = {"parquet": ParquetFolder, "delta": DeltaTable}
#: Budget of a process task under a constant load, and seconds between two backlog checks.
SECONDS = {"run": 20.0, "staged": 2.0}
POLL = 0.5


def record_process(context: Any) -> None:
    """Records the loaded modules and the CPU seconds of a successful task's process."""

    ti = context["ti"]
    cost = [ti.dag_id, ti.task_id, len(sys.modules), time.process_time()]
    with open(f"{os.environ['WARM_TABLES']}/processes", "a") as file:
        file.write(json.dumps(cost) + "\n")


class WarmPipeline(Broadway):
    """Writes rows with the message and the time of the callback."""

    processors = Processors(concurrency=1, max_demand=500)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data({**json.loads(message.data), "handled": time.time()})


def pipeline(name: str, queue: str, table: str) -> Any:
    """A class for each DAG, found by its name in this file."""
    batcher = Batcher(
        engine="python",
        schema="n bigint, sent double, handled double",
        batch_size=2_000,
        batch_timeout=0.2,
        sink=SINKS[table](path=f"{os.environ['WARM_TABLES']}/{name}"),
    )
    producer = PRODUCERS[queue](queue=name, conn_id=f"warm_{queue}")
    fields = {"producer": producer, "batchers": {"default": batcher}, "__module__": __name__}
    globals()[name] = made = type(name, (WarmPipeline,), fields)
    return made()


ARGS: dict[str, Any] = {"default_args": {"on_success_callback": record_process}}

for shape, queue, table in product(SECONDS, PRODUCERS, SINKS):
    name = f"{shape}_{queue}_{table}"
    warm = pipeline(name, queue, table)
    budget = {"idle_seconds": 0.2, "max_seconds": SECONDS[shape]}
    schedule = backlog(min_messages=1, poke_interval=POLL)
    bounds: Any = {"process" if shape == "staged" else "run": budget}
    globals()[f"{name}_dag"] = warm.dag(name, schedule=schedule, **bounds, **ARGS)

connected = ConnectPipeline().dag(
    "connect_sqlite_parquet",
    schedule=backlog(min_messages=1, poke_interval=POLL),
    process={"idle_seconds": 0.2, "max_seconds": 2.0},
    spark={"conn_id": "warm_connect"},
    **ARGS,
)

with DAG("bare", schedule=None, **ARGS):
    PythonOperator(task_id="nothing", python_callable=lambda: None)
