"""Drives a pipeline step by step: push, advance time, drain; deterministic, in the calling thread.

The stages are those of every run (:class:`airflow_broadway.core.local.engine.Engine`); only the
source of messages and the clock belong to the test.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.local.batching import Batch
from airflow_broadway.core.local.engine import Engine
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.entry import of_delivery
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.core.stages.receiving import check_messages
from airflow_broadway.testing.clock import ManualClock
from airflow_broadway.testing.dummy import RecordingAcknowledger

#: The minimum step of the clock in seconds: smaller steps are rounding errors.
_LEAST_STEP = 1e-6

log = logging.getLogger(__name__)


class PipelineDriver:
    """Drives the stages of ``pipeline``.

    Batches of Spark batchers are recorded in :attr:`batches` and succeed unhandled.

    :param pipeline: A pipeline or its class; any producer, which is never opened.
    """

    def __init__(
        self, pipeline: Pipeline | type[Pipeline], *, clock: ManualClock | None = None
    ) -> None:
        self.pipeline = pipeline() if isinstance(pipeline, type) else pipeline
        self.clock = clock or ManualClock()
        #: Settles messages that are pushed as plain data, and records the calls.
        self.acknowledger = RecordingAcknowledger()
        #: The batches handed to ``handle_batch``, in order.
        self.batches: list[Batch] = []
        self.limiter = RateLimiter(self.pipeline.producer.rate_limiting, self.clock)
        self._engine = Engine(
            self.pipeline, clock=self.clock, inline=True, on_batch=self.batches.append
        )
        self._buffer: list[Message] = []
        self._count = 0
        self._drained = False

    def message(self, data: Any, **fields: Any) -> Message:
        """Builds a message with a new id and, by default, this driver's acknowledger."""
        self._count += 1
        fields.setdefault("message_id", f"test-{self._count}")
        fields.setdefault("position", self._count)
        fields.setdefault("received_at", self.clock.now())
        fields.setdefault("acknowledger", AckRef(self.acknowledger, "test"))
        return Message(data, **fields)

    def push(self, messages: Iterable[Any]) -> None:
        """Feeds messages, or their data, to the processors, past transformer and rate limiting.

        :raises PipelineError: If the driver has been drained.
        """
        self._check_open()
        dispatch = [item if type(item) is Message else self.message(item) for item in messages]
        self._engine.feed([dispatch] if dispatch else [])

    def produce(self, messages: Sequence[Message]) -> None:
        """Emits messages as a producer does: through the transformer, at the allowed rate.

        As in Broadway a transformer that raises loses the whole list, unsettled; the error is
        logged.  In a run it fails its message alone.

        :raises PipelineError: If the driver has been drained.
        """
        self._check_open()
        try:
            transformed = self._transformed(messages)
        except PipelineError as error:
            log.error("%s", error, exc_info=error.__cause__, extra={"code": "producer_crash"})
            return
        self._buffer += transformed
        self._release()

    def _transformed(self, messages: Sequence[Any]) -> list[Message]:
        transformer = self.pipeline.producer.transformer
        if transformer is None:
            check_messages(messages)
            return list(messages)
        try:
            return [of_delivery(transformer(message), message) for message in messages]
        except PipelineError:
            raise
        except Exception as error:
            text = f"the transformer raised {type(error).__name__}: {error}"
            raise PipelineError(text, code="producer_crash") from error

    def elapse(self, seconds: float) -> None:
        """Advances time: timeouts fire on time, rate limits reset."""
        end = self.clock.monotonic() + seconds
        while True:
            waits = [end - self.clock.monotonic()]
            timeout = self._engine.next_timeout()
            if timeout is not None:
                waits.append(timeout)
            if self._buffer:
                waits.append(self.limiter.wait_seconds())
            step = min(waits)
            if step > 0:
                self.clock.advance(max(step, _LEAST_STEP))
            self._engine.tick()
            self._release()
            if self.clock.monotonic() >= end - _LEAST_STEP:
                return

    def reset_rate_limit(self) -> None:
        """Ends the rate limiter's current interval."""
        self.limiter.reset()
        self._release()

    def update_rate_limiting(self, **options: Any) -> None:
        """Changes the rate limiting of the running pipeline."""
        self.limiter.update_rate_limiting(**options)
        self._release()

    def drain(self, emitted: Sequence[Message] = ()) -> None:
        """Stops gracefully: releases buffered messages at their rate, then ``emitted`` (emitted by
        the producer while preparing to drain), then delivers pending batches.
        """
        while self._buffer:
            self.elapse(self.limiter.wait_seconds())
        if emitted:
            self.produce(emitted)
        while self._buffer:
            self.elapse(self.limiter.wait_seconds())
        self._engine.drain()
        self._engine.close()
        self._drained = True

    def _check_open(self) -> None:
        if self._drained:
            raise PipelineError("the pipeline has been drained: it accepts no more messages")

    def _release(self) -> None:
        """Feeds buffered messages as far as the rate limit allows."""
        if self._buffer:
            granted = self.limiter.take(len(self._buffer))
            dispatch, self._buffer = self._buffer[:granted], self._buffer[granted:]
            if dispatch:
                self._engine.feed([dispatch])
