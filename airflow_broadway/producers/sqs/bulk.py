"""Requests of ten entries, several at a time, each entry's answer looked at.

A batch request may succeed with some of its entries failed.  Such an entry is sent again, after a
growing pause, where that may help; where it cannot, it is refused for good: a receipt that SQS
calls invalid is never sent twice.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, NamedTuple

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.sqs.errors import retryable
from airflow_broadway.producers.sqs.limits import MAX_BATCH

__all__ = ["GONE", "Bulk", "Refusal"]

log = logging.getLogger(__name__)

#: Codes that say: this receipt holds the message no longer.
GONE: Final = frozenset(
    {
        "AWS.SimpleQueueService.MessageNotInflight",
        "InvalidParameterValue",
        "MessageNotInflight",
        "ReceiptHandleIsInvalid",
    }
)
#: How often an entry is sent, and the seconds before the second time; doubled for each more.
_TRIES: Final = 6
_PAUSE: Final = 0.1

#: One request: takes entries, returns those that failed.
Call = Callable[[Sequence[Any]], list[dict[str, Any]]]


class Refusal(NamedTuple):
    """Why SQS did not do what an entry asked."""

    code: str
    text: str

    @property
    def gone(self) -> bool:
        """Whether the receipt holds the message no longer."""
        return self.code in GONE and "Total VisibilityTimeout" not in self.text


class Bulk:
    """Sends many entries to one queue; used from one thread.

    :param concurrency: Requests at a time.
    """

    def __init__(self, concurrency: int, clock: Clock) -> None:
        self._concurrency = concurrency
        self._clock = clock
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the threads.  Safe to repeat."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def send(self, call: Call, entries: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Refusal]:
        """Send all entries, ten to a request, in order; returns those refused for good.

        A request that is refused as a whole, for good, refuses all that would follow it too.

        :param entries: (key, entry without its ``Id``); keys are distinct.
        :raises ProducerUnavailable: If SQS could not be reached or throttles: what was sent until
            then is done.
        """
        return self.send_requests(call, _tens(entries))

    def send_requests(
        self, call: Call, requests: Iterable[list[tuple[str, dict[str, Any]]]]
    ) -> dict[str, Refusal]:
        """The same with the requests made: at most ten entries each."""
        refused: dict[str, Refusal] = {}
        stop: Refusal | None = None
        waiting = iter(requests)
        while True:
            wave = list(islice(waiting, 32 * self._concurrency))
            if not wave:
                return refused
            if stop is not None:
                refused.update({key: stop for request in wave for key, _ in request})
                continue
            for given, error in self._wave(call, wave):
                refused.update(given)
                stop = stop or error
            if stop is not None:
                log.error("%s", stop.text)

    def _wave(
        self, call: Call, wave: list[list[tuple[str, dict[str, Any]]]]
    ) -> list[tuple[dict[str, Refusal], Refusal | None]]:
        halted: list[Refusal] = []

        def one(
            request: list[tuple[str, dict[str, Any]]],
        ) -> tuple[dict[str, Refusal], Refusal | None]:
            if halted:
                return {key: halted[0] for key, _ in request}, None
            try:
                return self._request(call, request), None
            except ProducerUnavailable:
                raise
            except ProducerError as error:
                refusal = Refusal(type(error).__name__, str(error))
                halted.append(refusal)
                return {key: refusal for key, _ in request}, refusal

        if self._concurrency == 1 or len(wave) == 1:
            return [one(request) for request in wave]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._concurrency, "broadway-sqs")
        return list(self._pool.map(one, wave))

    def _request(self, call: Call, request: list[tuple[str, dict[str, Any]]]) -> dict[str, Refusal]:
        refused: dict[str, Refusal] = {}
        left = request
        pause = _PAUSE
        for attempt in range(1, _TRIES + 1):
            entries = [{"Id": str(place), **entry} for place, (_, entry) in enumerate(left)]
            failed = call(entries)
            if not failed:
                return refused
            again = []
            for each in failed:
                key, entry = left[int(each["Id"])]
                code = str(each.get("Code", ""))
                fault = bool(each.get("SenderFault", False))
                if attempt < _TRIES and code not in GONE and retryable(code, fault):
                    again.append((key, entry))
                else:
                    refused[key] = Refusal(code, str(each.get("Message", "")))
            if not again:
                return refused
            left = again
            self._clock.sleep(pause * random.uniform(0.5, 1.0))
            pause *= 2
        return refused


def _tens(
    entries: Iterable[tuple[str, dict[str, Any]]],
) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    given = iter(entries)
    while request := list(islice(given, MAX_BATCH)):
        yield request
