"""The common benchmarks of SQS and Pub/Sub: a process stage and its settlement."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from tests.benchmarks.figures import Figures, Measurement, measure, median


class RequestCounter(Protocol):
    """Counts the requests of this process's clients."""

    count: int


def stages(
    requests: RequestCounter,
    pipeline_class: str,
    producer: Mapping[str, Any],
    folder: str,
    messages: int,
    *,
    runs: int = 1,
    **env_of: Any,
) -> dict[str, Measurement]:
    """Measures the stages of runs over a broker.

    :param producer: The producer's options.
    :param runs: The number of sequential runs, with the same number of messages each.
    :param env_of: Returns additional fields of the producer's environment.
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

    def one_run(run_id: str) -> dict[str, Measurement]:
        run = StagedRun(store, pipeline=pipeline.name, dag_id="bench", run_id=run_id)
        env = env_for(run_id)
        results: dict[str, Any] = {}

        def process() -> None:
            budget = Budget(max_messages=item)
            results.update(Process(run, pipeline, env=env, budget=budget).run())

        def settle() -> None:
            [record] = run.generations()
            # With new objects, as in another process.
            custodian = pipeline.producer.custodian(env)
            report = custodian.settle(run.lease(record), Settlement(rest=ACK, expected=item))
            custodian.close()
            if report.acked != item:
                raise RuntimeError(f"settled {report}")

        measurement = {"process": measure_work(requests, item, process)}
        if results["received"] != item:
            raise RuntimeError(f"received {results['received']} of {item}")
        return {**measurement, "settle": measure_work(requests, item, settle)}

    # Loads lazy imports before the measurement, including pandas, which the first array imports.
    pipeline.producer.source(env_for("warm")).close()
    pyarrow.array([""])
    first, *others = [one_run(f"run-{number}") for number in range(runs)]
    for more in others:
        first = {name: add_runs(measurement, more[name]) for name, measurement in first.items()}
    return first


def measure_work(requests: RequestCounter, messages: int, work: Callable[[], None]) -> Measurement:
    """Measures a function."""
    sent, cpu, started = requests.count, time.process_time(), time.perf_counter()
    work()
    seconds, used = time.perf_counter() - started, time.process_time() - cpu
    return Measurement(messages, seconds, used, requests.count - sent)


def measure_separately(module: str, name: str, **given: Any) -> dict[str, Measurement]:
    """Measures a worker's stages in a separate process."""
    return {key: Measurement(*value) for key, value in measure(module, name, **given).items()}


def add_totals(measurement: Mapping[str, Measurement]) -> dict[str, Measurement]:
    """Returns the measurements of both stages and of their sum."""
    return {**measurement, "run": add_stages(measurement["process"], measurement["settle"])}


def add_stages(one: Measurement, two: Measurement) -> Measurement:
    """Adds the measurements of two stages of the same messages."""
    return add_runs(one, two)._replace(messages=one.messages)


def add_runs(one: Measurement, two: Measurement) -> Measurement:
    """Adds the measurements of two runs of different messages."""
    return Measurement(
        one.messages + two.messages,
        one.seconds + two.seconds,
        one.cpu + two.cpu,
        one.requests + two.requests,
    )


def rates(
    part: str, measurements: Mapping[str, list[Measurement]], of: Mapping[str, str]
) -> Figures:
    """Returns messages per second, and the ratios to the bare client in the same try.

    :param of: The names of the compared figures.
    """
    return list(_compare(part, measurements, of, "", "msg/s", lambda one: one.rate))


def processor(
    part: str, measurements: Mapping[str, list[Measurement]], of: Mapping[str, str]
) -> Figures:
    """Returns the client's CPU time per message, and the share of the bare client.

    :param of: The names of the compared figures.
    """
    return list(_compare(part, measurements, of, ".cpu", "us/msg", lambda one: one.cpu_per_message))


def _compare(
    part: str,
    measurements: Mapping[str, list[Measurement]],
    of: Mapping[str, str],
    suffix: str,
    unit: str,
    value_of: Callable[[Measurement], float],
) -> Iterator[dict[str, Any]]:
    for name, tries in measurements.items():
        values = [value_of(attempt) for attempt in tries]
        bare = [value_of(attempt) for attempt in measurements[of[name]]] if name in of else []
        ratios = [one / other for one, other in zip(values, bare, strict=False)]
        if suffix:  # less is better
            ratios = [1 / ratio for ratio in ratios]
        other = f"{part}.{of.get(name, '')}{suffix}"
        digits = 1 if suffix else None
        yield median(f"{part}.{name}{suffix}", values, unit, digits=digits, of=other, ratios=ratios)


def serve(
    requests: RequestCounter,
    bare: Callable[..., dict[str, Measurement]],
    ours: Callable[..., dict[str, Measurement]],
) -> None:
    """Runs the measurement that a worker's command line names, and prints the result."""
    work = {"bare": bare, "ours": ours}[sys.argv[1]]
    print(json.dumps(work(requests, **json.loads(sys.argv[2]))))


def requests_of(name: str, tries: list[Measurement]) -> dict[str, Any]:
    """Returns the number of requests per message, from receipt to settlement."""
    return median(
        name, [attempt.requests / attempt.messages for attempt in tries], "req/msg", digits=4
    )
