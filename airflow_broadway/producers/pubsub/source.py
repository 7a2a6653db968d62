"""The half that receives: in the run's own thread, for one generation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar, Final

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kit.receipts.batch_requests import Call
from airflow_broadway.producers.kit.receipts.polls import Answer, Received
from airflow_broadway.producers.kit.receipts.source import ReceiptSource
from airflow_broadway.producers.pubsub.batch_requests import Held, batch_requests, modifying
from airflow_broadway.producers.pubsub.client import open_client, place_of
from airflow_broadway.producers.pubsub.dead_letters import REQUEUED
from airflow_broadway.producers.pubsub.earlier import Earlier
from airflow_broadway.producers.pubsub.errors import Expired
from airflow_broadway.producers.pubsub.inspect import check
from airflow_broadway.producers.pubsub.pulls import Pulls
from airflow_broadway.producers.pubsub.reading import message_of
from airflow_broadway.producers.pubsub.receipts import receipts_folder

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.pubsub.options import PubSubOptions

__all__ = ["PubSubSource"]

log = logging.getLogger(__name__)

#: Seconds by which a message may be published after now before this machine's clock is suspected.
_SKEW: Final = 60.0


class PubSubSource(ReceiptSource):
    """Receives for one generation."""

    service: ClassVar[str] = "Pub/Sub"
    queue_word: ClassVar[str] = "Pub/Sub subscription"
    ends: ClassVar[tuple[type[ProducerError], ...]] = (Expired,)

    def __init__(self, producer: PubSubOptions, env: ProducerEnv) -> None:
        self._producer = producer
        self._client = open_client(producer, env)
        self._told_of_clock = False
        try:
            deadline = check(producer, self._client)
            self._pulls = Pulls(producer, self._client, env.pipeline, deadline, env.clock)
            folder = receipts_folder(producer, env)
            self._earlier = Earlier(folder, env.generation)
            super().__init__(
                producer,
                env,
                place=place_of(producer),
                name=self._client.name,
                folder=folder,
                requests=batch_requests(producer.receive_concurrency, env.clock),
                most=producer.max_number_of_messages,
                concurrency=producer.receive_concurrency,
                interval=producer.receive_interval,
            )
        except BaseException:  # a kill too; raised again
            self._client.close()
            raise

    def _receive(self, count: int) -> Answer:
        return self._pulls.receive(count)

    def _hide_call(self) -> Call:
        return modifying(self._client, self._clock)

    def _hidden(self, receipt: str, seconds: int) -> Held:
        return Held(receipt, seconds)

    def _groups(self, fresh: Mapping[str, Received]) -> dict[str, str]:
        if not self._producer.message_ordering:
            return {}
        keys = {key: each.raw.message.ordering_key for key, each in fresh.items()}
        return {key: group for key, group in keys.items() if group}

    def _attempts(
        self, fresh: Mapping[str, Received], now: datetime
    ) -> Callable[[str], tuple[int, bool]]:
        # In this order: who settles a lapse meanwhile notes it before it ends the generation.
        earlier = self._earlier.among(fresh, now)
        failures = self._folder.failures.of(fresh, now)
        self._compare_clocks(fresh, now)

        def attempt(key: str) -> tuple[int, bool]:
            if key in failures:
                return failures[key] + 1, True
            raw = fresh[key].raw
            if key in earlier or raw.delivery_attempt > 1:
                return 1, True
            return 1, REQUEUED in raw.message.attributes

        return attempt

    def _compare_clocks(self, fresh: Mapping[str, Received], now: datetime) -> None:
        """Leases end by our own clocks, on several machines: one that is wrong is logged."""
        if self._told_of_clock or not fresh:
            return
        newest = [*fresh.values()][-1].raw.message.publish_time.seconds
        if newest > now.timestamp() + _SKEW:
            self._told_of_clock = True
            log.warning(
                "this machine's clock is %.0f s or more behind Pub/Sub's: leases end by the clocks"
                " of workers, so that one that differs settles too late or too early; set the"
                " clock (NTP)",
                newest - now.timestamp(),
            )

    def _message(
        self, each: Received, *, attempt: int, redelivered: bool, at: datetime, position: int
    ) -> Message:
        return message_of(
            each.raw,
            self._env.generation,
            attempt=attempt,
            redelivered=redelivered,
            at=at,
            position=position,
        )

    def _disconnect(self) -> None:
        self._client.close()
