"""Every broker's subject, by name: what the campaign runs over.

A broker comes by registering itself here: a context in which its server is there, which gives what
makes a subject of a pipeline and a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from airflow_broadway import Broadway
from airflow_broadway.testing.crashes import Embedded, Subject

MakeSubject = Callable[[type[Broadway], Path], Subject]


@contextmanager
def _embedded() -> Iterator[MakeSubject]:
    yield Embedded


@contextmanager
def _by_operators() -> Iterator[MakeSubject]:
    from tests.crashes.operators import by_operators  # it loads Airflow

    with by_operators() as make:
        yield make


@contextmanager
def _past_runs() -> Iterator[MakeSubject]:
    from tests.crashes.subjects_past import over_past_runs

    with over_past_runs() as make:
        yield make


@contextmanager
def _rabbitmq() -> Iterator[MakeSubject]:
    from tests.crashes.subjects_rabbitmq import rabbit  # it needs a client that others do not

    with rabbit() as make:
        yield make


@contextmanager
def _sqs(*, fifo: bool) -> Iterator[MakeSubject]:
    from tests.crashes.subjects_sqs import over_sqs

    with over_sqs(fifo=fifo) as make:
        yield make


@contextmanager
def _on_s3() -> Iterator[MakeSubject]:
    from tests.crashes.subjects_s3 import over_s3

    with over_s3() as make:
        yield make


@contextmanager
def _kafka(*, order: str) -> Iterator[MakeSubject]:
    from tests.crashes.subjects_kafka import over_kafka

    with over_kafka(order=order) as make:
        yield make


@contextmanager
def _pubsub(*, ordered: bool) -> Iterator[MakeSubject]:
    from tests.crashes.subjects_pubsub import over_pubsub

    with over_pubsub(ordered=ordered) as make:
        yield make


@contextmanager
def _backfills() -> Iterator[MakeSubject]:
    from tests.crashes.subjects_backfill import over_backfills

    with over_backfills() as make:
        yield make


@contextmanager
def _letters(broker: str) -> Iterator[MakeSubject]:
    from tests.crashes.subjects_letters import over_letters

    with over_letters(broker) as make:
        yield make


SUBJECTS: dict[str, Callable[[], AbstractContextManager[MakeSubject]]] = {
    "sqlite": _embedded,
    "sqlite by operators": _by_operators,
    "sqlite past run": _past_runs,
    "rabbitmq": _rabbitmq,
    "sqlite on s3": _on_s3,
    "kafka": partial(_kafka, order="none"),
    "kafka key": partial(_kafka, order="key"),
    "pubsub": partial(_pubsub, ordered=False),
    "pubsub ordered": partial(_pubsub, ordered=True),
    "sqs": partial(_sqs, fifo=False),
    "sqs fifo": partial(_sqs, fifo=True),
    "sqlite backfill": _backfills,
    **{
        f"{broker} letters": partial(_letters, broker)
        for broker in ("sqlite", "rabbitmq", "kafka", "pubsub", "sqs")
    },
}
