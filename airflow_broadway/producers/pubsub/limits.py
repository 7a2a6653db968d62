"""Pub/Sub's own limits, from its documentation ("Pub/Sub quotas and limits")."""

from __future__ import annotations

from typing import Final

#: Ack ids in one request, and bytes of such a request.
MAX_IDS: Final = 2500
MAX_REQUEST: Final = 512 * 1024
#: Seconds of an ack deadline.
SHORTEST_DEADLINE: Final = 10
LONGEST_DEADLINE: Final = 600
#: Messages in one pull.
MAX_PULL: Final = 1000
#: Bytes of one message and of one publish request, and messages in a publish request.
MAX_MESSAGE: Final = 10_000_000
MAX_PUBLISH: Final = 1000
#: Attributes of one message, and bytes of an attribute's key and value.
MAX_ATTRIBUTES: Final = 100
MAX_KEY: Final = 256
MAX_VALUE: Final = 1024
#: The attribute of a requeued dead letter: the id of its original message.
REQUEUED: Final = "broadway_requeued"
#: The maximum retention of a subscription, in days.
KEPT_DAYS: Final = 31
