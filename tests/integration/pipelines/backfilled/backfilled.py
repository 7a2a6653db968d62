"""A Kafka Dag whose past hours can be backfilled, and its pipeline, which records its messages.

A live run holds its first message until a file ``release`` exists.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, CronDataIntervalTimetable

from airflow_broadway import Broadway, Message, Processors, RunInfo
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.producers.kafka import KafkaProducer


class Backfilled(Broadway):
    producer = KafkaProducer(
        group_id="backfilled",
        topics=["hours"],
        conn_id="kafka_by_form",
        offset_reset_policy="earliest",
        lateness=60.0,
    )
    processors = Processors(concurrency=1)

    def setup(self, run: RunInfo) -> Any:
        return {**self.context, "run": run.run_id, "live": not run.source.is_backfill}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        folder = Path(context["folder"])
        if context["live"]:
            (folder / "live").touch()
            end = time.monotonic() + 240
            while not (folder / "release").exists() and time.monotonic() < end:
                time.sleep(0.1)
        with (folder / f"{context['run']}.handled").open("a") as file:
            file.write(f"{int(message.data)} {int(message.redelivered)}\n")
        return message


with DAG(
    "backfilled",
    schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=5,
    params=Backfilled.params(),
):
    BroadwayRunOperator(
        task_id="run", pipeline=Backfilled(context={"folder": "{{ var.value.backfilled_folder }}"})
    )
