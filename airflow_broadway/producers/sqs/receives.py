"""Receives: each is told as a span, and what a lost answer held is asked for again.

Used from several threads at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core import telemetry
from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable
from airflow_broadway.producers.sqs.reading import request_of

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock
    from airflow_broadway.producers.sqs.client import Queue
    from airflow_broadway.producers.sqs.producer import SqsProducer

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

    def __init__(self, producer: SqsProducer, queue: Queue, pipeline: str, clock: Clock) -> None:
        self._producer = producer
        self._queue = queue
        self._pipeline = pipeline
        self._clock = clock
        #: Of a FIFO queue, those whose answer was lost: asked again, they get that answer.
        self._unanswered: deque[dict[str, Any]] = deque()

    def receive(self, count: int) -> list[dict[str, Any]]:
        """At most ``count`` messages, as SQS gives them, each with what it is held by.

        :raises ProducerError: If SQS refuses.
        :raises ProducerUnavailable: If it cannot be reached.
        """
        request = request_of(self._producer, count)
        if self._unanswered:
            with suppress(IndexError):  # another thread was faster
                request = self._unanswered.popleft()
        if not telemetry.handlers(*_EVENTS):
            return self._asked(request)
        span = telemetry.Span(_SPAN, {"name": self._pipeline, "demand": count})
        try:
            found = self._asked(request)
        except Exception as error:
            span.exception("error", error, "")
            raise
        span.stop({"name": self._pipeline, "demand": count, "messages": found})
        return found

    def lost(self) -> list[tuple[float, dict[str, Any]]]:
        """What the lost answers held, each with when it was asked for anew.

        Its groups would be blocked for a lease.  What is still out of reach comes back by itself.
        """
        messages: list[tuple[float, dict[str, Any]]] = []
        with suppress(BroadwayError):
            while self._unanswered:
                at = self._clock.now().timestamp()
                messages += [(at, raw) for raw in self._asked(self._unanswered.popleft())]
        return messages

    def _asked(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            found = self._queue.receive(request)
        except ProducerUnavailable:
            if self._producer.fifo:  # it may have been carried out: its groups would be blocked
                self._unanswered.append(request)
            raise
        return [raw for raw in found if self._is_whole(raw)]

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
