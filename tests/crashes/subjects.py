"""The subjects of the crash campaign, by broker.

An entry opens a broker's server and yields a function that makes a subject of a pipeline and a
folder.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from airflow_broadway import Broadway
from airflow_broadway.testing.crashes.subject import Embedded, Subject

MakeSubject = Callable[[type[Broadway], Path], Subject]


def _lazy(place: str, **options: Any) -> AbstractContextManager[MakeSubject]:
    """Opens subjects by the name of their maker, whose module may need a client or Airflow."""
    module, name = place.split(".")
    opened: AbstractContextManager[MakeSubject] = getattr(
        import_module(f"tests.crashes.{module}"), name
    )(**options)
    return opened


SUBJECTS: dict[str, Callable[[], AbstractContextManager[MakeSubject]]] = {
    "sqlite": lambda: nullcontext(Embedded),
    "sqlite by operators": partial(_lazy, "operators.by_operators"),
    "sqlite past run": partial(_lazy, "subjects_past.over_past_runs"),
    "rabbitmq": partial(_lazy, "subjects_rabbitmq.rabbit"),
    "sqlite on s3": partial(_lazy, "subjects_s3.over_s3"),
    "kafka": partial(_lazy, "subjects_kafka.over_kafka", order="none"),
    "kafka key": partial(_lazy, "subjects_kafka.over_kafka", order="key"),
    "pubsub": partial(_lazy, "subjects_pubsub.over_pubsub", ordered=False),
    "pubsub ordered": partial(_lazy, "subjects_pubsub.over_pubsub", ordered=True),
    "sqs": partial(_lazy, "subjects_sqs.over_sqs", fifo=False),
    "sqs fifo": partial(_lazy, "subjects_sqs.over_sqs", fifo=True),
    "sqlite backfill": partial(_lazy, "subjects_backfill.over_backfills"),
    **{
        f"{broker} letters": partial(_lazy, "subjects_letters.over_letters", broker=broker)
        for broker in ("sqlite", "rabbitmq", "kafka", "pubsub", "sqs")
    },
}
