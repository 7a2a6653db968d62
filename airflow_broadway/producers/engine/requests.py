"""Sends requests of many entries each, several at a time, and reads the result of each entry.

A request may succeed with some of its entries refused.  Such an entry is sent again, after a
growing pause, where that may help; where it cannot, it is refused for good: a void receipt is never
sent twice.  A request whose contents the broker rejects is sent in halves, so that one bad entry is
refused alone.
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

#: How often an entry is sent; and the seconds before the second time, doubled for each more.
_MOST_SENDS: Final = 6
_RESEND_INTERVAL: Final = 0.1
#: The longest pause, in seconds, before a request is repeated that the broker did not answer.
_LONGEST_INTERVAL: Final = 5.0
#: Entries that were refused, each sent alone, and none accepted: then all others are refused too.
_HOPELESS: Final = 10


def always() -> bool:
    """Returns ``True``: a request is worth sending."""
    return True


class _Wave(NamedTuple):
    """The outcome of the requests that are sent together.

    :param halted: Why nothing more of it is sent.
    :param alone: Refusals of entries that were sent alone.
    :param accepted: One for each request that the broker carried out.
    """

    call: Call
    useful: Callable[[], bool]
    halted: list[Refusal]
    alone: list[Refusal]
    accepted: list[bool]


class BatchRequests:
    """Sends many entries to one queue; used from one thread.

    :param concurrency: Requests at a time; those of the broker unless given.
    """

    def __init__(self, broker: Broker[Any], concurrency: int | None = None) -> None:
        self._broker = broker
        self._concurrency = concurrency or broker.concurrency
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Ends the threads.  Safe to repeat."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def send(
        self, call: Call, entries: Iterable[Keyed], useful: Callable[[], bool] = always
    ) -> dict[str, Refusal]:
        """Sends all entries, in order; returns those refused for good.

        What is refused for another reason than its contents, such as a permission that is lacking,
        refuses all that would follow it too.

        :param entries: (key, entry); keys are distinct.
        :param useful: Whether the entries are still held; where they are not, none is sent, and all
            have lapsed.
        :raises ProducerUnavailable: If the broker could not be reached or throttles: what was sent
            until then is done.
        """
        return self.send_requests(call, self._broker.requests(entries), useful)

    def send_requests(
        self, call: Call, requests: Iterable[list[Keyed]], useful: Callable[[], bool] = always
    ) -> dict[str, Refusal]:
        """Sends entries that are divided into requests already."""
        refused: dict[str, Refusal] = {}
        stop: Refusal | None = None
        waiting = iter(requests)
        while requests_now := list(islice(waiting, 32 * self._concurrency)):
            if stop is not None:
                refused.update({key: stop for request in requests_now for key, _ in request})
                continue
            wave = _Wave(call, useful, [], [], [])
            for of_request in self._sent(wave, requests_now):
                refused.update(of_request)
            if wave.halted:
                stop = wave.halted[0]
                log.error("%s", stop.text)
        return refused

    def send_alone(self, call: Call, entries: Iterable[Keyed]) -> set[str]:
        """Sends entries once, in the thread of the caller, which may be any; returns the keys of
        those refused.
        """
        refused: set[str] = set()
        for request in self._broker.requests(entries):
            result = self._call(call, [entry for _, entry in request], always)
            refused.update(request[place][0] for place in result)
        return refused

    def _sent(self, wave: _Wave, requests: list[list[Keyed]]) -> Iterable[dict[str, Refusal]]:
        if self._concurrency == 1 or len(requests) == 1:
            return [self._request(wave, [*request], set()) for request in requests]
        if self._pool is None:
            name = f"broadway-{type(self._broker).__name__}"
            self._pool = ThreadPoolExecutor(self._concurrency, name)
        send = keep_ids(lambda request: self._request(wave, [*request], set()))
        return list(self._pool.map(send, requests))

    def _request(self, wave: _Wave, left: list[Keyed], unclear: set[str]) -> dict[str, Refusal]:
        """Sends one request, in halves where the broker rejects its contents."""
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
        """Sends the entries ``left``, some of them again, until none of them is left.

        :param refused: Gets those that are refused for good.
        :param unclear: Gets those that may have been carried out.
        :raises ProducerError: If a request is not answered entry by entry: that holds for those
            that are left then.
        """
        pause = _RESEND_INTERVAL
        for attempt in range(1, _MOST_SENDS + 1):
            again = []
            result = self._call(wave.call, [entry for _, entry in left], wave.useful)
            wave.accepted.append(True)
            for place, refusal in result.items():
                key = left[place][0]
                if refusal.unclear:
                    unclear.add(key)
                if attempt < _MOST_SENDS and refusal.again:
                    again.append(left[place])
                else:
                    refused[key] = refusal._replace(unclear=key in unclear)
            left[:] = again
            if not again:
                return
            self._broker.clock.sleep(pause * random.uniform(0.5, 1.0))
            pause *= 2

    def _call(
        self, call: Call, entries: Sequence[Any], useful: Callable[[], bool]
    ) -> Mapping[int, Refusal]:
        """Sends a request, and repeats it while the broker is out of reach."""
        if not useful():
            return dict.fromkeys(range(len(entries)), LAPSED)
        broker, clock = self._broker, self._broker.clock
        end, pause, again = clock.monotonic() + broker.retry_seconds, _RESEND_INTERVAL, False
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
                pause, again = min(2 * pause, _LONGEST_INTERVAL), True
        if again:  # it may have been carried out before
            return {place: refusal._replace(unclear=True) for place, refusal in result.items()}
        return result
