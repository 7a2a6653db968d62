"""The stages of one process combined: processors, batchers, batch processors.

:class:`Engine` is fed with dispatches and runs all later stages, independent of broker and budget.
A :class:`.run.LocalRun` feeds it from a source, the test kit directly.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import Clock
from airflow_broadway.core.local.batching import Batch, LocalBatcher
from airflow_broadway.core.model.acks import ack_messages
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.batch_processor import CommitRows, drop_rows
from airflow_broadway.core.stages.callbacks import context_of
from airflow_broadway.core.stages.child_host import ChildHost
from airflow_broadway.core.stages.failure_log import Reasons
from airflow_broadway.core.stages.processor import Ack
from airflow_broadway.core.stages.processor_pool import ProcessorPool
from airflow_broadway.core.stages.staged_row import DirectConverter
from airflow_broadway.core.stages.stop import STOP_CHECK_INTERVAL, Stop
from airflow_broadway.core.stages.suspect_lane import Suspects


class Engine:
    """Runs a pipeline.  Batches of Spark batchers succeed unhandled: see :func:`.check_engines`.

    Batch processors run in threads if there are two or more of them in total.

    :param ack: Settles a stage's result: ``ack(successful, failed)``.
    :param inline: Do everything in the calling thread, for tests.
    :param stop: Stops the engine: no further message is begun, and later no further batch.
    :param on_batch: Called with each batch before ``handle_batch``.
    :param transformer: Called with each message first; the producer's ``transformer``, unless the
        messages come from elsewhere.
    :param suspects: As for :class:`.ProcessorPool`.
    :param host: As for :class:`.ProcessorPool`.
    :param commit: Returns the commit function of one batch processor, by its batcher.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        clock: Clock,
        ack: Ack = ack_messages,
        inline: bool = False,
        stop: Stop | None = None,
        on_batch: Callable[[Batch], None] = lambda batch: None,
        transformer: Callable[[Any], Message] | None = None,
        suspects: Suspects | None = None,
        host: ChildHost | None = None,
        commit: Callable[[str], CommitRows] = lambda batcher: drop_rows,
    ) -> None:
        self.pipeline = pipeline
        self.clock = clock
        #: The number of failed messages, in either stage.
        self.failed = 0
        #: The reasons of failed messages, in either stage.
        self.reasons = Reasons()
        self._stop = stop or Stop(self.clock)
        self._ack = ack
        self._lock = threading.Lock()
        self._closed = False
        self._process_seconds = 0.0
        context_of(pipeline)  # setup runs first, in this thread
        self._batchers = {
            name: LocalBatcher(
                pipeline,
                name,
                ack=self._settle,
                clock=self.clock,
                stop=self._stop,
                inline=inline or sum(o.concurrency for o in pipeline.batchers.values()) <= 1,
                on_batch=on_batch,
                commit=commit,
            )
            for name in pipeline.batchers
        }
        self._processors = ProcessorPool(
            pipeline,
            ack=self._settle,
            convert=DirectConverter if pipeline.batchers else None,
            stop=self._stop,
            inline=inline,
            transformer=transformer,
            suspects=suspects,
            host=host,
        )
        if telemetry.observed("topology.init"):
            telemetry.emit(
                "topology.init",
                {"system_time": time.time()},
                {"config": pipeline, "topology_name": pipeline.name},
            )

    @property
    def dropped(self) -> Counter[str]:
        """Keys of data that are not in the schemas → how often they were dropped."""
        return sum((batcher.dropped for batcher in self._batchers.values()), Counter())

    @property
    def batches(self) -> dict[str, dict[str, int]]:
        """Batcher → trigger → number of batches handled."""
        return {name: dict(batcher.triggers) for name, batcher in self._batchers.items()}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of this thread: ``process``, ``batch``, ``handle_batch``."""
        batchers = self._batchers.values()
        return {
            "process": self._process_seconds,
            "batch": sum(batcher.seconds for batcher in batchers),
            "handle_batch": sum(batcher.handle_seconds for batcher in batchers),
        }

    def run(self, dispatches: Iterable[list[Message]]) -> None:
        """Feeds all dispatches through, then delivers pending batches.

        :param dispatches: An empty one lets timeouts be checked.
        """
        self.feed(dispatches)
        self.drain()

    def feed(self, dispatches: Iterable[list[Message]]) -> None:
        """Feeds dispatches through the processors into the batchers."""
        started = time.monotonic()
        in_time = takewhile(lambda _: not self._stop.late(), dispatches)
        for _, result in self._processors.map(in_time, wait=self._wait):
            self._process_seconds += time.monotonic() - started
            self._forward(result.successful)
            self.tick()
            if self._stop.over():
                return
            started = time.monotonic()

    def next_timeout(self) -> float | None:
        """Returns the seconds until a batch's timeout; ``None`` if none is running."""
        due = [batcher.next_due() for batcher in self._batchers.values()]
        running = [timestamp for timestamp in due if timestamp is not None]
        return max(0.0, min(running) - self.clock.monotonic()) if running else None

    def tick(self) -> None:
        """Delivers the batches whose timeout is over, and counts those handled."""
        for batcher in self._batchers.values():
            batcher.tick()

    def drain(self) -> None:
        """Delivers all pending batches, in the order of the batchers, and waits for them."""
        for batcher in self._batchers.values():
            batcher.flush()
        for batcher in self._batchers.values():
            batcher.wait()

    def close(self) -> None:
        """Ends the threads and processes, without waiting for or settling what they are handling.

        Safe to repeat.
        """
        if self._closed:
            return
        with self._lock:
            self._closed = True
        self._processors.left()  # logs the messages in process
        self._processors.close()
        for batcher in self._batchers.values():
            batcher.close()

    # -- internals -----------------------------------------------------------------------------

    def _wait(self) -> float:
        timeout = self.next_timeout()
        return STOP_CHECK_INTERVAL if timeout is None else min(timeout, STOP_CHECK_INTERVAL)

    def _settle(self, successful: list[Message], failed: list[Message]) -> None:
        """Counts and settles a stage's result.

        Called in the thread that produced it, so that results behind a stuck chunk count, too.
        """
        with self._lock:
            if self._closed:
                return  # the run has ended and released these messages
            self.failed += len(failed)
        self.reasons.add(failed)
        self._ack(successful, failed)

    def _forward(self, successful: list[Message]) -> None:
        """Passes the processors' successes to their batchers."""
        if not self._batchers:
            return
        if len(self._batchers) == 1:
            if successful:
                self._batchers[successful[0].batcher].add(successful)
            return
        routed: dict[str, list[Message]] = {}
        for message in successful:
            routed.setdefault(message.batcher, []).append(message)
        for name, messages in routed.items():
            self._batchers[name].add(messages)
