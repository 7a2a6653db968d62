"""What one settlement asks of Pub/Sub."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.receipts.batch_requests import Call, Letters
from airflow_broadway.producers.kit.receipts.settlement import ReceiptSettlement, Work
from airflow_broadway.producers.pubsub import dead_letters
from airflow_broadway.producers.pubsub.batch_requests import (
    Held,
    acknowledging,
    modifying,
    publishing,
)
from airflow_broadway.producers.pubsub.client import Client
from airflow_broadway.producers.pubsub.inspect import dead_letter_topic
from airflow_broadway.producers.pubsub.limits import LONGEST_DEADLINE, MAX_IDS

if TYPE_CHECKING:
    from airflow_broadway.producers.pubsub.options import PubSubOptions

__all__ = ["SubscriptionSettlement"]


class SubscriptionSettlement(ReceiptSettlement):
    """Carries verdicts out on the messages of one generation; used from one thread."""

    service: ClassVar[str] = "Pub/Sub"
    removes_once: ClassVar[bool] = True
    hides_behind: ClassVar[bool] = True

    def __init__(self, producer: PubSubOptions, client: Client, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, wave=MAX_IDS * producer.receive_concurrency, **kwargs)
        self._producer = producer
        self._client = client

    def carry_out(self, work: Work, *, note: bool) -> dict[str, Action]:
        done = super().carry_out(work, note=note)
        # Nothing else tells whoever receives these that they were handed out before.
        doubtful = self._taken_as_done
        self._note_again(
            {key: each for key, each in work.verdicts.items() if key not in done or key in doubtful}
        )
        return done

    def _note(self, action: Action, verdicts: Mapping[str, Verdict]) -> None:
        if action is Action.RETRY:
            super()._note(action, verdicts)
        elif action in (Action.RELEASE, Action.LEAVE):
            self._note_again(verdicts)

    def _note_again(self, verdicts: Mapping[str, Verdict]) -> None:
        """Note that these were handed out, with the failures on record before."""
        entries = self._entries
        failures = {key: entries[key].attempt - 1 if key in entries else 0 for key in verdicts}
        self._folder.failures.note(failures, self._clock.now())

    def _remove_call(self) -> Call:
        return acknowledging(self._client, self._clock, self._is_held)

    def _removed(self, receipt: str) -> str:
        return receipt

    def _hide_call(self) -> Call:
        return modifying(self._client, self._clock, self._is_held)

    def _hidden(self, receipt: str, seconds: int) -> Held:
        return Held(receipt, seconds)

    def _longest_delay(self) -> int:
        return LONGEST_DEADLINE

    def _why_cut(self, count: int, seconds: int) -> str:
        return (
            f"Pub/Sub puts a message off for {seconds} s at most: the delay of"
            f" {many(count, 'message')} was cut to that; give retry a max_backoff of {seconds}"
        )

    def _open_letters(self) -> Letters:
        topic = dead_letter_topic(self._producer, self._client)
        publish = publishing(self._client, topic, self._clock)
        make = partial(dead_letters.letter, subscription=self._client.name)
        return Letters(make, dead_letters.requests, publish, "Publish")
