"""Measures the Pub/Sub stages once, in a separate process; prints the result as JSON.

``bare`` is Google's client alone: threads that pull and acknowledge.  ``ours`` is a process stage
and its settlement.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from typing import Any

from tests.benchmarks.figures import Measurement
from tests.benchmarks.receipt_stages import measure_work, serve, stages

PIPELINE = "tests.benchmarks.pipelines:PubSubPipeline"
#: Maximum number of ack ids per request, as in the package.
MOST_IDS = 2_500
#: Messages per pull: Pub/Sub's maximum.
MOST_MESSAGES = 1_000


class Requests:
    """Counts the requests of all clients of this process."""

    def __init__(self) -> None:
        self.count = 0
        self._numbers = count(1)

    def install(self) -> None:
        """Intercepts every gRPC call from now on."""
        from grpc import _channel

        blocking = _channel._UnaryUnaryMultiCallable._blocking

        def count_call(call: Any, *given: Any, **kwargs: Any) -> Any:
            self.count = next(self._numbers)
            return blocking(call, *given, **kwargs)

        setattr(_channel._UnaryUnaryMultiCallable, "_blocking", count_call)  # noqa: B010


def client_of(host: str) -> Any:
    """Creates Google's client without a limit of the response size."""
    import grpc
    from google.pubsub_v1 import SubscriberClient
    from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

    channel = grpc.insecure_channel(host, options=[("grpc.max_receive_message_length", -1)])
    return SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))


# -- Google's client alone -------------------------------------------------------------------------


def bare(
    requests: Requests, host: str, subscriptions: Sequence[str], messages: int, threads: int
) -> dict[str, Measurement]:
    """Drains one subscription in a loop; pulls all of another one, then acknowledges."""
    client = client_of(host)
    pulled: list[list[str]] = []

    def pull(subscription: str) -> list[str]:
        response = client.pull(
            request={"subscription": subscription, "max_messages": MOST_MESSAGES}, timeout=5
        )
        result = [(message.ack_id, message.message.data) for message in response.received_messages]
        return [ack_id for ack_id, _ in result]

    def acknowledge(subscription: str, ack_ids: Sequence[str]) -> None:
        client.acknowledge(request={"subscription": subscription, "ack_ids": ack_ids})

    def run_in_threads(work: Callable[[], int]) -> Measurement:
        """Repeats work in all threads until all messages are processed."""
        seen: list[int] = []
        done = threading.Event()

        def loop() -> None:
            while not done.is_set():
                seen.append(work())
                if sum(seen) >= messages:
                    done.set()

        with ThreadPoolExecutor(threads) as pool:

            def run() -> None:
                for _ in range(threads):
                    pool.submit(loop)
                # Does not wait for threads whose pull blocks on an empty subscription.
                done.wait()

            return measure_work(requests, messages, run)

    def drain() -> int:
        ack_ids = pull(subscriptions[0])
        if ack_ids:
            acknowledge(subscriptions[0], ack_ids)
        return len(ack_ids)

    def gather() -> int:
        pulled.append(pull(subscriptions[1]))
        return len(pulled[-1])

    def drop() -> None:
        ack_ids = list(chain.from_iterable(pulled))
        parts = [ack_ids[start : start + MOST_IDS] for start in range(0, len(ack_ids), MOST_IDS)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda part: acknowledge(subscriptions[1], part), parts))

    return {
        "ceiling": run_in_threads(drain),
        "ceiling.pull": run_in_threads(gather),
        "ceiling.acknowledge": measure_work(requests, messages, drop),
    }


# -- this package ----------------------------------------------------------------------------------


def ours(
    requests: Requests,
    host: str,
    subscriptions: Sequence[str],
    messages: int,
    threads: int,
    folder: str,
    runs: int,
) -> dict[str, Measurement]:
    """Measures the stages of runs over Pub/Sub."""
    options = {
        "subscription": subscriptions[0],
        "conn_id": None,
        "endpoint": f"http://{host}",
        "receive_concurrency": threads,
    }
    return stages(requests, PIPELINE, options, folder, messages, runs=runs)


def main() -> None:
    """Runs the measurement that the command line names."""
    requests = Requests()
    requests.install()
    serve(requests, bare, ours)


if __name__ == "__main__":
    main()
