"""One try of the Pub/Sub figures, in a process of its own: prints what it took as JSON.

``bare`` is Google's client alone: threads that pull and acknowledge; ``ours`` a process stage, and
the settlement of all that it received.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from typing import Any

from tests.benchmarks.figures import Took
from tests.benchmarks.receipt_stages import serve, stages, timed

PIPELINE = "tests.benchmarks.pipelines:OnPubSub"
#: Ids in one request, at most: what this package sends.
MOST_IDS = 2_500
#: Messages in one pull: the most that Pub/Sub gives.
MOST_MESSAGES = 1_000


class Requests:
    """Counts what every client of this process asks."""

    def __init__(self) -> None:
        self.count = 0
        self._numbers = count(1)

    def install(self) -> None:
        """See every call from now on, beneath all that a client does with it."""
        from grpc import _channel

        blocking = _channel._UnaryUnaryMultiCallable._blocking

        def counted(call: Any, *given: Any, **named: Any) -> Any:
            self.count = next(self._numbers)
            return blocking(call, *given, **named)

        setattr(_channel._UnaryUnaryMultiCallable, "_blocking", counted)  # noqa: B010


def client_of(host: str) -> Any:
    """Google's client, as its documentation opens it, but that no answer is too large."""
    import grpc
    from google.pubsub_v1 import SubscriberClient
    from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

    channel = grpc.insecure_channel(host, options=[("grpc.max_receive_message_length", -1)])
    return SubscriberClient(transport=SubscriberGrpcTransport(channel=channel))


# -- Google's client alone -------------------------------------------------------------------------


def bare(
    requests: Requests, host: str, subscriptions: Sequence[str], messages: int, threads: int
) -> dict[str, Took]:
    """One subscription is drained in a loop; another first pulled, then acknowledged."""
    client = client_of(host)
    pulled: list[list[str]] = []

    def pull(subscription: str) -> list[str]:
        answer = client.pull(
            request={"subscription": subscription, "max_messages": MOST_MESSAGES}, timeout=5
        )
        result = [(message.ack_id, message.message.data) for message in answer.received_messages]
        return [ack_id for ack_id, _ in result]

    def acknowledge(subscription: str, ack_ids: Sequence[str]) -> None:
        client.acknowledge(request={"subscription": subscription, "ack_ids": ack_ids})

    def each_thread(work: Callable[[], int]) -> Took:
        """In every thread again and again, until all has been seen."""
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
                # Not for those whose pull finds nothing any more, which waits.
                done.wait()

            return timed(requests, messages, run)

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
        "ceiling": each_thread(drain),
        "ceiling.pull": each_thread(gather),
        "ceiling.acknowledge": timed(requests, messages, drop),
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
) -> dict[str, Took]:
    """The stages of one or more runs that use Pub/Sub."""
    options = {
        "subscription": subscriptions[0],
        "conn_id": None,
        "endpoint": f"http://{host}",
        "receive_concurrency": threads,
    }
    return stages(requests, PIPELINE, options, folder, messages, runs=runs)


def main() -> None:
    """Does what the command line names."""
    requests = Requests()
    requests.install()
    serve(requests, bare, ours)


if __name__ == "__main__":
    main()
