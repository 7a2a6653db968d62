"""The subjects of the crash campaigns by name.

An entry is a context manager that starts a broker and yields a function that creates subjects.
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
    """Opens subjects by the path of a function, whose module may need a client or Airflow."""
    module, name = place.split(".")
    opened: AbstractContextManager[MakeSubject] = getattr(
        import_module(f"tests.crashes.{module}"), name
    )(**options)
    return opened


SUBJECTS: dict[str, Callable[[], AbstractContextManager[MakeSubject]]] = {
    "sqlite": lambda: nullcontext(Embedded),
    "sqlite by operators": partial(_lazy, "operators.open_subjects"),
    "sqlite rerun": partial(_lazy, "subjects_rerun.open_subjects"),
    "rabbitmq": partial(_lazy, "subjects_rabbitmq.open_subjects"),
    "sqlite on s3": partial(_lazy, "subjects_s3.open_subjects"),
    "kafka": partial(_lazy, "subjects_kafka.open_subjects", order="none"),
    "kafka key": partial(_lazy, "subjects_kafka.open_subjects", order="key"),
    "pubsub": partial(_lazy, "subjects_pubsub.open_subjects", ordered=False),
    "pubsub ordered": partial(_lazy, "subjects_pubsub.open_subjects", ordered=True),
    "sqs": partial(_lazy, "subjects_sqs.open_subjects", fifo=False),
    "sqs fifo": partial(_lazy, "subjects_sqs.open_subjects", fifo=True),
    "sqlite backfill": partial(_lazy, "subjects_backfill.open_subjects"),
    **{
        f"{broker} letters": partial(_lazy, "subjects_dead_letters.open_subjects", broker=broker)
        for broker in ("sqlite", "rabbitmq", "kafka", "pubsub", "sqs")
    },
}
