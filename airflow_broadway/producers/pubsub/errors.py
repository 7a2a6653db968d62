"""Translates Google's errors into ProducerErrors with an actionable message and no credentials.

Google's own text is omitted where it may quote a token or a key.
"""

from __future__ import annotations

from typing import Any, Final

from airflow_broadway.core.errors import ConnectionMissing, ProducerError, ProducerUnavailable
from airflow_broadway.core.text import cut
from airflow_broadway.producers.engine.port import Denied, Expired, Refused

#: The permission that each call needs.
PERMISSIONS: Final = {
    "GetSubscription": "pubsub.subscriptions.get",
    "Pull": "pubsub.subscriptions.consume",
    "Acknowledge": "pubsub.subscriptions.consume",
    "ModifyAckDeadline": "pubsub.subscriptions.consume",
    "GetTopic": "pubsub.topics.get",
    "Publish": "pubsub.topics.publish",
    "ListTimeSeries": "monitoring.timeSeries.list",
}
#: The maximum bytes of Google's text in an error.
_MAX_TEXT: Final = 300
#: Parts of the token server's errors for an assertion with wrong timestamps.
_SKEW_TEXTS: Final = ("iat", "reasonable timeframe", "token used too early", "clock")
#: The prefix of gRPC errors that google-auth raised in gRPC's own thread.
_OF_LOGIN: Final = "Getting metadata from plugin failed"


class Missing(ProducerError):
    """A subscription, topic or project that does not exist."""


def codes_of(error: Exception) -> dict[str, str]:
    """Parses the failures of an exactly-once subscription: ack id → code."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.rpc.error_details_pb2 import ErrorInfo

    if not isinstance(error, GoogleAPICallError):
        return {}
    codes: dict[str, str] = {}
    for detail in error.details or ():
        if isinstance(detail, ErrorInfo):
            codes.update(detail.metadata)
    return {key: code for key, code in codes.items() if code.startswith(("PERM", "TRANSIENT"))}


def shown(error: Exception) -> Exception | None:
    """Returns the error if it is safe for a traceback; ``None`` if it may quote a credential."""
    from google.auth.exceptions import GoogleAuthError

    of_login = isinstance(error, GoogleAuthError) or _OF_LOGIN in str(error)
    return None if of_login else error


def translated(error: Exception, action: str, name: str, where: str) -> Exception:
    """Translates an error of Google's client into an error of this package.

    :param action: The action, e.g. ``"Pull"``.
    :param name: The subscription's or topic's full name.
    :param where: The endpoint, for error messages.
    """
    from google.api_core import exceptions as of
    from google.auth import exceptions as auth

    if isinstance(error, auth.GoogleAuthError):
        return _translate_auth_error(error, action, name)
    if isinstance(error, of.RetryError) and isinstance(error.cause, Exception):
        return translated(error.cause, action, name, where)
    if not isinstance(error, of.GoogleAPICallError):
        return ProducerError(f"{action} on {name!r} failed: {type(error).__name__}: {error}")
    text = str(error.message or "")
    if isinstance(error, of.NotFound):
        return Missing(
            f"there is no {_kind(name)} {name!r} at {where}: check its id and its project, and"
            " that it was not deleted"
        )
    if isinstance(error, of.Forbidden):
        return _translate_denial(error, action, name)
    if isinstance(error, of.Unauthorized):
        return Expired(
            f"Google does not accept the credentials for {action} on {name!r}: they are expired,"
            " revoked or of another kind; renew those of the connection, or look at this machine's"
            " clock (NTP)"
        )
    if isinstance(error, of.ResourceExhausted):
        return ProducerUnavailable(
            f"Google throttles {action} on {name!r}, a quota is used up: {cut(text, _MAX_TEXT)};"
            " try again later, with a lower receive_concurrency or a higher quota"
        )
    if isinstance(error, (of.InvalidArgument, of.OutOfRange)):
        return Refused(f"Pub/Sub refuses {action} on {name!r}: {cut(text, _MAX_TEXT)}")
    if isinstance(error, of.FailedPrecondition):
        return ProducerError(
            f"Pub/Sub refuses {action} on {name!r} as it is now: {cut(text, _MAX_TEXT)}; it must be"
            " a pull subscription that is not detached"
        )
    if text.startswith(_OF_LOGIN):
        return _translate_skew(text, action, name) or ProducerUnavailable(
            f"there is no token for {action} on {name!r} just now: if it lasts, look at the"
            " credentials of the connection, and whether Google's token server can be reached"
        )
    if isinstance(error, (of.ServerError, of.Aborted, of.Cancelled)):
        return ProducerUnavailable(
            f"Pub/Sub cannot be reached for {action} on {name!r} at {where}:"
            f" {cut(text, _MAX_TEXT) or type(error).__name__}"
        )
    return ProducerError(
        f"Pub/Sub refuses {action} on {name!r} ({type(error).__name__}): {cut(text, _MAX_TEXT)}"
    )


def _translate_denial(error: Any, action: str, name: str) -> Exception:
    permission = PERMISSIONS.get(action, action)
    of_monitoring = permission.startswith("monitoring.")
    if error.reason == "SERVICE_DISABLED":
        api, service = ("Monitoring", "monitoring") if of_monitoring else ("Pub/Sub", "pubsub")
        return Denied(
            f"the {api} API is not enabled in the project of {name!r}: enable it"
            f" (gcloud services enable {service}.googleapis.com), or check the project"
        )
    where = "project" if of_monitoring else _kind(name)
    return Denied(
        f"Google denies {action} on {name!r}: allow {permission} on this {where} for these"
        " credentials (docs/pubsub.md has the least roles), and check that the project exists"
    )


def _translate_auth_error(error: Exception, action: str, name: str) -> Exception:
    from google.auth import exceptions as auth

    if isinstance(error, auth.DefaultCredentialsError):
        return ConnectionMissing(
            f"{action} on {name!r} needs Google credentials, and there are none that can be used:"
            " give the connection a key or a key file, or the machine Application Default"
            " Credentials"
        )
    if isinstance(error, auth.RefreshError):
        of_clock = _translate_skew(str(error), action, name)
        if of_clock is not None:
            return of_clock
        if error.retryable:
            return ProducerUnavailable(f"Google gives no token for {action} on {name!r} just now")
        return Expired(
            f"Google gives no token for {action} on {name!r}: the credentials are expired, revoked"
            " or not allowed to impersonate; renew those of the connection"
        )
    if isinstance(error, auth.TransportError):
        return ProducerUnavailable(f"Google's token server cannot be reached for {name!r}")
    return ConnectionMissing(
        f"the credentials for {action} on {name!r} cannot be used: {type(error).__name__}"
    )


def _translate_skew(text: str, action: str, name: str) -> Exception | None:
    """Returns the error for a token rejected for clock skew; ``None`` for other causes.

    :param text: The error of the token server; it may quote secrets, so it is not passed on.
    """
    if not any(part in text.lower() for part in _SKEW_TEXTS):
        return None
    return ProducerError(
        f"Google refuses a token for {action} on {name!r}: this machine's clock differs from"
        " Google's by more than it allows; set the clock (NTP) and run again"
    )


def _kind(name: str) -> str:
    for kind in ("topic", "snapshot"):
        if f"/{kind}s/" in name:
            return kind
    return "subscription"
