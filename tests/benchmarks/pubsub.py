"""Pub/Sub: what a run gets of Google's client's own speed, and what it costs in requests.

``pubsub.ceiling`` is Google's client alone, in threads that pull and acknowledge, and do nothing
with a message; ``pubsub.process`` and ``pubsub.settle`` are this package's stages with as many
threads, ``pubsub.run`` both together; ``pubsub.made_up`` is the process stage on a source that
makes the same messages up: what of ``pubsub.process`` is not Pub/Sub's.  All at Google's emulator,
which gives a hundred messages a pull where Pub/Sub gives up to a thousand; ``pubsub.requests``
counts them as the client sent them.  ``.cpu`` is the client's processor time for a message, with
all of its threads.  Messages have 200 bytes; callbacks are trivial.  Tries are interleaved, so that
what else the machine does falls on all of them; figures are medians, and so are the ratios, each to
the ceiling of the same try.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import repeat
from typing import Any

from tests.benchmarks.figures import Figures, Took, folder_of_its_own, median
from tests.benchmarks.made_up import BODY
from tests.benchmarks.stages import run_stage
from tests.pubsub_server import Emulator, PubSubServer

__all__ = ["bench_pubsub"]

MESSAGES = 100_000
THREADS = 4
MADE_UP = "tests.benchmarks.made_up:OnNothing"

#: What is compared with what.
OF = {
    "process": "ceiling.pull",
    "settle": "ceiling.acknowledge",
    "run": "ceiling",
}


def bench_pubsub(messages: int = MESSAGES, tries: int = 5) -> Figures:
    """All figures, against an emulator of its own."""
    taken: dict[str, list[Took]] = {}
    with folder_of_its_own() as folder, Emulator(folder).run() as server:
        for _ in range(tries):
            for name, took in one_try(server, messages).items():
                taken.setdefault(name, []).append(took)
    return [*rates(taken), *processor(taken), requests(taken)]


def one_try(server: PubSubServer, count: int) -> dict[str, Took]:
    """Each in a process of its own."""
    topic = server.topic()
    subscriptions = [server.subscription(topic, ack_deadline_seconds=600) for _ in range(3)]
    server.publish(topic, list(repeat(BODY, count)))
    given = {"host": server.host, "messages": count, "threads": THREADS}
    took = apart("bare", subscriptions=subscriptions[:2], **given)
    with folder_of_its_own() as folder:
        took |= apart("ours", subscriptions=subscriptions[2:], folder=str(folder), **given)
    for each in subscriptions:
        server.subscriber.delete_subscription(subscription=each)
    one, two = took["process"], took["settle"]
    used = one.cpu + two.cpu, one.requests + two.requests
    return {**took, "run": Took(count, one.seconds + two.seconds, *used), "made_up": made_up(count)}


def apart(name: str, **given: Any) -> dict[str, Took]:
    """What ``pubsub_worker`` took for one thing."""
    command = [sys.executable, "-m", "tests.benchmarks.pubsub_worker", name, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return {key: Took(*value) for key, value in told.items()}


def made_up(count: int) -> Took:
    """The process stage on messages from nowhere."""
    options = {"producer": {"messages": count}}
    with folder_of_its_own() as folder:
        given = {"folder": str(folder), "ref": {"class": MADE_UP, "options": options}}
        stage = run_stage("process", max_messages=count, **given)
    return Took(count, stage.seconds, stage.cpu)


def rates(taken: dict[str, list[Took]]) -> Figures:
    """Messages a second."""
    made: Figures = []
    for name, tries in taken.items():
        of = OF.get(name, "")
        ratios = [a.rate / b.rate for a, b in zip(tries, taken[of], strict=True)] if of else []
        found = [each.rate for each in tries]
        made.append(median(f"pubsub.{name}", found, "msg/s", of=f"pubsub.{of}", ratios=ratios))
    return made


def processor(taken: dict[str, list[Took]]) -> Figures:
    """The client's processor time for a message, beside that of the bare client."""
    made: Figures = []
    for name, tries in taken.items():
        of = OF.get(name, "")
        ratios = [a.cpu / b.cpu for a, b in zip(tries, taken[of], strict=True)] if of else []
        name, of = (f"pubsub.{each}.cpu" for each in (name, of))
        found = [each.cpu_of_each for each in tries]
        made.append(median(name, found, "us/msg", digits=1, of=of, ratios=ratios))
    return made


def requests(taken: dict[str, list[Took]]) -> dict[str, Any]:
    """Requests for a message, from its pull to its acknowledgement."""
    found = [each.requests / each.messages for each in taken["run"]]
    return median("pubsub.requests", found, "req/msg", digits=4)
