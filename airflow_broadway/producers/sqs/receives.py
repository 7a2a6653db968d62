"""Receives of SQS: one request each, with what each message is known and held by."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable
from airflow_broadway.producers.kit.receipts.polls import Answer, Received
from airflow_broadway.producers.sqs.reading import request_of

if TYPE_CHECKING:
    from airflow_broadway.producers.sqs.client import Queue
    from airflow_broadway.producers.sqs.options import SqsOptions

__all__ = ["Receives"]

log = logging.getLogger(__name__)

#: What a message is known and held by.
_KEYS: Final = ("MessageId", "ReceiptHandle")
_SPAN: Final = "sqs.receive_messages"
_EVENTS: Final = tuple(f"{_SPAN}.{end}" for end in ("start", "stop", "exception"))


class Receives:
    """Makes the receives of one run.

    :param pipeline: Its name, for the spans.
    """

    def __init__(self, producer: SqsOptions, queue: Queue, pipeline: str, clock: Clock) -> None:
        self._producer = producer
        self._queue = queue
        self._pipeline = pipeline
        self._clock = clock
        #: Of a FIFO queue, those whose answer was lost: asked again, they get that answer.
        self._unanswered: deque[dict[str, Any]] = deque()

    def receive(self, count: int) -> Answer:
        """At most ``count`` messages, hidden from when they were asked for.

        :raises ProducerError: If SQS refuses.
        :raises ProducerUnavailable: If it cannot be reached.
        """
        at, request = self._clock.now().timestamp(), request_of(self._producer, count)
        if self._unanswered:
            with suppress(IndexError):  # another thread was faster
                request = self._unanswered.popleft()
        if not telemetry.handlers(*_EVENTS):
            return Answer(at, self._asked(request))
        span = telemetry.Span(_SPAN, {"name": self._pipeline, "demand": count})
        try:
            found = self._asked(request)
        except Exception as error:
            span.exception("error", error, "")
            raise
        span.stop(
            {"name": self._pipeline, "demand": count, "messages": [each.raw for each in found]}
        )
        return Answer(at, found)

    def lost(self) -> list[tuple[float, Received]]:
        """What the lost answers held, each with when it was asked for anew.

        Its groups would be blocked for a lease.  What is still out of reach comes back by itself.
        """
        messages: list[tuple[float, Received]] = []
        with suppress(BroadwayError):
            while self._unanswered:
                at = self._clock.now().timestamp()
                messages += [(at, each) for each in self._asked(self._unanswered.popleft())]
        return messages

    def _asked(self, request: dict[str, Any]) -> list[Received]:
        try:
            found = self._queue.receive(request)
        except ProducerUnavailable:
            if self._producer.fifo:  # it may have been carried out: its groups would be blocked
                self._unanswered.append(request)
            raise
        return [
            Received(raw["MessageId"], raw["ReceiptHandle"], raw)
            for raw in found
            if self._is_whole(raw)
        ]

    def _is_whole(self, raw: Any) -> bool:
        """Whether a message has what it is known and held by."""
        if all(isinstance(raw.get(name), str) and raw[name] for name in _KEYS):
            return True
        log.error(
            "a message of the SQS queue %r came without %s: it cannot be held, and comes again",
            self._queue.name,
            " or ".join(name for name in _KEYS if not raw.get(name)),
        )
        return False
