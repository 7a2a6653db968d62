"""SQS's own limits, from its developer guide ("Amazon SQS quotas")."""

from __future__ import annotations

from typing import Final

#: Entries in one batch request, and messages in one receive.
MAX_BATCH: Final = 10
#: The maximum total visibility timeout from receipt, in seconds.
LONGEST_VISIBILITY: Final = 43_200
#: The limit of in-flight messages of one queue, standard or FIFO.
IN_FLIGHT: Final = 120_000
#: Bytes of one message, including attributes, and of one batch; and the limit before August 2025.
MAX_BODY: Final = 1_048_576
MAX_BODY_FORMERLY: Final = 262_144
#: Attributes of one message.
MAX_ATTRIBUTES: Final = 10
#: The attribute of a requeued dead letter: the id of its original message.
REQUEUED: Final = "broadway_requeued"


def unsendable(text: str) -> str:
    """Returns the first character that SQS rejects, as ``U+….``; ``""`` if there is none.

    SQS allows #x9, #xA, #xD, #x20 to #xD7FF, #xE000 to #xFFFD, #x10000 to #x10FFFF.
    """
    for character in text:
        code = ord(character)
        if (code < 0x20 and character not in "\t\n\r") or 0xD800 <= code < 0xE000:
            return f"U+{code:04X}"
        if code in (0xFFFE, 0xFFFF):
            return f"U+{code:04X}"
    return ""
