"""Pub/Sub: throughput compared with Google's client alone, and the number of requests.

``pubsub.ceiling`` is Google's client alone: threads that pull and acknowledge, and discard the
messages.  ``pubsub.ceiling.held`` pulls all messages before it acknowledges, like a run.
``pubsub.run`` are sequential runs in one process without Airflow, with the same number of threads:
each receives, stages and settles 20,000 messages.  ``pubsub.process`` and ``pubsub.settle`` are the
stages of a single run of all messages, ``pubsub.run.whole`` is their sum.  ``pubsub.made_up`` is
the process stage with synthetic messages.  ``pubsub.requests`` counts the client's requests.

All use Google's emulator, which returns a hundred messages per pull (Pub/Sub: up to a thousand) and
is slower with more outstanding messages.  ``.cpu`` is the client's CPU time per message, including
all threads; its ratio is the share of the bare client.  Messages have 200 bytes; callbacks are
trivial.  Tries are interleaved, so that noise affects all, and their order alternates, because a
new emulator is slower.  Figures and ratios are medians, and each ratio is to the ceiling of the
same try.
"""

from __future__ import annotations

from itertools import repeat

from tests.benchmarks.figures import Figures, Measurement, temporary_folder
from tests.benchmarks.receipt_stages import (
    add_stages,
    add_totals,
    measure_separately,
    processor,
    rates,
    requests_of,
)
from tests.benchmarks.stages import run_synthetic
from tests.benchmarks.synthetic import BODY
from tests.pubsub_server import Emulator, PubSubServer

MESSAGES = 100_000
#: Number of runs; each has 20,000 messages.
RUNS = 5
THREADS = 4

WORKER = "pubsub_worker"
#: The figures by the figure with which they are compared.
OF = {
    "process": "ceiling.pull",
    "settle": "ceiling.acknowledge",
    "run": "ceiling",
    "run.whole": "ceiling",
    "ceiling.held": "ceiling",
}


def bench_pubsub(messages: int = MESSAGES, tries: int = 7) -> Figures:
    """Measures all figures with a new emulator."""
    measurements: dict[str, list[Measurement]] = {}
    with temporary_folder() as folder, Emulator(folder, heap="2g").run() as server:
        one_try(server, messages // 10)  # warm-up
        for number in range(tries):
            for name, measurement in one_try(server, messages, ours_first=number % 2 == 1).items():
                measurements.setdefault(name, []).append(measurement)
    return [
        *rates("pubsub", measurements, OF),
        *processor("pubsub", measurements, OF),
        requests_of("pubsub.requests", measurements["run"]),
    ]


def one_try(
    server: PubSubServer, count: int, *, ours_first: bool = False
) -> dict[str, Measurement]:
    """Measures each stage once, in separate processes."""
    topic = server.topic()
    subscriptions = [server.subscription(topic, ack_deadline_seconds=600) for _ in range(4)]
    server.publish(topic, list(repeat(BODY, count)))
    arguments = {"host": server.host, "messages": count, "threads": THREADS}

    def bare() -> dict[str, Measurement]:
        measurement = measure_separately(
            WORKER, "bare", subscriptions=subscriptions[:2], **arguments
        )
        result = add_stages(measurement["ceiling.pull"], measurement["ceiling.acknowledge"])
        return {**measurement, "ceiling.held": result}

    def ours(subscription: str, runs: int) -> dict[str, Measurement]:
        with temporary_folder() as folder:
            more = {"subscriptions": [subscription], "folder": str(folder), "runs": runs}
            return measure_separately(WORKER, "ours", **more, **arguments)

    def all_runs() -> dict[str, Measurement]:
        return {"run": add_totals(ours(subscriptions[2], RUNS))["run"]}

    def one_run() -> dict[str, Measurement]:
        measurement = add_totals(ours(subscriptions[3], 1))
        return {"run.whole": measurement.pop("run"), **measurement}

    turns = [bare, all_runs, one_run]
    measurement = {
        name: measurement
        for turn in turns[:: -1 if ours_first else 1]
        for name, measurement in turn().items()
    }
    for name in subscriptions:
        server.subscriber.delete_subscription(subscription=name)
    stage = run_synthetic(count)
    return {**measurement, "made_up": Measurement(count, stage.seconds, stage.cpu)}
