"""Translates errors of Kafka and librdkafka into ProducerErrors with an actionable message.

librdkafka's own text appears only where it can contain no secret: it names brokers, topics and
codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.text import cut


class Denied(ProducerError):
    """The credentials lack the permission for a request."""


class Truncated(ProducerError):
    """The log was truncated, or the topic was deleted and created again."""


#: Errors of a connection that the client re-establishes itself.
_CONNECTION: Final = "_TRANSPORT _ALL_BROKERS_DOWN _RESOLVE"
_RIGHTS: Final = (
    "is not allowed ({name}); allow Read and Describe on the topics, Read on the group, and Write"
    " and Describe on the dead-letter topic"
)
_CREDENTIALS: Final = (
    "the cluster does not accept the credentials; check security.protocol, sasl.mechanism, user and"
    " password of the connection"
)
_UNREACHABLE: Final = (
    "the cluster cannot be reached ({text}); check bootstrap.servers, and whether the port speaks"
    " TLS or SASL"
)
_MISSING: Final = (
    "there is no such topic or partition, or Describe on it is not allowed; check the topic's name"
)
_MEMBERS: Final = (
    "the group has members, which consume next to this pipeline; give the pipeline a group_id of"
    " its own"
)
_DAMAGED: Final = (
    "a batch of messages is damaged, or compressed in a way that this client cannot read ({text});"
    " nothing behind it can be received"
)
_TRUNCATED: Final = (
    "the log has lost its tail, by an election of an unclean leader: what was finished there may"
    " not be what is there now; kafka-consumer-groups --reset-offsets starts over"
)
_TLS: Final = (
    "TLS fails ({text}); check security.protocol, the port, and ssl.ca.location of the connection"
)
#: The exception class and its text, by the name of the client's error.
_ERRORS: Final[dict[str, tuple[type[ProducerError], str]]] = {
    name: (kind, text)
    for kind, text, names in (
        (ProducerError, _CREDENTIALS, "_AUTHENTICATION SASL_AUTHENTICATION_FAILED"),
        (ProducerError, _TLS, "_SSL"),
        (ProducerUnavailable, _UNREACHABLE, f"{_CONNECTION} _TIMED_OUT _WAIT_COORD"),
        (Denied, f"the topic {_RIGHTS}", "TOPIC_AUTHORIZATION_FAILED"),
        (Denied, f"the group {_RIGHTS}", "GROUP_AUTHORIZATION_FAILED"),
        (Denied, f"the cluster {_RIGHTS}", "CLUSTER_AUTHORIZATION_FAILED"),
        (ProducerError, _MISSING, "UNKNOWN_TOPIC_OR_PART _UNKNOWN_TOPIC _UNKNOWN_PARTITION"),
        (ProducerError, _MEMBERS, "UNKNOWN_MEMBER_ID REBALANCE_IN_PROGRESS ILLEGAL_GENERATION"),
        (Truncated, _TRUNCATED, "_LOG_TRUNCATION"),
        (
            ProducerError,
            _DAMAGED,
            "_BAD_MSG _BAD_COMPRESSION CORRUPT_MESSAGE _UNSUPPORTED_FEATURE",
        ),
    )
    for name in names.split()
}


def translated(error: Any, action: str, where: str, seen: Sequence[Any] = ()) -> ProducerError:
    """Translates a client error into a ProducerError.

    :param error: A ``KafkaError``, or the exception that carries one.
    :param action: The failed action, as a phrase: ``"the offsets of group 'a' cannot be read"``.
    :param where: The cluster, for error messages.
    :param seen: The client's ``error_cb`` reports, oldest first: they include the cause where the
        error itself is only that no broker answers.
    """
    cause = _kafka_error(error)
    if cause is None:
        text = cut(f"{type(error).__name__}: {error}", 300)
        return ProducerError(f"{action} {where}: {text}")
    newest = [report for report in reversed(seen) if report.name() != "_ALL_BROKERS_DOWN"]
    causes = (report for report in newest if report.name() in ("_AUTHENTICATION", "_SSL"))
    cause = next(causes, cause)
    other = ProducerUnavailable if cause.retriable() else ProducerError
    kind, text = _ERRORS.get(cause.name(), (other, "{text}"))
    reported = newest[0] if text is _UNREACHABLE and newest else cause
    text = text.format(name=cause.name(), text=_text(reported))
    return kind(f"{action} {where}: {text}")


def is_out_of_range(error: Any) -> bool:
    """Returns whether an offset is out of the log's range."""
    return error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE")


def is_passing(error: Any) -> bool:
    """Returns whether the client recovers from an error itself, such as that of a connection."""
    return bool(error.retriable() or error.name() in _CONNECTION.split())


def _kafka_error(error: Any) -> Any:
    """Returns the ``KafkaError`` of an exception; ``None`` if it carries none."""
    candidates = (error, *getattr(error, "args", ()))
    return next((c for c in candidates if hasattr(c, "retriable") and hasattr(c, "name")), None)


def _text(error: Any) -> str:
    return cut(f"{error.name()}: {error.str()}".strip(), 300)
