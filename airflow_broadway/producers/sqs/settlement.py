"""What one settlement asks of SQS."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.receipts.batch_requests import Call, Letters
from airflow_broadway.producers.kit.receipts.settlement import ReceiptSettlement
from airflow_broadway.producers.sqs import dead_letters
from airflow_broadway.producers.sqs.batch_requests import call_of
from airflow_broadway.producers.sqs.client import Queue
from airflow_broadway.producers.sqs.inspect import dead_letter_queue
from airflow_broadway.producers.sqs.limits import LONGEST_VISIBILITY, MAX_BODY

if TYPE_CHECKING:
    from airflow_broadway.producers.sqs.options import SqsOptions

__all__ = ["QueueSettlement"]


class QueueSettlement(ReceiptSettlement):
    """Carries verdicts out on the messages of one generation; used from one thread."""

    service: ClassVar[str] = "SQS"

    def __init__(self, producer: SqsOptions, queue: Queue, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._producer = producer
        self._queue = queue

    def _remove_call(self) -> Call:
        return call_of(self._queue.delete)

    def _removed(self, receipt: str) -> dict[str, Any]:
        return {"ReceiptHandle": receipt}

    def _hide_call(self) -> Call:
        return call_of(self._queue.change)

    def _hidden(self, receipt: str, seconds: int) -> dict[str, Any]:
        return {"ReceiptHandle": receipt, "VisibilityTimeout": seconds}

    def _longest_delay(self) -> int:
        """What is left of SQS's 12 hours."""
        now = self._clock.now().timestamp()
        since = now if self._receipts.since is None else self._receipts.since
        return max(0, math.floor(since + LONGEST_VISIBILITY - now) - 1)

    def _why_cut(self, count: int, seconds: int) -> str:
        return (
            f"SQS hides a message for 12 hours from its receipt at most: the delay of"
            f" {many(count, 'message')} was cut to the {seconds:,} s that remained"
        )

    def _open_letters(self) -> Letters:
        target = dead_letter_queue(self._producer, self._queue)
        try:
            most = target.attributes("MaximumMessageSize").get("MaximumMessageSize")
        except BroadwayError:  # may be denied, and is not needed
            most = None
        make = partial(
            dead_letters.letter,
            queue=self._queue.name,
            fifo=target.url.endswith(".fifo"),
            max_bytes=int(most or MAX_BODY),
        )
        return Letters(make, dead_letters.requests, call_of(target.send), "SendMessage")
