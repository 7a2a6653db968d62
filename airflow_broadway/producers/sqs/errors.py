"""Translates botocore errors into ProducerErrors with an actionable message and no credentials.

AWS's own text is omitted where it may quote the signed request.
"""

from __future__ import annotations

import re
from typing import Any

from airflow_broadway.core.errors import ConnectionMissing, ProducerError, ProducerUnavailable
from airflow_broadway.producers.engine.port import Denied, Expired, Refused
from airflow_broadway.producers.sqs.limits import IN_FLIGHT

#: Error codes of a queue that does not exist.
MISSING_QUEUE = frozenset(
    {"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "NonExistentQueue"}
)
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
#: A pattern for error codes of credentials that AWS does not accept.
_UNKNOWN = re.compile(
    "Signature|AccessKey|ClientToken|AuthenticationToken|AuthFailure|NotAuthorized|OptInRequired"
    "|UnrecognizedClient"
)
_SKEWED = frozenset({"RequestTimeTooSkewed", "RequestInTheFuture"})
_SKEW_TEXTS = ("signature expired", "not yet current", "signature not yet")
#: A pattern for error codes of throttling, by SQS or KMS.
_THROTTLED = re.compile("Throttl|RequestLimitExceeded|SlowDown|TooManyRequests")
_OVER_LIMIT = frozenset({"OverLimit", "AWS.SimpleQueueService.OverLimit"})
_TRANSIENT = frozenset(
    {"InternalError", "InternalFailure", "InternalServerError", "ServiceUnavailable"}
)


class InFlightLimit(ProducerError):
    """The queue has reached its limit of in-flight messages."""


def throttled(code: str) -> bool:
    """Returns whether an error code means throttling."""
    return _THROTTLED.search(code) is not None


def retryable(code: str, sender_fault: bool) -> bool:
    """Returns whether a failed entry of a batch request may succeed on a retry."""
    return throttled(code) or code in _TRANSIENT or not sender_fault


def translated(error: Exception, action: str, queue: str, where: str) -> Exception:
    """Translates a botocore error into an error of this package.

    :param action: The action, e.g. ``"ReceiveMessage"``.
    :param queue: The queue's name or URL.
    :param where: Region and endpoint, for error messages.
    """
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict) or "Error" not in response:
        return _translate_client_error(error, action, queue, where)
    code = str(response["Error"].get("Code", ""))
    text = str(response["Error"].get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)
    refused = _translate_access_error(code, text, status, action, queue, where)
    if refused is not None:
        return refused
    if code in _OVER_LIMIT:
        return InFlightLimit(
            f"the SQS queue {queue!r} has as many messages in flight as it may have"
            f" ({IN_FLIGHT:,}): nothing more is received until runs settle what they hold"
        )
    if throttled(code):
        return ProducerUnavailable(
            f"AWS throttles {action} on {queue!r}, still after retries: try again later, or with a"
            " lower receive_concurrency"
        )
    if code in _TRANSIENT or status >= 500:
        return ProducerUnavailable(f"SQS could not do {action} on {queue!r} just now ({code})")
    excerpt = text if len(text) <= 300 else f"{text[:297]}..."
    return Refused(f"SQS refuses {action} on {queue!r} {where} ({code}): {excerpt}")


def _translate_access_error(
    code: str, text: str, status: int, action: str, queue: str, where: str
) -> Exception | None:
    """Translates errors of access: missing queues, permissions, credentials and clock skew."""
    if code in MISSING_QUEUE:
        return ProducerError(
            f"there is no SQS queue {queue!r} {where}: check the queue's name, its region and its"
            " account"
        )
    if code in _EXPIRED:
        return Expired(
            f"AWS refuses {action} on {queue!r}: the credentials have expired; renew those of the"
            " connection"
        )
    if code in _SKEWED or any(part in text.lower() for part in _SKEW_TEXTS):
        return ProducerError(
            f"AWS refuses {action} on {queue!r}: this machine's clock differs from AWS's by more"
            " than it allows; set the clock (NTP) and run again"
        )
    if _UNKNOWN.search(code):
        return ProducerError(
            f"AWS refuses {action} on {queue!r}: it does not accept the credentials ({code}); check"
            " access key, secret key and session token of the connection"
        )
    if code in _DENIED or status == 403:
        return Denied(
            f"AWS denies {action} on {queue!r}: allow sqs:{action} on this queue for these"
            " credentials (docs/sqs.md has the least policy)"
        )
    return None


def _translate_client_error(error: Exception, action: str, queue: str, where: str) -> Exception:
    from botocore import exceptions as of

    if isinstance(error, (of.NoCredentialsError, of.PartialCredentialsError)):
        return ConnectionMissing(
            f"{action} on {queue!r} needs AWS credentials, and there are none: give the connection"
            " an access key, a profile or a role, or the machine a role of its own"
        )
    if isinstance(error, of.CredentialRetrievalError):
        return ProducerUnavailable(f"AWS credentials for {queue!r} could not be had just now")
    if isinstance(error, (of.NoRegionError, of.InvalidRegionError)):
        return ConnectionMissing(
            f"no AWS region for {queue!r}: give region_name to the producer or to its connection"
        )
    if isinstance(error, (of.ParamValidationError, TypeError, ValueError)):
        return Refused(f"{action} on {queue!r} cannot be asked for: {str(error)[:300]}")
    # ConnectTimeout, ReadTimeout, EndpointConnectionError, ConnectionClosedError, SSLError, …
    if isinstance(error, (of.HTTPClientError, of.ConnectionError)):
        return ProducerUnavailable(
            f"SQS cannot be reached for {action} on {queue!r} {where}: {type(error).__name__}"
        )
    return ProducerError(f"{action} on {queue!r} {where} failed: {type(error).__name__}: {error}")
