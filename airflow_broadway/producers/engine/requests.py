"""Sends batch requests concurrently, and evaluates the result of each entry.

A request may succeed with some of its entries refused.  Such an entry is retried with exponential
backoff if that may help; otherwise the refusal is final: an invalid receipt is never sent twice.  A
request whose contents the broker rejects is split in halves, so that only the invalid entries are
refused.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, NamedTuple

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.log_context import keep_ids
from airflow_broadway.producers.engine.port import LAPSED, Broker, Call, Keyed, Refusal, Refused

log = logging.getLogger(__name__)

#: The maximum number of sends of an entry, and the seconds before the first retry, doubled for
#: each further one.
_MOST_SENDS: Final = 6
_RESEND_INTERVAL: Final = 0.1
#: The maximum seconds before a request is retried that the broker did not answer.
_LONGEST_INTERVAL: Final = 5.0
#: Refusals of single entries without any acceptance after which all other entries are refused too.
_HOPELESS: Final = 10


def always() -> bool:
    """Returns ``True``: every request is worth sending."""
    return True


class _Wave(NamedTuple):
    """The outcome of requests that are sent together.

    :param halted: The refusal after which no more requests are sent.
    :param alone: Refusals of entries that were sent in a request of their own.
    :param accepted: One item for each request that the broker carried out.
    """

    call: Call
    useful: Callable[[], bool]
    halted: list[Refusal]
    alone: list[Refusal]
    accepted: list[bool]


class BatchRequests:
    """Sends many entries to one queue; used from one thread.

    :param concurrency: The number of concurrent requests; by default the broker's.
    """

    def __init__(self, broker: Broker[Any], concurrency: int | None = None) -> None:
        self._broker = broker
        self._concurrency = concurrency or broker.concurrency
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Stops the threads.  Safe to repeat."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def send(
        self, call: Call, entries: Iterable[Keyed], useful: Callable[[], bool] = always
    ) -> dict[str, Refusal]:
        """Sends all entries in order; returns the final refusals.

        A refusal for another reason than the contents, such as a missing permission, applies to all
        following entries too.

        :param entries: (key, entry); keys are distinct.
        :param useful: Returns whether the entries are still held; otherwise they are not sent, and
            count as lapsed.
        :raises ProducerUnavailable: If the broker is unreachable or throttles; requests sent until
            then have taken effect.
        """
        return self.send_requests(call, self._broker.requests(entries), useful)

    def send_requests(
        self, call: Call, requests: Iterable[list[Keyed]], useful: Callable[[], bool] = always
    ) -> dict[str, Refusal]:
        """Sends entries that are already divided into requests."""
        refused: dict[str, Refusal] = {}
        stop: Refusal | None = None
        waiting = iter(requests)
        while batch := list(islice(waiting, 32 * self._concurrency)):
            if stop is not None:
                refused.update({key: stop for request in batch for key, _ in request})
                continue
            wave = _Wave(call, useful, [], [], [])
            for refusals in self._send_wave(wave, batch):
                refused.update(refusals)
            if wave.halted:
                stop = wave.halted[0]
                log.error("%s", stop.text)
        return refused

    def send_alone(self, call: Call, entries: Iterable[Keyed]) -> set[str]:
        """Sends entries once, in the calling thread; returns the keys of refused entries."""
        refused: set[str] = set()
        for request in self._broker.requests(entries):
            result = self._call(call, [entry for _, entry in request], always)
            refused.update(request[index][0] for index in result)
        return refused

    def _send_wave(self, wave: _Wave, requests: list[list[Keyed]]) -> Iterable[dict[str, Refusal]]:
        if self._concurrency == 1 or len(requests) == 1:
            return [self._request(wave, [*request], set()) for request in requests]
        if self._pool is None:
            name = f"broadway-{type(self._broker).__name__}"
            self._pool = ThreadPoolExecutor(self._concurrency, name)
        send = keep_ids(lambda request: self._request(wave, [*request], set()))
        return list(self._pool.map(send, requests))

    def _request(self, wave: _Wave, left: list[Keyed], unclear: set[str]) -> dict[str, Refusal]:
        """Sends one request, and splits it in halves if the broker rejects its contents."""
        if wave.halted:
            return {key: wave.halted[0] for key, _ in left}
        refused: dict[str, Refusal] = {}
        try:
            self._resend(wave, left, refused, unclear)
            return refused
        except ProducerUnavailable:
            raise
        except Refused as error:
            if len(left) > 1:
                half = len(left) // 2
                first = self._request(wave, left[:half], unclear)
                return refused | first | self._request(wave, left[half:], unclear)
            refusal = Refusal(type(error).__name__, str(error))
            wave.alone.append(refusal)
            if len(wave.alone) >= _HOPELESS and not wave.accepted:
                wave.halted.append(refusal)
        except ProducerError as error:
            refusal = Refusal(type(error).__name__, str(error))
            wave.halted.append(refusal)
        return refused | {key: refusal for key, _ in left}

    def _resend(
        self, wave: _Wave, left: list[Keyed], refused: dict[str, Refusal], unclear: set[str]
    ) -> None:
        """Sends the entries ``left``, and retries refused ones until none is left.

        :param refused: Collects the final refusals.
        :param unclear: Collects the keys of entries that may have been carried out.
        :raises ProducerError: If a whole request fails; it applies to the entries still left.
        """
        pause = _RESEND_INTERVAL
        for attempt in range(1, _MOST_SENDS + 1):
            retries = []
            result = self._call(wave.call, [entry for _, entry in left], wave.useful)
            wave.accepted.append(True)
            for index, refusal in result.items():
                key = left[index][0]
                if refusal.unclear:
                    unclear.add(key)
                if attempt < _MOST_SENDS and refusal.again:
                    retries.append(left[index])
                else:
                    refused[key] = refusal._replace(unclear=key in unclear)
            left[:] = retries
            if not retries:
                return
            self._broker.clock.sleep(pause * random.uniform(0.5, 1.0))
            pause *= 2

    def _call(
        self, call: Call, entries: Sequence[Any], useful: Callable[[], bool]
    ) -> Mapping[int, Refusal]:
        """Sends a request, and retries it while the broker is unreachable."""
        if not useful():
            return dict.fromkeys(range(len(entries)), LAPSED)
        broker, clock = self._broker, self._broker.clock
        end, pause, retried = clock.monotonic() + broker.retry_seconds, _RESEND_INTERVAL, False
        while True:
            try:
                result = call(entries)
                break
            except ProducerUnavailable as error:
                if isinstance(error, broker.ends) or clock.monotonic() + pause >= end:
                    raise
                clock.sleep(pause)
                if not useful():
                    raise
                pause, retried = min(2 * pause, _LONGEST_INTERVAL), True
        if retried:  # an earlier attempt may have been carried out
            return {place: refusal._replace(unclear=True) for place, refusal in result.items()}
        return result
