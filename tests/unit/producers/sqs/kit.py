"""One run's halves over a client in memory, on a clock that is moved by hand."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from airflow_broadway import Broadway
from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Custodian, Entry, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.engine.custodian import EngineCustodian
from airflow_broadway.producers.engine.source import EngineSource
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.runs.process import Process
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.testing import ManualClock
from tests.fake_sqs import URL, FakeSqs, installed

FIFO = f"{URL}.fifo"


class Halves:
    """A source and a custodian of one generation."""

    def __init__(self, fake: FakeSqs, clock: ManualClock, env: ProducerEnv, producer: SqsProducer):
        self.fake = fake
        self.clock = clock
        self.env = env
        self.producer = producer
        self.source: EngineSource = producer.source(env)  # type: ignore[assignment]
        self.custodian: EngineCustodian = producer.custodian(env)  # type: ignore[assignment]

    def take(self, demand: int = 100_000) -> list[Message]:
        return take(self.source, demand)

    def take_new(self, bodies: Sequence[str], **more: Any) -> list[Message]:
        """Put messages into the queue, and take all there are."""
        self.fake.put(bodies, **more)
        return self.take()

    def settle(
        self,
        messages: Sequence[Message],
        verdicts: dict[str, Verdict] | None = None,
        rest: Verdict = ACK,
    ) -> SettleReport:
        """Settle by a manifest that names ``messages``; ``verdicts`` by body."""
        return self.custodian.settle(self.source.lease, settlement(messages, verdicts, rest))

    def other(self) -> Custodian:
        """A custodian as another process opens it: it knows what is written down."""
        return self.producer.custodian(self.env)

    def close(self) -> None:
        self.source.close()
        self.custodian.close()


def take(source: Any, demand: int = 100_000) -> list[Message]:
    """Receive and secure until the queue is quiet."""
    taken: list[Message] = []
    while len(taken) < demand:
        portion = source.secure(source.receive(min(1000, demand - len(taken)), timeout=0))
        if not portion:
            break
        taken += portion
    return taken


@contextmanager
def halves(
    staging: str | None = None,
    *,
    fake: FakeSqs | None = None,
    stopping: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Iterator[Halves]:
    """The halves of a fresh generation; requests one at a time unless told otherwise."""
    clock = ManualClock()
    if fake is None:
        fake = FakeSqs(clock)
    else:
        clock = fake.clock  # type: ignore[assignment]
    given = {"queue_url": URL, "receive_concurrency": 1, "lease": 600.0, **options}
    env = ProducerEnv(
        generation=uuid.uuid4().hex,
        owner={"dag_id": "d", "run_id": "r", "task_id": "process", "map_index": -1},
        clock=clock,
        shared=staging,
        stopping=stopping,
    )
    with installed(fake):
        made = Halves(fake, clock, env, SqsProducer(**given))
        try:
            yield made
        finally:
            made.close()


def settlement(
    messages: Sequence[Message], verdicts: dict[str, Verdict] | None = None, rest: Verdict = ACK
) -> Settlement:
    """The settlement of a manifest that names ``messages``; ``verdicts`` by body."""
    given = verdicts or {}

    def entries() -> Iterator[Entry]:
        for message in messages:
            verdict = given.get(message.data.decode())
            if verdict is not None:
                yield entry_of(message, verdict)

    return Settlement(
        rest=rest,
        entries=entries,
        everything=lambda: (entry_of(message, rest) for message in messages),
        expected=len(messages),
    )


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
