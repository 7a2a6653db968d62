"""Requests of ten entries, several at a time, each entry's answer looked at.

A batch request may succeed with some of its entries failed.  Such an entry is sent again, after a
growing pause, where that may help; where it cannot, it is refused for good: a receipt that SQS
calls invalid is never sent twice.  Only what the answer names as done is done: an entry that it
does not name is sent again.  A request whose contents SQS does not take is sent in parts, so that
one bad entry is refused alone.
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
from airflow_broadway.producers.sqs.client import BatchAnswer
from airflow_broadway.producers.sqs.errors import Refused, retryable
from airflow_broadway.producers.sqs.limits import MAX_BATCH

__all__ = ["GONE", "LAPSED", "BatchRequests", "Call", "Refusal"]

log = logging.getLogger(__name__)

#: Our own code: an entry was not sent, because the lease is over.
LAPSED: Final = "LeaseLapsed"
#: Codes that say: this receipt holds the message no longer.
GONE: Final = frozenset(
    {
        LAPSED,
        "AWS.SimpleQueueService.MessageNotInflight",
        "InvalidParameterValue",
        "MessageNotInflight",
        "ReceiptHandleIsInvalid",
    }
)
#: How often an entry is sent; and the seconds before the second time, doubled for each more.
_MOST_SENDS: Final = 6
_RESEND_INTERVAL: Final = 0.1
#: Entries that were refused, each sent alone, and none taken: then all others are refused too.
_HOPELESS: Final = 10

#: One request: takes entries, returns what was said of each.
Call = Callable[[Sequence[Any]], BatchAnswer]


class Refusal(NamedTuple):
    """Why SQS did not do what an entry asked.

    :param unclear: Whether the entry was sent before, and SQS may have carried it out then.
    """

    code: str
    text: str
    unclear: bool = False

    @property
    def gone(self) -> bool:
        """Whether the receipt holds the message no longer."""
        return self.code in GONE and "Total VisibilityTimeout" not in self.text


class BatchRequests:
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

        What is refused for another reason than its contents, such as a permission that is lacking,
        refuses all that would follow it too.

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
        alone: list[Refusal] = []
        taken: list[bool] = []

        def halt(
            request: list[tuple[str, dict[str, Any]]], refusal: Refusal
        ) -> tuple[dict[str, Refusal], Refusal | None]:
            halted.append(refusal)
            return {key: refusal for key, _ in request}, refusal

        def one(
            request: list[tuple[str, dict[str, Any]]],
        ) -> tuple[dict[str, Refusal], Refusal | None]:
            if halted:
                return {key: halted[0] for key, _ in request}, None
            try:
                made = self._request(call, request)
            except ProducerUnavailable:
                raise
            except Refused as error:
                if len(request) > 1:
                    half = len(request) // 2
                    first, stop = one(request[:half])
                    second, then = one(request[half:])
                    return first | second, stop or then
                refusal = Refusal(type(error).__name__, str(error))
                alone.append(refusal)
                if len(alone) >= _HOPELESS and not taken:
                    return halt(request, refusal)
                return {key: refusal for key, _ in request}, None
            except ProducerError as error:
                return halt(request, Refusal(type(error).__name__, str(error)))
            taken.append(True)
            return made, None

        if self._concurrency == 1 or len(wave) == 1:
            return [one(request) for request in wave]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._concurrency, "broadway-sqs")
        return list(self._pool.map(one, wave))

    def _request(self, call: Call, request: list[tuple[str, dict[str, Any]]]) -> dict[str, Refusal]:
        refused: dict[str, Refusal] = {}
        left = request
        pause = _RESEND_INTERVAL
        for attempt in range(1, _MOST_SENDS + 1):
            answer = call([{"Id": str(place), **entry} for place, (_, entry) in enumerate(left)])
            failed = {str(each.get("Id")): each for each in answer.failed}
            again = []
            for place, (key, entry) in enumerate(left):
                said = failed.get(str(place))
                if said is None and str(place) in answer.done:
                    continue
                refusal, fault = _refusal(said)
                if (
                    attempt < _MOST_SENDS
                    and refusal.code not in GONE
                    and retryable(refusal.code, fault)
                ):
                    again.append((key, entry))
                else:
                    refused[key] = refusal._replace(unclear=attempt > 1)
            if not again:
                return refused
            left = again
            self._clock.sleep(pause * random.uniform(0.5, 1.0))
            pause *= 2
        return refused


def _refusal(said: dict[str, Any] | None) -> tuple[Refusal, bool]:
    """What SQS said of an entry that it did not name as done; and whether that is our fault."""
    if said is None:
        return Refusal("NoAnswer", "SQS did not say what became of it"), False
    refusal = Refusal(str(said.get("Code", "")), str(said.get("Message", "")))
    return refusal, bool(said.get("SenderFault", False))


def _tens(
    entries: Iterable[tuple[str, dict[str, Any]]],
) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    given = iter(entries)
    while request := list(islice(given, MAX_BATCH)):
        yield request
