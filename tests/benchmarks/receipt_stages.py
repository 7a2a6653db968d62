"""The common figures of SQS and Pub/Sub: a process stage, and the settlement of all
that it received, over a broker of receipts.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from tests.benchmarks.figures import Figures, Took, measure, median


class Counted(Protocol):
    """Counts the requests of this process's clients."""

    count: int


def stages(
    requests: Counted,
    pipeline_class: str,
    producer: Mapping[str, Any],
    folder: str,
    messages: int,
    *,
    runs: int = 1,
    **env_of: Any,
) -> dict[str, Took]:
    """The stages of a run that use the broker.

    :param producer: The producer's options.
    :param runs: In so many runs, of as many messages each; one is settled before the next begins.
    :param env_of: The producer's environment, in addition to that of every run.
    """
    import pyarrow.parquet

    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.core.custody.protocol import Settlement
    from airflow_broadway.core.custody.verdicts import ACK
    from airflow_broadway.core.model.run_info import RunInfo
    from airflow_broadway.core.reference import load_ref
    from airflow_broadway.core.stages.receiving import Budget
    from airflow_broadway.runs.process import Process
    from airflow_broadway.staging.run_folder import StagedRun
    from airflow_broadway.staging.store import Store

    reference = {"class": pipeline_class, "options": {"producer": producer}}
    pipeline = load_ref(reference, RunInfo())
    store = Store.open(f"file://{folder}/staging")
    item = messages // runs

    def env_for(run_id: str) -> ProducerEnv:
        owner = {"dag_id": "bench", "run_id": run_id, "task_id": "process"}
        return ProducerEnv(
            pipeline=pipeline.name,
            generation=uuid.uuid4().hex,
            owner={**owner, "map_index": 0, "try_number": 1},
            staging=f"{store.uri}/{pipeline.name}",
            **env_of,
        )

    def one_run(run_id: str) -> dict[str, Took]:
        run = StagedRun(store, pipeline=pipeline.name, dag_id="bench", run_id=run_id)
        env = env_for(run_id)
        results: dict[str, Any] = {}

        def process() -> None:
            budget = Budget(max_messages=item)
            results.update(Process(run, pipeline, env=env, budget=budget).run())

        def settle() -> None:
            [record] = run.generations()
            # As another process: nothing is left of what this one held in memory.
            custodian = pipeline.producer.custodian(env)
            report = custodian.settle(run.lease(record), Settlement(rest=ACK, expected=item))
            custodian.close()
            if report.acked != item:
                raise RuntimeError(f"settled {report}")

        took = {"process": timed(requests, item, process)}
        if results["received"] != item:
            raise RuntimeError(f"received {results['received']} of {item}")
        return {**took, "settle": timed(requests, item, settle)}

    # What is loaded lazily is loaded before the clock starts, as it is of the other; so is pandas,
    # by the first array of a process.
    pipeline.producer.source(env_for("warm")).close()
    pyarrow.array([""])
    first, *others = [one_run(f"run-{number}") for number in range(runs)]
    for more in others:
        first = {name: joined(took, more[name]) for name, took in first.items()}
    return first


def timed(requests: Counted, messages: int, work: Callable[[], None]) -> Took:
    """Measures some work."""
    sent, cpu, begun = requests.count, time.process_time(), time.perf_counter()
    work()
    seconds, used = time.perf_counter() - begun, time.process_time() - cpu
    return Took(messages, seconds, used, requests.count - sent)


def apart(module: str, name: str, **given: Any) -> dict[str, Took]:
    """Measures a worker's stage in a process of its own."""
    return {key: Took(*value) for key, value in measure(module, name, **given).items()}


def with_run(took: Mapping[str, Took]) -> dict[str, Took]:
    """Figures of both stages together, next to each stage's own."""
    return {**took, "run": added(took["process"], took["settle"])}


def added(one: Took, two: Took) -> Took:
    """One thing after the other, with the same messages."""
    return joined(one, two)._replace(messages=one.messages)


def joined(one: Took, two: Took) -> Took:
    """One thing after the other, with other messages."""
    return Took(
        one.messages + two.messages,
        one.seconds + two.seconds,
        one.cpu + two.cpu,
        one.requests + two.requests,
    )


def rates(part: str, taken: Mapping[str, list[Took]], of: Mapping[str, str]) -> Figures:
    """Messages a second, and how much of the bare client's that is, in the same try.

    :param of: What is compared with what.
    """
    figures: Figures = []
    for name, tries, bare in _compared(taken, of):
        ratios = [one.rate / other.rate for one, other in zip(tries, bare, strict=False)]
        rates_ = [attempt.rate for attempt in tries]
        other = f"{part}.{of.get(name, '')}"
        figures.append(median(f"{part}.{name}", rates_, "msg/s", of=other, ratios=ratios))
    return figures


def processor(part: str, taken: Mapping[str, list[Took]], of: Mapping[str, str]) -> Figures:
    """The client's processor time for a message, and how much of it the bare client takes too.

    :param of: What is compared with what.
    """
    figures: Figures = []
    for name, tries, bare in _compared(taken, of):
        ratios = [other.cpu / one.cpu for one, other in zip(tries, bare, strict=False)]
        seconds = [attempt.cpu_of_each for attempt in tries]
        other = f"{part}.{of.get(name, '')}.cpu"
        figures.append(
            median(f"{part}.{name}.cpu", seconds, "us/msg", digits=1, of=other, ratios=ratios)
        )
    return figures


def _compared(
    taken: Mapping[str, list[Took]], of: Mapping[str, str]
) -> Iterator[tuple[str, list[Took], list[Took]]]:
    """Each thing with its tries, and those of what it is compared with."""
    for name, tries in taken.items():
        yield name, tries, taken[of[name]] if name in of else []


def serve(
    requests: Counted, bare: Callable[..., dict[str, Took]], ours: Callable[..., dict[str, Took]]
) -> None:
    """Does what the command line of a worker names, and prints what it took."""
    work = {"bare": bare, "ours": ours}[sys.argv[1]]
    print(json.dumps(work(requests, **json.loads(sys.argv[2]))))


def requests_of(name: str, tries: list[Took]) -> dict[str, Any]:
    """Requests for a message, from its receipt to its end."""
    return median(
        name, [attempt.requests / attempt.messages for attempt in tries], "req/msg", digits=4
    )
