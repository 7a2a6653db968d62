"""Requests of many entries each, several at a time, each entry's answer looked at.

A request may succeed with some of its entries refused.  Such an entry is sent again, after a
growing pause, where that may help; where it cannot, it is refused for good: a receipt that the
broker calls invalid is never sent twice.  A request whose contents the broker does not take is sent
in parts, so that one bad entry is refused alone.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final, NamedTuple

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.log_context import keep_ids

__all__ = ["LAPSED", "BatchRequests", "Call", "Keyed", "Letters", "Refusal", "Refused"]

log = logging.getLogger(__name__)

#: How often an entry is sent; and the seconds before the second time, doubled for each more.
_MOST_SENDS: Final = 6
_RESEND_INTERVAL: Final = 0.1
#: Entries that were refused, each sent alone, and none taken: then all others are refused too.
_HOPELESS: Final = 10


class Refused(ProducerError):
    """The broker does not take what this request says; another request may say something else."""


class Refusal(NamedTuple):
    """Why the broker did not do what an entry asked.

    :param code: The broker's word for it.
    :param gone: Whether the receipt holds the message no longer.
    :param again: Whether sending the entry again may help.
    :param unclear: Whether the entry may have been carried out all the same, this time or an
        earlier one: e.g. an answer was lost.
    """

    code: str
    text: str
    gone: bool = False
    again: bool = False
    unclear: bool = False


#: Of an entry that was not sent, because the lease is over.
LAPSED: Final = Refusal("LeaseLapsed", "the lease has lapsed", gone=True)

#: One request: takes entries, returns those that were refused, by their place among them.
Call = Callable[[Sequence[Any]], Mapping[int, Refusal]]
#: An entry with the key that refusals go by.
Keyed = tuple[str, Any]


class Letters(NamedTuple):
    """How dead letters are sent.

    :param make: Makes the letter of one message.
    :param requests: Divides letters, by message id, into requests.
    :param call: One request.
    :param action: The broker's name of it.
    """

    make: Callable[[Entry], Any]
    requests: Callable[[Mapping[str, Any]], Iterable[list[Keyed]]]
    call: Call
    action: str


class BatchRequests:
    """Sends many entries to one queue; used from one thread.

    :param concurrency: Requests at a time.
    :param portions: Divides entries into requests.
    :param name: For the names of threads.
    """

    def __init__(
        self,
        concurrency: int,
        clock: Clock,
        *,
        portions: Callable[[Iterable[Keyed]], Iterable[list[Keyed]]],
        name: str,
    ) -> None:
        self._concurrency = concurrency
        self._clock = clock
        #: As given.
        self.portions = portions
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the threads.  Safe to repeat."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def send(self, call: Call, entries: Iterable[Keyed]) -> dict[str, Refusal]:
        """Send all entries, in order; returns those refused for good.

        What is refused for another reason than its contents, such as a permission that is lacking,
        refuses all that would follow it too.

        :param entries: (key, entry); keys are distinct.
        :raises ProducerUnavailable: If the broker could not be reached or throttles: what was sent
            until then is done.
        """
        return self.send_requests(call, self.portions(entries))

    def send_requests(self, call: Call, requests: Iterable[list[Keyed]]) -> dict[str, Refusal]:
        """The same with the requests made."""
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
        self, call: Call, wave: list[list[Keyed]]
    ) -> list[tuple[dict[str, Refusal], Refusal | None]]:
        halted: list[Refusal] = []
        alone: list[Refusal] = []
        taken: list[bool] = []

        def told(entries: Sequence[Any]) -> Mapping[int, Refusal]:
            made = call(entries)
            taken.append(True)
            return made

        def halt(left: list[Keyed], refusal: Refusal) -> tuple[dict[str, Refusal], Refusal | None]:
            halted.append(refusal)
            return {key: refusal for key, _ in left}, refusal

        def one(left: list[Keyed], unclear: set[str]) -> tuple[dict[str, Refusal], Refusal | None]:
            if halted:
                return {key: halted[0] for key, _ in left}, None
            refused: dict[str, Refusal] = {}
            stop = None
            try:
                self._request(told, left, refused, unclear)
                return refused, None
            except ProducerUnavailable:
                raise
            except Refused as error:
                if len(left) > 1:
                    half = len(left) // 2
                    first, stop = one(left[:half], unclear)
                    second, then = one(left[half:], unclear)
                    return refused | first | second, stop or then
                refusal = Refusal(type(error).__name__, str(error))
                alone.append(refusal)
                if len(alone) >= _HOPELESS and not taken:
                    given, stop = halt(left, refusal)
                else:
                    given = {left[0][0]: refusal}
            except ProducerError as error:
                given, stop = halt(left, Refusal(type(error).__name__, str(error)))
            return refused | given, stop

        def each(request: list[Keyed]) -> tuple[dict[str, Refusal], Refusal | None]:
            return one([*request], set())

        if self._concurrency == 1 or len(wave) == 1:
            return [each(request) for request in wave]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._concurrency, f"broadway-{self._name}")
        return list(self._pool.map(keep_ids(each), wave))

    def _request(
        self, call: Call, left: list[Keyed], refused: dict[str, Refusal], unclear: set[str]
    ) -> None:
        """Send the entries ``left``, some of them again, until none of them is left.

        :param refused: Gets those that are refused for good.
        :param unclear: Gets those that may have been carried out.
        :raises ProducerError: If a request is not answered entry by entry: that holds for those
            that are left then.
        """
        pause = _RESEND_INTERVAL
        for attempt in range(1, _MOST_SENDS + 1):
            again = []
            for place, refusal in call([entry for _, entry in left]).items():
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
            self._clock.sleep(pause * random.uniform(0.5, 1.0))
            pause *= 2
