"""Pub/Sub: what a run gets of Google's client's own speed, and what it costs in requests.

``pubsub.ceiling`` is Google's client alone, in threads that pull and acknowledge, and do nothing
with a message; ``pubsub.run`` is what the runs of a DAG do, one after another in one process and
without Airflow, with as many threads: 20,000 messages each are received, staged and settled.
``pubsub.process`` and ``pubsub.settle`` are the stages of a single run of all, ``pubsub.run.whole``
both together; ``pubsub.made_up`` is the process stage on a source that makes the same messages up:
what of ``pubsub.process`` is not Pub/Sub's.  A run acknowledges nothing before its work is done,
and so holds all that it took: ``pubsub.ceiling.held`` is the same of Google's client alone, which
first pulls everything.  All at Google's emulator, which gives a hundred messages a pull where
Pub/Sub gives up to a thousand, and is slower the more of them are held; ``pubsub.requests`` counts
them as the client sent them.  ``.cpu`` is the client's processor time for a message, with all of
its threads, and the ratio how much of it the bare client takes.  Messages have 200 bytes; callbacks
are trivial.  Tries are interleaved, so that what else the machine does falls on all of them, and
which of them begins changes from try to try: an emulator that has just been started is slower.
Figures are medians, and so are the ratios, each to the ceiling of the same try.
"""

from __future__ import annotations

from itertools import repeat

from tests.benchmarks.figures import Figures, Took, folder_of_its_own
from tests.benchmarks.made_up import BODY
from tests.benchmarks.receipt_stages import added, apart, processor, rates, requests_of, with_run
from tests.benchmarks.stages import run_made_up
from tests.pubsub_server import Emulator, PubSubServer

MESSAGES = 100_000
#: Of these messages: 20,000 each.
RUNS = 5
THREADS = 4

WORKER = "pubsub_worker"
#: What is compared with what.
OF = {
    "process": "ceiling.pull",
    "settle": "ceiling.acknowledge",
    "run": "ceiling",
    "run.whole": "ceiling",
    "ceiling.held": "ceiling",
}


def bench_pubsub(messages: int = MESSAGES, tries: int = 7) -> Figures:
    """All figures, against an emulator of its own."""
    taken: dict[str, list[Took]] = {}
    with folder_of_its_own() as folder, Emulator(folder, heap="2g").run() as server:
        one_try(server, messages // 10)  # a warm-up, which is not measured
        for number in range(tries):
            for name, took in one_try(server, messages, ours_first=number % 2 == 1).items():
                taken.setdefault(name, []).append(took)
    return [
        *rates("pubsub", taken, OF),
        *processor("pubsub", taken, OF),
        requests_of("pubsub.requests", taken["run"]),
    ]


def one_try(server: PubSubServer, count: int, *, ours_first: bool = False) -> dict[str, Took]:
    """Each in a process of its own."""
    topic = server.topic()
    subscriptions = [server.subscription(topic, ack_deadline_seconds=600) for _ in range(4)]
    server.publish(topic, list(repeat(BODY, count)))
    arguments = {"host": server.host, "messages": count, "threads": THREADS}

    def bare() -> dict[str, Took]:
        took = apart(WORKER, "bare", subscriptions=subscriptions[:2], **arguments)
        result = added(took["ceiling.pull"], took["ceiling.acknowledge"])
        return {**took, "ceiling.held": result}

    def ours(subscription: str, runs: int) -> dict[str, Took]:
        with folder_of_its_own() as folder:
            more = {"subscriptions": [subscription], "folder": str(folder), "runs": runs}
            return apart(WORKER, "ours", **more, **arguments)

    def all_runs() -> dict[str, Took]:
        return {"run": with_run(ours(subscriptions[2], RUNS))["run"]}

    def one_run() -> dict[str, Took]:
        took = with_run(ours(subscriptions[3], 1))
        return {"run.whole": took.pop("run"), **took}

    turns = [bare, all_runs, one_run]
    took = {
        name: took for turn in turns[:: -1 if ours_first else 1] for name, took in turn().items()
    }
    for name in subscriptions:
        server.subscriber.delete_subscription(subscription=name)
    stage = run_made_up(count)
    return {**took, "made_up": Took(count, stage.seconds, stage.cpu)}
