"""The queues of our own beside a source queue, and the arguments that each is declared with.

================================  =================================================================
``broadway.held.<q>.<n>``         the bundles of one live generation, until their outcomes are known
``broadway.held.<q>.<n>.claim``   exclusive to the connection that opens, settles or sweeps number n
``broadway.delay.<s>.<q>``        retries that wait; one queue per step of the ladder
``broadway.dead.<q>``             dead letters, unless ``dead_letter`` names another place
``broadway.held``                 the direct exchange from a generation's id to its holding queue
================================  =================================================================

The binding of a holding queue to a generation's id is the fence: a process that was taken for dead
and goes on publishing gets its bundles returned after the unbind, and acknowledges nothing.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from airflow_broadway.core.errors import ProducerError

#: The exchange that routes bundles: direct, by the generation's id.
EXCHANGE = "broadway.held"
#: Seconds of the steps of the delay ladder.
LADDER = (1, 5, 15, 60, 300, 900, 3600, 21600)
#: AMQP's limit for a queue's name and for a routing key, in bytes.
_MAX_NAME_BYTES = 255
#: A retry may come this part of its delay early: as much as the retry policy's own jitter.
_EARLY_PART = 0.1

#: A quorum queue that never gives a message up by itself.  RabbitMQ 4 gives one up after 20 returns
#: by default, and its -1 for "no limit" makes RabbitMQ 3 give one up at the first return.  A bound
#: that a policy sets makes runs fail, and drops nothing.
KEEPING: dict[str, Any] = {
    "x-queue-type": "quorum",
    "x-delivery-limit": 1_000_000_000,
    "x-overflow": "reject-publish",
}


def rung(delay: float) -> int | None:
    """The step of the ladder for a delay in seconds; ``None`` for no delay.

    The shortest step that is at least nine tenths of the delay, else the longest of all.
    """
    if delay <= 0:
        return None
    return next((step for step in LADDER if step >= delay * (1 - _EARLY_PART)), LADDER[-1])


@dataclass(frozen=True, slots=True)
class QueueNames:
    """The names that belong to one source queue."""

    source: str

    def held(self, number: int) -> str:
        """A holding queue."""
        return self._name("broadway.held", f".{number}")

    def own_held(self, name: object) -> str:
        """Returns ``name`` if it is that of a holding queue of this source.

        To be called on every such name that was read: strangers may write to the staging folder,
        and holding queues are emptied.

        :raises ProducerError: If it is not.
        """
        number = re.fullmatch(r"(.*)\.(\d{1,6})", str(name), re.DOTALL)
        if number is not None and name == self.held(int(number[2])):
            return str(name)
        raise ProducerError(
            f"{str(name)[:_MAX_NAME_BYTES]!r} is no holding queue of {self.source!r}, and is left"
            " as it is: another program wrote its name"
        )

    def key(self, generation: str) -> str:
        """The routing key of a generation's bundles: of this source alone."""
        key = f"{self.source}.{generation}"
        fits = len(key.encode()) <= _MAX_NAME_BYTES
        return key if fits else hashlib.sha256(key.encode()).hexdigest()

    @property
    def dead(self) -> str:
        """The queue of dead letters."""
        return self._name("broadway.dead", "")

    def delay(self, step: int) -> str:
        """The queue in which retries wait for a step of the ladder."""
        return self._name(f"broadway.delay.{step}", "")

    def delay_arguments(self, step: int) -> dict[str, Any]:
        """The arguments of a step of the ladder.

        Its dead-letter worker waits for the source queue's confirm, which needs ``reject-publish``.
        """
        return {
            **KEEPING,
            "x-dead-letter-strategy": "at-least-once",
            "x-message-ttl": step * 1000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.source,
        }

    def _name(self, prefix: str, suffix: str) -> str:
        # A claim's name is the longest of all.
        name = f"{prefix}.{self.source}{suffix}"
        fits = len(name.encode()) <= _MAX_NAME_BYTES - len(".claim")
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:32]
        return name if fits else f"{prefix}.{digest}{suffix}"
