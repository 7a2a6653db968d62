"""The metrics of a run, a closed list, sent to the host's metrics backend.

Tags are pipeline, dag_id, batcher and trigger; never keys or ids, which are unbounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.custody.report import SettleReport


class Metric(StrEnum):
    """All metric names, with kind and meaning."""

    #: Counter: messages received by process tasks.
    RECEIVED = "broadway.messages.received"
    #: Counter: messages that a callback failed.
    FAILED = "broadway.messages.failed"
    #: Counters: messages by outcome class at the broker.
    ACKED = "broadway.messages.acked"
    REQUEUED = "broadway.messages.requeued"
    DEAD_LETTERED = "broadway.messages.dead_lettered"
    RELEASED = "broadway.messages.released"
    #: Counter: messages whose lease had lapsed before settlement; values above 0 need attention.
    LAPSED = "broadway.messages.lapsed"
    #: Counter: batches handled; tags batcher and trigger.
    BATCHES = "broadway.batches"
    #: Timer, in milliseconds like Airflow's: one batch; tag batcher.
    BATCH_DURATION = "broadway.batch.duration"
    #: Gauge: messages of a batch; tag batcher.
    BATCH_SIZE = "broadway.batch.size"
    #: Gauges: messages ready in the queue, and the age of the oldest in seconds.
    QUEUE_DEPTH = "broadway.queue.depth"
    QUEUE_OLDEST_AGE = "broadway.queue.oldest_age"
    #: Gauge: seconds until the next lease lapses.
    LEASE_REMAINING = "broadway.lease.remaining"


class MetricSink:
    """The host's metrics backend, called from one thread; this one discards metrics."""

    def count(self, name: str, count: int, tags: Mapping[str, str]) -> None:
        """Adds to a counter."""

    def gauge(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        """Sets a gauge."""

    def seconds(self, name: str, seconds: float, tags: Mapping[str, str]) -> None:
        """Records a duration."""


class Metrics:
    """Sends the metrics of one pipeline in one Dag."""

    def __init__(self, sink: MetricSink, *, pipeline: str, dag_id: str) -> None:
        self._sink = sink
        self._tags = {"pipeline": pipeline, "dag_id": dag_id}

    def count(self, metric: Metric, count: int, **tags: str) -> None:
        """Adds to a counter; sends nothing for 0."""
        if count:
            self._sink.count(metric.value, count, {**self._tags, **tags})

    def gauge(self, metric: Metric, value: float, **tags: str) -> None:
        """Sets a gauge."""
        self._sink.gauge(metric.value, value, {**self._tags, **tags})

    def seconds(self, metric: Metric, seconds: float, **tags: str) -> None:
        """Records a duration."""
        self._sink.seconds(metric.value, seconds, {**self._tags, **tags})

    def settled(self, report: SettleReport) -> None:
        """Counts the messages of a settlement."""
        self.count(Metric.ACKED, report.acked)
        self.count(Metric.REQUEUED, report.requeued)
        self.count(Metric.DEAD_LETTERED, report.dead_lettered)
        self.count(Metric.RELEASED, report.released)
        self.count(Metric.LAPSED, report.lapsed)

    def depth(self, depth: QueueDepth, *, reports_oldest_age: bool = True) -> None:
        """Sends the queue's backlog and the age of its oldest message.

        :param reports_oldest_age: Whether its broker reports ages.  If not, an empty queue must not
            set the gauge to 0, because the gauge would keep that value for later messages.
        """
        self.gauge(Metric.QUEUE_DEPTH, depth.ready)
        if reports_oldest_age and (depth.oldest_age is not None or not depth.ready):
            self.gauge(Metric.QUEUE_OLDEST_AGE, depth.oldest_age or 0.0)
