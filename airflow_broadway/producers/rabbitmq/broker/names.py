"""The queues of our own that stand beside a source queue, and what each is declared with.

================================  =================================================================
``broadway.lease.<q>.<hash>``     what one generation holds; messages leave it when the lease lapses
``broadway.returns.<q>``          bundles whose lease lapsed or was given up, for the next run
``broadway.quarantine.<q>``       what lay in the returns queue and is no bundle that can be read
``broadway.delay.<s>.<q>``        retries that wait; one queue per step of the ladder
``broadway.spares.<q>.<ms>``      names of lease queues that are declared for runs to come, by lease
``broadway.dead.<q>``             dead letters, unless ``dead_letter`` names another place
``broadway.leases``               the exchange by which bundles reach their lease queue
================================  =================================================================

Bundles reach a lease queue through an exchange.  So unbinding the queue fences its holder off: a
process that was taken for dead and goes on publishing gets its bundles returned, and acknowledges
nothing.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from airflow_broadway.core.errors import ProducerError

__all__ = ["EXCHANGE", "LADDER", "QueueNames", "lease_arguments", "rung"]

#: The exchange that routes bundles: direct, by the lease queue's name.
EXCHANGE = "broadway.leases"
#: Seconds of the steps of the delay ladder.
LADDER = (1, 5, 15, 60, 300, 900, 3600, 21600)
#: AMQP's limit for a queue's name, in bytes.
_MAX_NAME_BYTES = 255
#: Hexadecimal digits at the end of a lease queue's name.
_DIGEST_DIGITS = 20
#: A retry may come this part of its delay early: as much as the retry policy's own jitter.
_EARLY_PART = 0.1

_QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
_CLASSIC: dict[str, Any] = {"x-queue-type": "classic"}
#: Returns of a message after which its queue gives it up: never.  RabbitMQ 4's default is 20, and
#: its -1 for "no limit" makes RabbitMQ 3 give a message up at its first return.
_NO_LIMIT: dict[str, Any] = {"x-delivery-limit": 1_000_000_000}
#: A dead-letter worker that waits for the target's confirm; needs ``reject-publish``.
_SAFE_DEAD_LETTERING: dict[str, Any] = {
    "x-dead-letter-strategy": "at-least-once",
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

    def lease(self, generation: str) -> str:
        """The lease queue of a generation."""
        digest = hashlib.sha256(f"{self.source}\0{generation}".encode()).hexdigest()
        return self._name("broadway.lease", f".{digest[:_DIGEST_DIGITS]}")

    def own_lease(self, name: object) -> str:
        """``name``, if it is that of a lease queue of this source.

        Every such name that was read is to be checked: strangers may write to queues and to the
        staging folder, and lease queues are emptied and deleted.

        :raises ProducerError: If it is not.
        """
        digest = str(name)[-_DIGEST_DIGITS:]
        if re.fullmatch(f"[0-9a-f]{{{_DIGEST_DIGITS}}}", digest) and name == self._name(
            "broadway.lease", f".{digest}"
        ):
            return str(name)
        raise ProducerError(
            f"{str(name)[:_MAX_NAME_BYTES]!r} is no lease queue of {self.source!r}, and is left as"
            " it is: its name was written by somebody else"
        )

    @property
    def returns(self) -> str:
        """Where bundles go whose lease has ended."""
        return self._name("broadway.returns", "")

    @property
    def quarantine(self) -> str:
        """Where that goes which lay in the returns queue and is no bundle that can be read."""
        return self._name("broadway.quarantine", "")

    @property
    def dead(self) -> str:
        """Where dead letters go."""
        return self._name("broadway.dead", "")

    def spares(self, lease: float) -> str:
        """Where the names of lease queues lie that are declared and not yet used.

        :param lease: Seconds for which they are made: the queues of another lease are of no use.
        """
        return self._name("broadway.spares", f".{_milliseconds(lease)}")

    def delay(self, step: int) -> str:
        """Where retries wait for a step of the ladder."""
        return self._name(f"broadway.delay.{step}", "")

    def _name(self, prefix: str, suffix: str) -> str:
        name = f"{prefix}.{self.source}{suffix}"
        if len(name.encode()) <= _MAX_NAME_BYTES:
            return name
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:32]
        return f"{prefix}.{digest}{suffix}"

    def returns_arguments(self, *, quorum: bool = True) -> dict[str, Any]:
        """What queues are declared with from which nothing leaves by itself."""
        if not quorum:
            return dict(_CLASSIC)
        # Refusing, so that a bound set by a policy makes runs fail rather than lose what is here.
        return {**_QUORUM, **_NO_LIMIT, "x-overflow": "reject-publish"}

    def delay_arguments(self, step: int, *, quorum: bool = True) -> dict[str, Any]:
        """What a step of the ladder is declared with."""
        return _timed_arguments(step, self.source, quorum=quorum)


def lease_arguments(queues: QueueNames, seconds: float, *, quorum: bool = True) -> dict[str, Any]:
    """What a lease queue is declared with.

    No ``x-expires``: a publisher does not keep a queue from expiring.
    """
    return _timed_arguments(seconds, queues.returns, quorum=quorum)


def _timed_arguments(seconds: float, target: str, *, quorum: bool) -> dict[str, Any]:
    """What a queue is declared with that holds a message for ``seconds`` and passes it on."""
    kind = {**_QUORUM, **_SAFE_DEAD_LETTERING, **_NO_LIMIT} if quorum else _CLASSIC
    return {
        **kind,
        "x-message-ttl": _milliseconds(seconds),
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": target,
    }


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
