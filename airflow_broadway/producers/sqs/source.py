"""The half that receives: in the run's own thread, for one generation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kit.receipts.batch_requests import Call
from airflow_broadway.producers.kit.receipts.polls import Answer, Received
from airflow_broadway.producers.kit.receipts.source import ReceiptSource
from airflow_broadway.producers.sqs.batch_requests import batch_requests, call_of
from airflow_broadway.producers.sqs.client import open_queue, receipts_folder
from airflow_broadway.producers.sqs.errors import Expired, InFlightLimit
from airflow_broadway.producers.sqs.inspect import check, look_at_empty
from airflow_broadway.producers.sqs.reading import Reader, group_of, receives_of
from airflow_broadway.producers.sqs.receives import Receives

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.sqs.options import SqsOptions

__all__ = ["SqsSource"]

log = logging.getLogger(__name__)


class SqsSource(ReceiptSource):
    """Receives for one generation."""

    service: ClassVar[str] = "SQS"
    queue_word: ClassVar[str] = "SQS queue"
    full: ClassVar[tuple[type[ProducerError], ...]] = (InFlightLimit,)
    ends: ClassVar[tuple[type[ProducerError], ...]] = (Expired,)

    def __init__(self, producer: SqsOptions, env: ProducerEnv) -> None:
        _check_visibility(producer)
        self._producer = producer
        self._queue = open_queue(producer, env)
        self._reader = Reader(producer, env.generation)
        self._receives = Receives(producer, self._queue, env.pipeline, env.clock)
        self._warned_of_groups = False
        try:
            check(producer, self._queue, env.clock)
            super().__init__(
                producer,
                env,
                place=producer.place,
                name=self._queue.name,
                folder=receipts_folder(producer, env),
                requests=batch_requests(producer.receive_concurrency, env.clock),
                most=producer.max_number_of_messages,
                concurrency=producer.receive_concurrency,
                interval=producer.receive_interval,
            )
        except BaseException:  # a kill too; raised again
            self._queue.close()
            raise

    def _receive(self, count: int) -> Answer:
        return self._receives.receive(count)

    def _lost(self) -> list[tuple[float, Received]]:
        return self._receives.lost()

    def _hide_call(self) -> Call:
        return call_of(self._queue.change)

    def _hidden(self, receipt: str, seconds: int) -> dict[str, Any]:
        return {"ReceiptHandle": receipt, "VisibilityTimeout": seconds}

    def _explain_empty(self) -> None:
        look_at_empty(self._producer, self._queue)

    def _groups(self, fresh: Mapping[str, Received]) -> dict[str, str]:
        if not self._producer.fifo:
            return {}
        groups = {key: group_of(each.raw) for key, each in fresh.items()}
        if "" in groups.values() and not self._warned_of_groups:
            self._warned_of_groups = True
            log.warning(
                "messages of the FIFO queue %r carry no message group: they count as one group, in"
                " order of arrival; send them with a MessageGroupId",
                self._queue.name,
            )
        return groups

    def _attempts(
        self, fresh: Mapping[str, Received], now: datetime
    ) -> Callable[[str], tuple[int, bool]]:
        counts = {key: receives_of(each.raw) for key, each in fresh.items()}
        again = [key for key, count in counts.items() if count > 1]
        failures = self._folder.failures.of(again, now) if again else {}
        # Without notes of failures the receives must stand for them, releases and lapses included.
        durable = self._folder.durable

        def attempt(key: str) -> tuple[int, bool]:
            count = counts[key]
            if count == 1:
                return 1, False
            return (failures.get(key, 0) + 1 if durable else count), True

        return attempt

    def _message(
        self, each: Received, *, attempt: int, redelivered: bool, at: datetime, position: int
    ) -> Message:
        return self._reader.message(
            each.raw, attempt=attempt, redelivered=redelivered, at=at, position=position
        )

    def _disconnect(self) -> None:
        self._queue.close()


def _check_visibility(producer: SqsOptions) -> None:
    """Refuse what makes no lease, though SQS takes it.

    :raises ProducerError: If the visibility timeout is 0.
    """
    if producer.visibility_timeout == 0:
        raise ProducerError(
            "visibility_timeout=0 hides a message from nobody, so no run can hold it: leave it"
            " out, or give the seconds of a lease"
        )
