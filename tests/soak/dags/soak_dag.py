"""The DAG of ``make soak``: process, batch and ack of bounded runs, two of them at a time."""

from __future__ import annotations

import json
import os
import resource
from itertools import count
from typing import Any

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.producers import RabbitMQProducer
from airflow_broadway.sinks import ParquetFolder

_handled = count()


def record_cost(context: Any) -> None:
    """Writes the processor seconds, the peak memory and the messages of a task's process."""
    ti = context["ti"]
    own, children = (
        resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    cost = {
        "run_id": ti.run_id,
        "task": ti.task_id.split(".")[1],
        "handled": next(_handled),
        "cpu": sum(usage.ru_utime + usage.ru_stime for usage in (own, children)),
        "peak": max(own.ru_maxrss, children.ru_maxrss) * 1024,
    }
    with open(f"{os.environ['SOAK_FOLDER']}/costs.jsonl", "a") as file:
        file.write(json.dumps(cost) + "\n")


class Soak(Broadway):
    """A row is its message's number and time."""

    producer = RabbitMQProducer(queue="soak", conn_id="soak", on_failure="retry")
    processors = Processors(concurrency=1, max_demand=500)
    batchers = {
        "default": Batcher(
            engine="python",
            schema="n bigint, sent double",
            batch_size=50_000,
            sink=ParquetFolder(path=f"{os.environ.get('SOAK_FOLDER')}/rows"),
        )
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        next(_handled)
        return message.put_data(json.loads(message.data))


dag = Soak().dag(
    "soak",
    max_active_runs=2,
    process={
        "max_messages": int(os.environ.get("SOAK_RUN", "200000")),
        "max_seconds": 600.0,
        "wait_seconds": 20.0,
        "idle_seconds": 5.0,
    },
    default_args={"on_success_callback": record_cost},
)
