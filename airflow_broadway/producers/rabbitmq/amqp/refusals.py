"""What the broker refuses, by closing a channel, and what it means."""

from __future__ import annotations

import re

from airflow_broadway.core.errors import ProducerError

__all__ = ["Refused", "acknowledged_too_late", "explained", "too_large"]


class Refused(ProducerError):
    """The broker closed a channel instead of doing what it was asked.

    :param code: AMQP's: 403 permissions, 404 missing, 405 locked, 406 other arguments.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"RabbitMQ refused: {text} ({code})")
        self.code = code
        self.text = text


def acknowledged_too_late(error: Refused) -> bool:
    """Whether the broker lost patience with a consumer that left a delivery unacknowledged."""
    return error.code == 406 and "delivery acknowledgement" in error.text


def too_large(error: Refused) -> int | None:
    """The broker's ``max_message_size``, if that is why it refused a message."""
    found = re.search(r"message size \d+ is larger than (?:configured )?max size (\d+)", error.text)
    return int(found[1]) if error.code == 406 and found else None


def explained(error: Refused, what: str) -> ProducerError:
    """The refusal, with what to do about it."""
    advice = {
        403: "grant the user the permissions in docs/rabbitmq.md",
        404: "create it, or let the option `declare` do so",
        405: "another connection holds it exclusively",
        406: "it exists with other arguments; declare it as it is, or delete it once it is empty",
    }.get(error.code)
    if error.code == 403 and "exclusive use" in error.text:
        advice = "another consumer has it for itself: an option `exclusive`, of a run or elsewhere"
    return ProducerError(f"{what}: {error.text}" + (f"; {advice}" if advice else ""))
