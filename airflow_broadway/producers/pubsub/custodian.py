"""The half that renews and settles, from any process: knows the lease, reads the ack ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

from airflow_broadway.producers.kit.receipts.batch_requests import Call
from airflow_broadway.producers.kit.receipts.custodian import ReceiptCustodian
from airflow_broadway.producers.kit.receipts.receipts import Receipts
from airflow_broadway.producers.pubsub.batch_requests import Held, batch_requests, modifying
from airflow_broadway.producers.pubsub.client import Client, open_client, place_of
from airflow_broadway.producers.pubsub.receipts import receipts_folder
from airflow_broadway.producers.pubsub.settlement import SubscriptionSettlement

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.pubsub.options import PubSubOptions

__all__ = ["PubSubCustodian"]


class PubSubCustodian(ReceiptCustodian):
    """Renews and settles the generations of one subscription."""

    service: ClassVar[str] = "Pub/Sub"
    ends_in_order: ClassVar[bool] = True

    def __init__(self, producer: PubSubOptions, env: ProducerEnv) -> None:
        folder = receipts_folder(producer, env)
        requests = batch_requests(producer.receive_concurrency, env.clock)
        super().__init__(producer, place_of(producer), folder, requests, env.clock)
        self._producer = producer
        self._env = env
        self._opened: Client | None = None

    def _renew_call(self) -> Call:
        return modifying(self._client, self._clock)

    def _renewed(self, receipt: str, seconds: int) -> Held:
        return Held(receipt, seconds)

    def _note_again(self, ids: Iterable[str]) -> None:
        self._folder.failures.note(dict.fromkeys(ids, 0), self._clock.now())

    def _settlement(
        self, receipts: Receipts, *, held_until: Callable[[], float]
    ) -> SubscriptionSettlement:
        return SubscriptionSettlement(
            self._producer,
            self._client,
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
    def _client(self) -> Client:
        if self._opened is None:
            self._opened = open_client(self._producer, self._env)
        return self._opened
