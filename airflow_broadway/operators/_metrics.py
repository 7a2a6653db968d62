"""The metrics of a run, through Airflow's ``Stats``: a closed list.

Tags are pipeline, dag_id, batcher and trigger; never keys or ids, whose number has no bound.
"""

from __future__ import annotations

from enum import StrEnum

from airflow.providers.common.compat.sdk import Stats

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.custody.report import SettleReport

__all__ = ["Metric", "Metrics"]


class Metric(StrEnum):
    """Every name there is, with its kind and meaning."""

    #: Counter: messages received by process tasks.
    RECEIVED = "broadway.messages.received"
    #: Counter: messages that a callback failed.
    FAILED = "broadway.messages.failed"
    #: Counters: messages by what their broker did with them.
    ACKED = "broadway.messages.acked"
    REQUEUED = "broadway.messages.requeued"
    DEAD_LETTERED = "broadway.messages.dead_lettered"
    RELEASED = "broadway.messages.released"
    #: Counter: messages whose lease had lapsed before they were settled; above 0 is loud.
    LAPSED = "broadway.messages.lapsed"
    #: Counter: batches handled; tags batcher and trigger.
    BATCHES = "broadway.batches"
    #: Timer, milliseconds as Airflow's: one batch; tag batcher.
    BATCH_DURATION = "broadway.batch.duration"
    #: Gauge: messages of a batch; tag batcher.
    BATCH_SIZE = "broadway.batch.size"
    #: Gauges: messages ready in the queue, and the age of the oldest in seconds.
    QUEUE_DEPTH = "broadway.queue.depth"
    QUEUE_OLDEST_AGE = "broadway.queue.oldest_age"
    #: Gauge: seconds until the lease that lapses next does.
    LEASE_REMAINING = "broadway.lease.remaining"


class Metrics:
    """Sends the metrics of one pipeline in one Dag."""

    def __init__(self, pipeline: str, dag_id: str) -> None:
        self._tags = {"pipeline": pipeline, "dag_id": dag_id}

    def count(self, metric: Metric, count: int, **tags: str) -> None:
        """Add to a counter; nothing is sent for 0."""
        if count:
            Stats.incr(metric.value, count, tags={**self._tags, **tags})

    def gauge(self, metric: Metric, value: float, **tags: str) -> None:
        """Set a gauge."""
        Stats.gauge(metric.value, value, tags={**self._tags, **tags})

    def seconds(self, metric: Metric, seconds: float, **tags: str) -> None:
        """Record a duration."""
        Stats.timing(metric.value, seconds * 1000.0, tags={**self._tags, **tags})

    def settled(self, report: SettleReport) -> None:
        """Count what a settlement did."""
        self.count(Metric.ACKED, report.acked)
        self.count(Metric.REQUEUED, report.requeued)
        self.count(Metric.DEAD_LETTERED, report.dead_lettered)
        self.count(Metric.RELEASED, report.released)
        self.count(Metric.LAPSED, report.lapsed)

    def depth(self, depth: QueueDepth) -> None:
        """Tell how full the queue is."""
        self.gauge(Metric.QUEUE_DEPTH, depth.ready)
        self.gauge(Metric.QUEUE_OLDEST_AGE, depth.oldest_age or 0.0)
