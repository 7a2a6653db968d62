"""Pulls: what comes is held for the whole lease before anybody sees it.

Pub/Sub hands a message out for the subscription's own ack deadline, 10 seconds unless it was set
up otherwise.  So each pull is followed by one request that holds what it brought for the lease;
where the subscription's deadline is at least as long there is nothing to do.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core import telemetry
from airflow_broadway.producers.kit.receipts.polls import Answer, Received
from airflow_broadway.producers.pubsub.batch_requests import Held, modifying, portions
from airflow_broadway.producers.pubsub.limits import SHORTEST_DEADLINE

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock
    from airflow_broadway.producers.pubsub.client import Client
    from airflow_broadway.producers.pubsub.options import PubSubOptions

__all__ = ["Pulls"]

log = logging.getLogger(__name__)

_SPAN: Final = "pubsub.receive_messages"
_EVENTS: Final = tuple(f"{_SPAN}.{end}" for end in ("start", "stop", "exception"))


class Pulls:
    """Makes the pulls of one run; used from several threads.

    :param pipeline: Its name, for the spans.
    :param deadline: The subscription's own, in seconds; 0: not known.
    """

    def __init__(
        self, producer: PubSubOptions, client: Client, pipeline: str, deadline: int, clock: Clock
    ) -> None:
        self._client = client
        self._pipeline = pipeline
        self._wait = producer.receive_timeout
        self._most = producer.max_number_of_messages
        self._seconds = producer.seconds
        self._extends = deadline < producer.seconds
        self._deadline = deadline or SHORTEST_DEADLINE
        self._ordered = producer.message_ordering
        self._clock = clock

    def receive(self, count: int) -> Answer:
        """At most ``count`` messages, held for the lease.

        :raises ProducerError: If Pub/Sub refuses.
        :raises ProducerUnavailable: If it cannot be reached.
        """
        if not telemetry.handlers(*_EVENTS):
            return self._held(self._pulled(count))
        about = {"name": self._pipeline, "demand": count, "max_messages": min(count, self._most)}
        span = telemetry.Span(_SPAN, about)
        try:
            answer = self._held(self._pulled(count))
        except Exception as error:
            span.exception("error", error, "")
            raise
        span.stop({**about, "messages": [each.raw for each in answer.messages]})
        return answer

    def _pulled(self, count: int) -> Answer:
        asked = min(count, self._most)
        at = self._clock.now().timestamp()
        found = self._client.pull(asked, self._wait)
        return Answer(at, [Received(raw.message.message_id, raw.ack_id, raw) for raw in found])

    def _held(self, answer: Answer) -> Answer:
        """The answer, held for the lease from now on; what is gone already is left out."""
        if not self._extends or not answer.messages:
            return answer
        at, hold = self._clock.now().timestamp(), modifying(self._client, self._clock)
        gone: set[Any] = set()
        entries = ((each.receipt, Held(each.receipt, self._seconds)) for each in answer.messages)
        for request in portions(entries):
            refused = hold([entry for _, entry in request])
            gone.update(request[place][0] for place in refused)
        if self._clock.now().timestamp() >= at + self._deadline:
            # An outage outlasted Pub/Sub's own deadline, and it takes an old id without a word.
            gone = {each.receipt for each in answer.messages}
        if not gone:
            return Answer(at, answer.messages)
        kept, behind = self._without(answer.messages, gone)
        for request in portions((receipt, Held(receipt)) for receipt in behind):
            hold([entry for _, entry in request])
        log.warning(
            "Pub/Sub took back %d of %d messages as they came: they come again",
            len(gone),
            len(answer.messages),
        )
        return Answer(at, kept)

    def _without(
        self, messages: Sequence[Received], gone: Collection[str]
    ) -> tuple[list[Received], list[str]]:
        """What is left; and the receipts of what follows one that is gone in its ordering key."""
        kept: list[Received] = []
        behind: list[str] = []
        keys: set[str] = set()
        for each in messages:
            key = each.raw.message.ordering_key if self._ordered else ""
            if each.receipt in gone:
                keys.update([key] if key else [])
            elif key in keys:
                behind.append(each.receipt)
            else:
                kept.append(each)
        return kept, behind
