"""Requests about ack ids: as many as one may have, and what was said of each.

An exactly-once subscription confirms each id.  What it calls temporary is sent again; what it calls
permanent is held no longer.  Any other subscription confirms nothing: that is why leases end by our
own clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.kit.receipts.batch_requests import (
    BatchRequests,
    Call,
    Keyed,
    Refusal,
)
from airflow_broadway.producers.pubsub.errors import Expired
from airflow_broadway.producers.pubsub.limits import MAX_IDS, MAX_REQUEST

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock
    from airflow_broadway.producers.pubsub.client import Client

__all__ = [
    "Held",
    "acknowledging",
    "batch_requests",
    "modifying",
    "portions",
    "publishing",
    "tried_again",
]

#: Bytes of ids in a request: it has the subscription's name and two lengths beside them, and four
#: bytes with each, at most.
_MOST_BYTES: Final = MAX_REQUEST - 1024 - 4 * MAX_IDS
#: Seconds before a request is sent again that Pub/Sub did not answer; doubled for each more.
_AGAIN_INTERVAL, _LONGEST_INTERVAL = 0.1, 5.0


class Held(NamedTuple):
    """An entry: an ack id, and for how long it is held from now on; 0: given back.

    The entry of an id that is acknowledged is the id alone: there are so many of them.
    """

    ack_id: str
    seconds: int = 0


def batch_requests(concurrency: int, clock: Clock) -> BatchRequests:
    """Requests as large as Pub/Sub allows, so many at a time."""
    return BatchRequests(concurrency, clock, portions=portions, name="pubsub")


def portions(entries: Iterable[Keyed]) -> Iterator[list[Keyed]]:
    """Entries in requests: of one deadline each, at most 2,500 ids and 512 KiB."""
    asked: dict[int, list[Keyed]] = {}
    acked: list[Keyed] = []
    for keyed in entries:
        if isinstance(keyed[1], str):
            acked.append(keyed)
        else:
            asked.setdefault(keyed[1].seconds, []).append(keyed)
    yield from _cut(acked, [ack_id for _, ack_id in acked])
    for together in asked.values():
        yield from _cut(together, [held.ack_id for _, held in together])


def _cut(entries: list[Keyed], ids: Iterable[str]) -> Iterator[list[Keyed]]:
    """The entries of one kind in requests that are as large as may be."""
    # Of each entry, the bytes of all before it: so no entry is looked at by itself.
    before = [0, *accumulate(map(len, map(str.encode, ids)))]
    start = 0
    while start < len(entries):
        most = min(start + MAX_IDS, len(entries))
        end = bisect_right(before, before[start] + _MOST_BYTES, start, most + 1) - 1
        end = max(end, start + 1)
        yield entries[start:end]
        start = end


def _always() -> bool:
    return True


def acknowledging(client: Client, clock: Clock, held: Callable[[], bool] = _always) -> Call:
    """One ``Acknowledge``.

    :param held: Whether what it is about is held still; asked before it is sent again.
    """

    def call(ids: Sequence[str]) -> Mapping[int, Refusal]:
        words = tried_again(lambda: client.acknowledge(ids), client.timeout, clock, held)
        return _refusals(ids, *words)

    return call


def modifying(client: Client, clock: Clock, held: Callable[[], bool] = _always) -> Call:
    """One ``ModifyAckDeadline``; all entries have one deadline.

    :param held: Whether what it is about is held still; asked before it is sent again.
    """

    def call(entries: Sequence[Held]) -> Mapping[int, Refusal]:
        ids, seconds = [held.ack_id for held in entries], entries[0].seconds
        words = tried_again(lambda: client.modify(ids, seconds), client.timeout, clock, held)
        return _refusals(ids, *words)

    return call


def publishing(client: Client, topic: str, clock: Clock) -> Call:
    """One ``Publish``, of all or none of the messages."""

    def call(messages: Sequence[Any]) -> Mapping[int, Refusal]:
        tried_again(lambda: client.publish(topic, messages), client.timeout, clock)
        return {}

    return call


def tried_again(
    call: Callable[[], Any],
    timeout: float,
    clock: Clock,
    useful: Callable[[], bool] = _always,
) -> tuple[Any, bool]:
    """What a request brings, tried for so long; and whether it was sent more than once.

    :param useful: Whether to send it again.
    :raises ProducerUnavailable: If Pub/Sub is out of reach for longer.
    """
    end, pause, again = clock.monotonic() + timeout, _AGAIN_INTERVAL, False
    while True:
        try:
            return call(), again
        except ProducerUnavailable as error:
            if isinstance(error, Expired) or clock.monotonic() + pause >= end:
                raise
            clock.sleep(pause)
            if not useful():
                raise
            pause, again = min(2 * pause, _LONGEST_INTERVAL), True


def _refusals(ids: Sequence[str], words: Mapping[str, str], again: bool) -> dict[int, Refusal]:
    if not words:
        return {}
    return {
        place: _refusal(words[ack_id], again) for place, ack_id in enumerate(ids) if ack_id in words
    }


def _refusal(word: str, again: bool) -> Refusal:
    if word.startswith("TRANSIENT_"):
        return Refusal(word, "Pub/Sub could not do it just now", again=True, unclear=again)
    return Refusal(word, "the ack id is valid no longer", gone=True, unclear=again)
