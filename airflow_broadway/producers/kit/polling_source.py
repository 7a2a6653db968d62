"""The half that receives, of a broker that holds a message from the very moment it hands it out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.model.message import Message

__all__ = ["PollingSource"]

#: Seconds between two looks at an empty queue: the first, and the longest.
_SHORTEST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.5


class PollingSource(ABC):
    """A source that looks again and again while its queue is empty.

    Each look that takes messages holds all that the generation has for ``producer.lease`` seconds
    from then on.  Nothing is taken ahead, so nothing is under way when it stops.

    :param state: What the lease says of the queue: JSON, no secret; ``queue`` among it.
    """

    def __init__(self, producer: Producer, env: ProducerEnv, state: dict[str, Any]) -> None:
        self._clock = env.clock
        self._received = 0
        self._stopped = False
        self._lease = Lease(
            kind=producer.kind,
            generation=env.generation,
            seconds=producer.lease,
            deadline=env.clock.now() + timedelta(seconds=producer.lease),
            owner=dict(env.owner),
            state=state,
        )

    @abstractmethod
    def take(self, demand: int, position: int, deadline: datetime) -> Sequence[Message]:
        """Take at most ``demand`` messages, at least 1, that are ready now, without waiting.

        :param position: The first message's; the others count on from it.
        :param deadline: Until when to hold them, and all that was taken before.
        """

    @property
    def lease(self) -> Lease:
        return self._lease

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        end = self._clock.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        while demand > 0 and not self._stopped:
            deadline = self._clock.now() + timedelta(seconds=self._lease.seconds)
            messages = self.take(demand, self._received, deadline)
            if messages or not self._received:  # what holds nothing cannot lapse
                self._lease = replace(self._lease, deadline=deadline)
            self._received += len(messages)
            left = end - self._clock.monotonic()
            if messages or left < 1e-6:  # a clock may have no finer step
                return messages
            self._clock.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return []

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def stop(self) -> Sequence[Message]:
        self._stopped = True
        return []

    def close(self) -> None:
        self.stop()
