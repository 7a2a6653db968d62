"""SQS: what a run gets of boto3's own speed, and what it costs in requests.

``sqs.ceiling`` is boto3 alone, in ten threads that receive ten and delete ten, and do nothing with
a message; ``sqs.process`` and ``sqs.settle`` are this package's stages with as many threads,
``sqs.run`` both together.  moto's server does most of the work there.  So ``sqs.client.…`` is the
same against a stub inside botocore: the client's own processor time.  Messages have 200 bytes;
callbacks are trivial.  Tries are interleaved, so that what else the machine does falls on all of
them; figures are medians, and so are the ratios, each to the ceiling of the same try.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.benchmarks.figures import Figures, Took, folder_of_its_own, median
from tests.benchmarks.sqs_worker import BODY, NOWHERE
from tests.sqs_server import SqsServer

__all__ = ["bench_sqs"]

#: Messages of a try, at moto's server and at the stub.
MESSAGES = 5_000
STUBBED = 20_000
THREADS = 10

#: What is compared with what.
OF = {"process": "ceiling.receive", "settle": "ceiling.delete", "run": "ceiling"}


def bench_sqs(messages: int = MESSAGES, stubbed: int = STUBBED, tries: int = 5) -> Figures:
    """All figures, against a server of its own."""
    served: dict[str, list[Took]] = {}
    alone: dict[str, list[Took]] = {}
    with folder_of_its_own() as folder, SqsServer.start(folder) as server:
        for _ in range(tries):
            for name, took in one_try(server.url, messages, server).items():
                served.setdefault(name, []).append(took)
            for name, took in one_try(NOWHERE, stubbed, None).items():
                alone.setdefault(name, []).append(took)
    return [*rates(served), *processor(alone), requests(alone)]


def one_try(endpoint: str, count: int, server: SqsServer | None) -> dict[str, Took]:
    """Both, each in a process of its own."""
    queues = [fill(server, count) if server else f"{NOWHERE}/1/bench" for _ in range(3)]
    given = {"endpoint": endpoint, "count": count, "threads": THREADS}
    took = apart("bare", queues=queues[:2], **given)
    with folder_of_its_own() as folder:
        took |= apart("ours", queues=queues[2:], folder=str(folder), **given)
    one, two = took["process"], took["settle"]
    used = one.cpu + two.cpu, one.requests + two.requests
    return {**took, "run": Took(count, one.seconds + two.seconds, *used)}


def fill(server: SqsServer, count: int) -> str:
    """A new queue with so many messages."""
    url = server.queue()
    client = server.client(max_pool_connections=THREADS)
    entries: Any = [{"Id": str(number), "MessageBody": BODY} for number in range(10)]
    with ThreadPoolExecutor(THREADS) as pool:
        for answer in pool.map(
            lambda _: client.send_message_batch(QueueUrl=url, Entries=entries), range(count // 10)
        ):
            if answer.get("Failed"):
                raise RuntimeError(f"not sent: {answer['Failed']}")
    return url


def apart(name: str, **given: Any) -> dict[str, Took]:
    """What ``sqs_worker`` took for one thing."""
    command = [sys.executable, "-m", "tests.benchmarks.sqs_worker", name, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return {key: Took(*value) for key, value in told.items()}


def rates(taken: dict[str, list[Took]]) -> Figures:
    """Messages a second, at moto's server."""
    made: Figures = []
    for name, tries in taken.items():
        of = OF.get(name, "")
        ratios = [a.rate / b.rate for a, b in zip(tries, taken[of], strict=True)] if of else []
        found = [each.rate for each in tries]
        made.append(median(f"sqs.{name}", found, "msg/s", of=f"sqs.{of}", ratios=ratios))
    return made


def processor(taken: dict[str, list[Took]]) -> Figures:
    """The client's processor time for a message, and bare boto3's part of it."""
    made: Figures = []
    for name, tries in taken.items():
        of = OF.get(name, "")
        ratios = [b.cpu / a.cpu for a, b in zip(tries, taken[of], strict=True)] if of else []
        name, of = (f"sqs.client.{each}.cpu" for each in (name, of))
        found = [each.cpu_of_each for each in tries]
        made.append(median(name, found, "us/msg", digits=1, of=of, ratios=ratios))
    return made


def requests(taken: dict[str, list[Took]]) -> dict[str, Any]:
    """Requests for a message, from its receipt to its deletion."""
    found = [each.requests / each.messages for each in taken["run"]]
    return median("sqs.requests", found, "req/msg", digits=4)
