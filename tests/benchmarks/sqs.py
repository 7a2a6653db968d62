"""SQS: throughput compared with boto3 alone, and the number of requests.

``sqs.ceiling`` is boto3 alone: ten threads that receive and delete ten messages at a time.
``sqs.process`` and ``sqs.settle`` are the package's stages with the same number of threads,
``sqs.run`` is their sum.  moto's server takes most of the time, so ``sqs.client.…`` measures the
same with a stub inside botocore: the client's own CPU time.  Messages have 200 bytes; callbacks are
trivial.  Tries are interleaved, so that noise affects all; figures and ratios are medians, and each
ratio is to the ceiling of the same try.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.benchmarks.figures import Figures, Measurement, temporary_folder
from tests.benchmarks.receipt_stages import (
    add_totals,
    measure_separately,
    processor,
    rates,
    requests_of,
)
from tests.benchmarks.sqs_worker import BODY, NOWHERE
from tests.sqs_server import SqsServer

#: Messages per try, with moto's server and with the stub.
MESSAGES = 5_000
STUBBED = 20_000
THREADS = 10

WORKER = "sqs_worker"
#: The figures by the figure with which they are compared.
OF = {"process": "ceiling.receive", "settle": "ceiling.delete", "run": "ceiling"}


def bench_sqs(messages: int = MESSAGES, stubbed: int = STUBBED, tries: int = 5) -> Figures:
    """Measures all figures with a new server."""
    served: dict[str, list[Measurement]] = {}
    alone: dict[str, list[Measurement]] = {}
    with temporary_folder() as folder, SqsServer.start(folder) as server:
        for _ in range(tries):
            for name, measurement in one_try(server.url, messages, server).items():
                served.setdefault(name, []).append(measurement)
            for name, measurement in one_try(NOWHERE, stubbed, None).items():
                alone.setdefault(name, []).append(measurement)
    return [
        *rates("sqs", served, OF),
        *processor("sqs.client", alone, OF),
        requests_of("sqs.requests", alone["run"]),
    ]


def one_try(endpoint: str, count: int, server: SqsServer | None) -> dict[str, Measurement]:
    """Measures both once, in separate processes."""
    queues = [fill(server, count) if server else f"{NOWHERE}/1/bench" for _ in range(3)]
    arguments = {"endpoint": endpoint, "count": count, "threads": THREADS}
    measurement = measure_separately(WORKER, "bare", queues=queues[:2], **arguments)
    with temporary_folder() as folder:
        measurement |= measure_separately(
            WORKER, "ours", queues=queues[2:], folder=str(folder), **arguments
        )
    return add_totals(measurement)


def fill(server: SqsServer, count: int) -> str:
    """Creates a queue with this number of messages."""
    url = server.queue()
    client = server.client(max_pool_connections=THREADS)
    entries: Any = [{"Id": str(number), "MessageBody": BODY} for number in range(10)]
    with ThreadPoolExecutor(THREADS) as pool:
        for response in pool.map(
            lambda _: client.send_message_batch(QueueUrl=url, Entries=entries), range(count // 10)
        ):
            if response.get("Failed"):
                raise RuntimeError(f"not sent: {response['Failed']}")
    return url
