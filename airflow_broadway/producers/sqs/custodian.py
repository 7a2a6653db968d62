"""The half that renews and settles, from any process: knows the lease, reads the receipts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_broadway.producers.kit.receipts.batch_requests import Call
from airflow_broadway.producers.kit.receipts.custodian import ReceiptCustodian
from airflow_broadway.producers.kit.receipts.receipts import Receipts
from airflow_broadway.producers.sqs.batch_requests import batch_requests, call_of
from airflow_broadway.producers.sqs.client import Queue, open_queue, receipts_folder
from airflow_broadway.producers.sqs.limits import LONGEST_VISIBILITY
from airflow_broadway.producers.sqs.settlement import QueueSettlement

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.sqs.options import SqsOptions

__all__ = ["SqsCustodian"]


class SqsCustodian(ReceiptCustodian):
    """Renews and settles the generations of one queue."""

    service: ClassVar[str] = "SQS"
    limit: ClassVar[int | None] = LONGEST_VISIBILITY

    def __init__(self, producer: SqsOptions, env: ProducerEnv) -> None:
        folder = receipts_folder(producer, env)
        requests = batch_requests(producer.receive_concurrency, env.clock)
        super().__init__(producer, producer.place, folder, requests, env.clock)
        self._producer = producer
        self._env = env
        self._opened: Queue | None = None

    def _renew_call(self) -> Call:
        return call_of(self._queue.change)

    def _renewed(self, receipt: str, seconds: int) -> dict[str, Any]:
        return {"ReceiptHandle": receipt, "VisibilityTimeout": seconds}

    def _settlement(
        self, receipts: Receipts, *, held_until: Callable[[], float]
    ) -> QueueSettlement:
        return QueueSettlement(
            self._producer,
            self._queue,
            self._folder,
            self._requests,
            receipts,
            self._clock,
            held_until=held_until,
        )

    def close(self) -> None:
        super().close()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _queue(self) -> Queue:
        if self._opened is None:
            self._opened = open_queue(self._producer, self._env)
        return self._opened
