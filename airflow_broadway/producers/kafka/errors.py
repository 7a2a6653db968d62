"""What Kafka and librdkafka say, as one sentence that names the thing, the cause and the way out.

librdkafka's own text is shown only where it can hold no secret: it names brokers, topics and codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.text import cut

_UNREACHABLE = frozenset(
    {"_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "_WAIT_COORD"}
)
_DENIED = {
    "TOPIC_AUTHORIZATION_FAILED": "the topic",
    "GROUP_AUTHORIZATION_FAILED": "the group",
    "CLUSTER_AUTHORIZATION_FAILED": "the cluster",
}
_MISSING = frozenset({"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"})
_MEMBERS = frozenset({"UNKNOWN_MEMBER_ID", "REBALANCE_IN_PROGRESS", "ILLEGAL_GENERATION"})
_DAMAGED = frozenset({"_BAD_MSG", "_BAD_COMPRESSION", "CORRUPT_MESSAGE", "_UNSUPPORTED_FEATURE"})


class Denied(ProducerError):
    """The credentials may not do this."""


class Truncated(ProducerError):
    """The log has lost its tail, or was made anew."""


def translated(error: Any, action: str, where: str, seen: Sequence[Any] = ()) -> ProducerError:
    """The error of ours that stands for one of the client's.

    :param error: A ``KafkaError``, or the exception that carries one.
    :param action: What was tried, as a phrase: ``"the offsets of group 'a' cannot be read"``.
    :param where: The cluster, for people.
    :param seen: What the client said of its connections, the last at the end: it names the cause
        where the error itself says only that nobody answers.
    """
    found = _kafka_error(error)
    if found is None:
        text = cut(f"{type(error).__name__}: {error}", 300)
        return ProducerError(f"{action} {where}: {text}")
    name = found.name()
    cause = next(
        (each for each in reversed(seen) if each.name() in ("_AUTHENTICATION", "_SSL")), None
    )
    if name in ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED") or (
        cause is not None and cause.name() == "_AUTHENTICATION"
    ):
        return ProducerError(
            f"{action} {where}: the cluster does not accept the credentials; check"
            " security.protocol, sasl.mechanism, user and password of the connection"
        )
    if name == "_SSL" or cause is not None:
        return ProducerError(
            f"{action} {where}: TLS fails ({_text(cause or found)}); check security.protocol, the"
            " port, and ssl.ca.location of the connection"
        )
    if name in _UNREACHABLE:
        last = next((each for each in reversed(seen) if each.name() != "_ALL_BROKERS_DOWN"), found)
        return ProducerUnavailable(
            f"{action} {where}: the cluster cannot be reached ({_text(last)}); check"
            " bootstrap.servers, and whether the port speaks TLS or SASL"
        )
    if name in _DENIED:
        return Denied(
            f"{action} {where}: {_DENIED[name]} is not allowed ({name}); allow Read and Describe on"
            " the topics, Read on the group, and Write and Describe on the dead-letter topic"
        )
    if name in _MISSING:
        return ProducerError(
            f"{action} {where}: there is no such topic or partition, or Describe on it is not"
            " allowed; check the topic's name"
        )
    if name in _MEMBERS:
        return ProducerError(
            f"{action} {where}: the group has members, which consume beside this pipeline; give the"
            " pipeline a group_id of its own"
        )
    if name == "_LOG_TRUNCATION":
        return Truncated(
            f"{action} {where}: the log has lost its tail, by an election of an unclean leader:"
            " what was finished there may not be what is there now; kafka-consumer-groups"
            " --reset-offsets starts over"
        )
    if name in _DAMAGED:
        return ProducerError(
            f"{action} {where}: a batch of messages is damaged, or compressed in a way that this"
            f" client cannot read ({_text(found)}); nothing behind it can be received"
        )
    kind = ProducerUnavailable if found.retriable() else ProducerError
    return kind(f"{action} {where}: {_text(found)}")


def _kafka_error(error: Any) -> Any:
    """The client's own error object; ``None`` where there is none."""
    if hasattr(error, "retriable") and hasattr(error, "name"):
        return error
    for each in getattr(error, "args", ()):
        if hasattr(each, "retriable") and hasattr(each, "name"):
            return each
    return None


def _text(error: Any) -> str:
    return cut(f"{error.name()}: {error.str()}".strip(), 300)
