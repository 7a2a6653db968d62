"""One run's halves over a client in memory, on a manual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Broadway
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.runs.process import Process
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.testing import ManualClock
from tests.fake_sqs import URL, FakeSqs, installed
from tests.unit.producers.halves import Halves, generation_env, settlement, take

__all__ = ["FIFO", "SqsHalves", "halves", "options", "process_of", "settlement", "take"]

FIFO = f"{URL}.fifo"


class SqsHalves(Halves):
    """A source and a custodian of one generation at a fake SQS."""

    def __init__(self, fake: FakeSqs, env: ProducerEnv, producer: SqsProducer) -> None:
        self.fake = fake
        self.clock: Any = fake.clock
        super().__init__(producer, env)

    def take_new(self, bodies: Sequence[str], **more: Any) -> list[Message]:
        """Sends messages to the queue, and receives all there are."""
        self.fake.put(bodies, **more)
        return self.take()


def options(**options: Any) -> pytest.MarkDecorator:
    """Runs a test on halves with these options; ``staged=True``: with a staging folder."""
    return pytest.mark.parametrize("run", [options], indirect=True, ids=[" ".join(options)])


@contextmanager
def halves(
    staging: str | None = None,
    *,
    fake: FakeSqs | None = None,
    stopping: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Iterator[SqsHalves]:
    """Opens the halves of a fresh generation; one request at a time by default."""
    fake = fake or FakeSqs(ManualClock())
    defaults = {"queue_url": URL, "receive_concurrency": 1, "lease": 600.0}
    producer = SqsProducer(**{**defaults, **options})
    env = generation_env(fake.clock, staging, stopping)
    with installed(fake), closing(SqsHalves(fake, env, producer)) as run:
        yield run


def process_of(
    fake: FakeSqs, pipeline: Broadway, folder: Path, budget: Budget, generation: str = "g"
) -> tuple[Process, StagedRun]:
    """A process task, ready to run, and the run that it belongs to."""
    store = Store.open(f"file://{folder}/staging")
    staged = StagedRun(store, pipeline=pipeline.name, dag_id="d", run_id="r", clock=fake.clock)
    owner = {"dag_id": "d", "run_id": "r", "task_id": "process", "map_index": 0, "try_number": 1}
    env = ProducerEnv(
        pipeline=pipeline.name,
        generation=generation,
        owner=owner,
        clock=fake.clock,
        staging=f"{store.uri}/{pipeline.name}",
    )
    return Process(staged, pipeline, env=env, budget=budget), staged
