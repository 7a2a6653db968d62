"""SQS: what a run gets of boto3's own speed, and what it costs in requests.

``sqs.ceiling`` is boto3 alone, in ten threads that receive ten and delete ten, and do nothing with
a message; ``sqs.process`` and ``sqs.settle`` are this package's stages with as many threads,
``sqs.run`` both together.  moto's server does most of the work there.  So ``sqs.client.…`` is the
same against a stub inside botocore: the client's own processor time.  Messages have 200 bytes;
callbacks are trivial.  Tries are interleaved, so that what else the machine does falls on all of
them; figures are medians, and so are the ratios, each to the ceiling of the same try.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.benchmarks.figures import Figures, Took, folder_of_its_own
from tests.benchmarks.receipt_stages import apart, processor, rates, requests_of, with_run
from tests.benchmarks.sqs_worker import BODY, NOWHERE
from tests.sqs_server import SqsServer

#: Messages of a try, at moto's server and at the stub.
MESSAGES = 5_000
STUBBED = 20_000
THREADS = 10

WORKER = "sqs_worker"
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
    return [
        *rates("sqs", served, OF),
        *processor("sqs.client", alone, OF),
        requests_of("sqs.requests", alone["run"]),
    ]


def one_try(endpoint: str, count: int, server: SqsServer | None) -> dict[str, Took]:
    """Both, each in a process of its own."""
    queues = [fill(server, count) if server else f"{NOWHERE}/1/bench" for _ in range(3)]
    arguments = {"endpoint": endpoint, "count": count, "threads": THREADS}
    took = apart(WORKER, "bare", queues=queues[:2], **arguments)
    with folder_of_its_own() as folder:
        took |= apart(WORKER, "ours", queues=queues[2:], folder=str(folder), **arguments)
    return with_run(took)


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
