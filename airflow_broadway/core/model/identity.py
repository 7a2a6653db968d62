"""The identity of a message: messages of one identity are copies of one message.

It is set by the publisher: a property, a header, or a value in the payload.  It is used on the
worker and in the Spark driver alike, so this module needs Python 3.10 and nothing else.
"""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from typing import Any, Final

from airflow_broadway.core.model.rules import Rule

#: The property of AMQP.
MESSAGE_ID: Final = "message_id"
#: The prefix of a header's name.
HEADER: Final = "header:"
#: The prefix of a digest, which no broker's id has.
_MARK: Final = "="
#: A JSON pointer (RFC 6901) that is not to the whole payload.
_POINTER: Final = re.compile(r"(/([^~/]|~[01])*)+", re.DOTALL)

IDENTITY: Final = Rule(
    f"'{HEADER}NAME', a JSON pointer into the payload such as '/order/id', or RabbitMQ's"
    f" {MESSAGE_ID!r}",
    lambda v: (
        isinstance(v, str)
        and (v == MESSAGE_ID or v[: len(HEADER)] == HEADER != v or bool(_POINTER.fullmatch(v)))
    ),
)


def payload_value(payload: Any, pointer: str) -> Any:
    """Returns the value at a JSON pointer; ``None`` if there is none, or the payload is no JSON."""
    try:
        value = json.loads(payload)
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            value = value[int(key) if isinstance(value, list) and key.isdecimal() else key]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return value


def digest(source: str, value: Any) -> str | None:
    """Returns the digest of an identity, of a fixed length.

    :param source: The option ``message_identity``.
    :param value: Text, bytes or an integer; anything else is no identity, nor is empty text.
    """
    if type(value) is int:
        value = str(value)
    if not isinstance(value, (str, bytes)) or not value:
        return None
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return _MARK + blake2b(source.encode() + b"\0" + data, digest_size=16).hexdigest()
