"""One guard for each message that is settled, whatever its broker.

What cannot be carried out for one message is counted as failed, with its own reason, and its
neighbours are settled all the same: otherwise one message that no client can encode keeps its whole
generation from being settled, for ever.  Only a broker that cannot be reached ends a settlement.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable
from airflow_broadway.core.text import cut

log = logging.getLogger(__name__)

#: Bytes of a reason that are reported.
_MAX_REASON = 500


class MessageGuard:
    """What could not be done for single messages, and why."""

    def __init__(self) -> None:
        #: Message id → why it failed.
        self.refused: dict[str, str] = {}

    @contextmanager
    def each(self, message_id: str) -> Iterator[None]:
        """Confines what goes wrong inside to this message.

        :raises ProducerUnavailable: The one error that is every message's.
        """
        try:
            yield
        except ProducerUnavailable:
            raise
        except BroadwayError as error:
            self.refuse(message_id, str(error))
        except Exception as error:
            log.debug("Message %s cannot be settled.", message_id, exc_info=True)
            self.refuse(message_id, f"{type(error).__name__}: {error}")

    def refuse(self, message_id: str, reason: str) -> None:
        """Counts a message as failed."""
        self.refused.setdefault(message_id, cut(reason, _MAX_REASON))

    def errors(self) -> tuple[str, ...]:
        """Returns one sentence per kind of refusal, with their number and the first of them."""
        first: dict[str, list[str]] = {}
        for message_id, reason in self.refused.items():
            first.setdefault(reason, []).append(message_id)
        return tuple(f"{_which(ids)}: {reason}" for reason, ids in sorted(first.items()))


def _which(ids: list[str]) -> str:
    if len(ids) == 1:
        return f"message {ids[0]!r} could not be settled"
    return f"{len(ids):,} messages could not be settled, the first of them {ids[0]!r}"
