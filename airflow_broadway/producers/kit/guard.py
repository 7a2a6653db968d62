"""Isolates errors of single messages during a settlement.

A message that cannot be settled counts as failed, with its own reason, and all others are settled.
Otherwise one message that the client cannot encode would block its whole generation forever.  Only
an unreachable broker interrupts a settlement.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable
from airflow_broadway.core.text import cut

log = logging.getLogger(__name__)

#: The maximum bytes of a reported reason.
_MAX_REASON = 500


class MessageGuard:
    """Collects the errors of single messages."""

    def __init__(self) -> None:
        #: Message id → reason of its failure.
        self.refused: dict[str, str] = {}

    @contextmanager
    def isolate(self, message_id: str) -> Iterator[None]:
        """Records an exception of the ``with`` block as the failure of this message.

        :raises ProducerUnavailable: Re-raised, as it concerns all messages.
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
        """Records a message as failed."""
        self.refused.setdefault(message_id, cut(reason, _MAX_REASON))

    def errors(self) -> tuple[str, ...]:
        """Returns one error text per reason, with the number of messages and the first id."""
        ids_by_reason: dict[str, list[str]] = {}
        for message_id, reason in self.refused.items():
            ids_by_reason.setdefault(reason, []).append(message_id)
        return tuple(f"{_describe(ids)}: {reason}" for reason, ids in sorted(ids_by_reason.items()))


def _describe(ids: list[str]) -> str:
    if len(ids) == 1:
        return f"message {ids[0]!r} could not be settled"
    return f"{len(ids):,} messages could not be settled, the first of them {ids[0]!r}"
