"""The dead letters of a Pub/Sub producer, for people.

A topic shows nothing to anybody: letters are read from a pull subscription of it.  Whoever looks
there hides letters from others for a while, and each look counts as a delivery.  What is not moved
is shown again at once.  A letter is acknowledged once its message is published, so that whoever is
killed leaves it in both places at most; the message is a new one to Pub/Sub, and is received as
redelivered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.custody.dead_letters import DeadLetter, destination_of
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kit.looks import LookCount
from airflow_broadway.producers.kit.receipts.batch_requests import Refusal
from airflow_broadway.producers.kit.receipts.letters import ReceivedLetters
from airflow_broadway.producers.pubsub import dead_letters
from airflow_broadway.producers.pubsub.batch_requests import (
    Held,
    acknowledging,
    batch_requests,
    modifying,
    publishing,
)
from airflow_broadway.producers.pubsub.client import open_client
from airflow_broadway.producers.pubsub.errors import Denied
from airflow_broadway.producers.pubsub.inspect import letters_subscription, topic_of
from airflow_broadway.producers.pubsub.limits import MAX_PULL
from airflow_broadway.producers.pubsub.reading import instant_of

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.pubsub.client import Client
    from airflow_broadway.producers.pubsub.options import PubSubOptions

__all__ = ["PubSubDeadLetters"]

#: Seconds for which letters are hidden while they are looked at.
HIDDEN_SECONDS: Final = 300


class PubSubDeadLetters(ReceivedLetters):
    """Those that one subscription shows; see :mod:`airflow_broadway.core.custody.dead_letters`.

    :param place: The subscription to look into, by its id or full name, instead of the producer's.
    :raises ProducerError: If there is no topic for dead letters, or no subscription that shows it.
    """

    def __init__(self, producer: PubSubOptions, env: ProducerEnv, place: str | None) -> None:
        self._client = open_client(producer, env)
        try:
            self._dead = letters_subscription(producer, self._client, place)
        except BaseException:  # a kill too; raised again
            self._client.close()
            raise
        self._clock = env.clock
        self._staging = env.staging
        self._wait = producer.receive_timeout
        self._requests = batch_requests(1, env.clock)
        #: Subscriptions that letters go back to → their topics.
        self._topics: dict[str, str] = {}

    @property
    def place(self) -> str:
        return f"subscription {self._dead.name!r}"

    def count(self) -> int:
        """By a look at each: Pub/Sub counts none but for Cloud Monitoring, minutes late."""
        return sum(1 for _ in self.letters())

    def close(self) -> None:
        self._requests.close()
        self._client.close()

    # -- moving --------------------------------------------------------------------------------

    def _looking(self) -> _Looking:
        hide = modifying(self._dead, self._clock)

        def hidden(receipts: dict[str, str], seconds: int) -> set[str]:
            entries = ((key, Held(receipt, seconds)) for key, receipt in receipts.items())
            return set(self._requests.send(hide, entries))

        return _Looking(self._dead, self._wait, hidden)

    def _looks(self) -> LookCount:
        try:
            policy = self._dead.settings().dead_letter_policy
        except Denied:  # what Pub/Sub then moves goes to yet another topic, and is not deleted
            limit = None
        else:
            limit = int(policy.max_delivery_attempts) if policy.dead_letter_topic else None
        return LookCount(
            self._staging, f"the subscription {self._dead.name!r}", limit, "max_delivery_attempts"
        )

    def _deliveries(self, raw: Any) -> int:
        return int(raw.delivery_attempt)

    def _key(self, raw: Any) -> str:
        return str(raw.message.message_id)

    def _back(self, letter: DeadLetter, raw: Any, to: str | None) -> tuple[str, dict[str, Any]]:
        topic = self._topic(destination_of(letter, [self._client.name], to))
        return topic, dead_letters.sent_back(raw.message, letter.original_id)

    def _send(self, target: str, made: Mapping[str, dict[str, Any]]) -> Mapping[str, str]:
        publish = publishing(self._client, target, self._clock)
        refused = self._requests.send_requests(publish, dead_letters.requests(made))
        return {key: each.text for key, each in refused.items()}

    def _delete(self, raws: Sequence[Any]) -> Mapping[str, Refusal]:
        entries = ((self._key(raw), raw.ack_id) for raw in raws)
        return self._requests.send(acknowledging(self._dead, self._clock), entries)

    def _topic(self, subscription: str) -> str:
        if subscription not in self._topics:
            self._topics[subscription] = topic_of(self._client.other(subscription))
        return self._topics[subscription]

    # -- one letter ----------------------------------------------------------------------------

    def _letter(self, raw: Any) -> DeadLetter:
        message = raw.message
        why = dead_letters.why_of(message.attributes)
        return DeadLetter(
            message_id=message.message_id,
            body=message.data,
            properties={"attributes": why.own, "orderingKey": message.ordering_key},
            reason=why.reason,  # what Pub/Sub's own policy sets aside says nothing
            stage=why.stage,
            attempt=why.attempt,
            enqueued_at=why.published_at,
            died_at=instant_of(message.publish_time) if why.subscription else None,
            generation="",
            origin=why.subscription or self._client.name,
            original_id=why.message_id or message.message_id,
        )


class _Looking:
    """One walk through the letters.

    :param wait: Seconds that a pull waits: one that finds nothing is the end.
    :param hide: Hides letters for so many seconds; their keys that Pub/Sub has taken back.
    """

    def __init__(self, dead: Client, wait: float, hide: Any) -> None:
        self._dead = dead
        self._wait = wait
        self._hide = hide
        #: Hidden from others: the letter's own id → ack id.
        self._hidden: dict[str, str] = {}
        self._known: set[str] = set()

    def batches(self) -> Iterator[list[Any]]:
        """What lies there, each letter once, as Pub/Sub hands it out."""
        while found := self._dead.pull(MAX_PULL, self._wait):
            receipts = {raw.message.message_id: raw.ack_id for raw in found}
            gone = self._hide(receipts, HIDDEN_SECONDS)
            self._hidden |= {key: each for key, each in receipts.items() if key not in gone}
            fresh = [raw for raw in found if raw.message.message_id not in self._known | gone]
            if not fresh and not gone:  # it has lasted so long that the first are shown again
                return
            self._known |= {raw.message.message_id for raw in fresh}
            yield fresh

    def gone(self, key: str) -> None:
        """A letter lies there no more."""
        del self._hidden[key]

    def show_again(self) -> None:
        """Show at once what was hidden; if that fails, Pub/Sub does so in a while."""
        with suppress(ProducerError):
            self._hide(self._hidden, 0)
