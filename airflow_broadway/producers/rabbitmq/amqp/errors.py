"""The errors of RabbitMQ, of pika and of the socket, as ours; and what a refusal means."""

from __future__ import annotations

import re
import socket
import ssl

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.address import Address

#: AMQP's codes of a connection that another may replace: closed in order, closed by force (an
#: operator, or the broker stops), an internal error of the broker.
_MAY_COME_BACK = (200, 320, 541)
#: AMQP's codes of two refusals that may be an answer: not there, exclusive to another connection.
MISSING, LOCKED = 404, 405


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
    if error.code == 406 and "message size" in error.text:
        advice = "set the option max_message_bytes below that: a bundle holds no more"
    return ProducerError(f"{what}: {error.text}" + (f"; {advice}" if advice else ""))


class Blocked(ProducerUnavailable):
    """The broker took nothing from the connection for too long, being short of memory or disk."""


def translate(error: BaseException, address: Address, *, opened: bool = False) -> ProducerError:
    """Our error for one of pika's, or of the socket's.

    :param opened: Whether the connection had been opened before.
    """
    if isinstance(error, ProducerError):
        return error
    causes = _causes(error)
    for cause in causes:
        refusal = _refusal(cause, address)
        if refusal is not None:
            return refusal
    where = f"RabbitMQ at {address.shown}"
    for cause in causes:
        code = getattr(cause, "reply_code", 0)
        if code:
            kind = ProducerUnavailable if code in _MAY_COME_BACK else ProducerError
            return kind(
                f"{where} closed the connection: {getattr(cause, 'reply_text', '')} ({code})"
            )
    return _loss(next((c for c in causes if isinstance(c, OSError)), causes[-1]), where, opened)


def _refusal(cause: BaseException, address: Address) -> ProducerError | None:
    """What it means if it says why the broker does not serve this user, or takes nothing."""
    from pika import exceptions

    where, code = f"RabbitMQ at {address.shown}", getattr(cause, "reply_code", 0)
    logins = (exceptions.ProbableAuthenticationError, exceptions.AuthenticationError)
    if isinstance(cause, logins) or code == 403:
        if address.external:
            return ProducerError(
                f"{where} refused the login by certificate: it knows no user of that name, or"
                " lacks the plugin rabbitmq_auth_mechanism_ssl"
            )
        return ProducerError(
            f"{where} refused the login of user {address.login!r}: wrong name or password, or"
            " a user that may come from the broker's own host only"
        )
    if isinstance(cause, exceptions.ProbableAccessDeniedError) or code == 530:
        return ProducerError(
            f"{where} refused user {address.login!r} the virtual host"
            f" {address.virtual_host!r}: it does not exist, or the user has no permission there"
        )
    if isinstance(cause, ssl.SSLError):
        return ProducerError(f"{where}: TLS failed: {cause}")
    if isinstance(cause, exceptions.ConnectionBlockedTimeout):
        return Blocked(
            f"{where} is short of memory or disk, and has taken nothing from this connection"
            f" for {address.blocked_connection_timeout:.0f} s: make room there and clear the task"
        )
    return None


def _loss(cause: BaseException, where: str, opened: bool) -> ProducerError:
    """What it means if the broker said nothing."""
    text = str(cause) or type(cause).__name__
    if isinstance(cause, socket.gaierror):
        text = f"the host's name is not known ({text})"
    if not opened and (alert := re.search(r"\[SSL: \w*ALERT\w*\][^'\"]*", text)):
        # The server's objection, to our certificate mostly, comes when we take TLS for settled.
        return ProducerError(f"{where}: TLS failed: {alert[0].strip()}")
    if opened:
        return ProducerUnavailable(f"the connection to {where} is lost: {text}")
    return ProducerUnavailable(f"{where} cannot be reached: {text}")


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it wraps, the outermost first."""
    found: list[BaseException] = []
    todo = [error]
    while todo and len(found) < 50:
        each = todo.pop(0)
        if each in found:
            continue
        found.append(each)
        todo += [item for item in each.args if isinstance(item, BaseException)]
        for name in ("exceptions", "exception", "__cause__"):
            value = getattr(each, name, None)
            if isinstance(value, BaseException):
                todo.append(value)
            elif isinstance(value, (list, tuple)):
                todo += [item for item in value if isinstance(item, BaseException)]
    return found
