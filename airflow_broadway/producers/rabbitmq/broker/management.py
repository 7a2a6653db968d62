"""The management API of a broker, as far as it is needed: reads, each within a short time.

It is a server of its own, on another port, often out of reach or forbidden to the user.  So whoever
asks it must do without an answer too: :class:`Unseen` says that there is none.  No redirect is
followed and no proxy used: the password goes to no host but the one that the connection names.
"""

from __future__ import annotations

import json
import ssl
from typing import Any
from urllib.parse import quote, urlsplit

from airflow_broadway.core.errors import ConnectionMissing, ProducerError
from airflow_broadway.producers.kit.checks import is_loopback, warn_of_plain_http
from airflow_broadway.producers.rabbitmq.amqp.address import Address

#: Seconds that one answer may take.
ANSWER_TIMEOUT = 2.0
#: Bytes of an answer at most: that of a broker with very many policies.
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
#: The delivery limit of a quorum queue of RabbitMQ 4 where nothing sets one.
_DEFAULT_LIMIT = 20
#: What the API shows of each policy, at least.
_POLICY = {"name", "pattern", "apply-to", "priority", "definition"}
#: The ports of the management plugin without and with TLS.
_PORT, _TLS_PORT = 15672, 15671


class Unseen(Exception):
    """The management API does not answer; the text says why, in a phrase."""


class Management:
    """What the management API knows of one virtual host.

    Without an address of its own it is asked at its usual port of the broker's host, but the
    password goes there only by TLS or on this machine: anybody may listen on that port.

    :raises Unseen: If the connection says that there is none, or names no address of one.
    """

    def __init__(self, address: Address) -> None:
        given, secure = address.management_url, address.tls is not None
        host = f"[{address.host}]" if ":" in address.host else address.host
        usual = f"https://{host}:{_TLS_PORT}" if secure else f"http://{host}:{_PORT}"
        if given == "":
            raise Unseen("the connection's extra 'management_url' is false")
        if given is None and not secure and not is_loopback(address.host):
            raise Unseen(
                "without TLS the password is sent to no port but the broker's; set the connection's"
                f" extra 'management_url' to {usual!r}, or false"
            )
        url = given or usual
        try:
            parts = urlsplit(url)
            named = bool(parts.hostname) and parts.port != 0
        except ValueError:
            parts, named = urlsplit(""), False
        if parts.scheme not in ("http", "https") or not named or parts.username:
            raise Unseen(
                "the connection's extra 'management_url' must be http(s)://host:port, without a"
                " password"
            )
        if not address.login:
            raise Unseen(
                "the connection names no user and password, which the management API needs beside"
                " the certificate"
            )
        self.shown = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        warn_of_plain_http(self.shown, "The user and password of RabbitMQ")
        self._address = address
        self._virtual_host = quote(address.virtual_host, safe="")

    def queue(self, name: str) -> dict[str, Any] | None:
        """What is known of a queue; ``None`` if there is none of that name.

        Right after a queue was declared, nothing is known yet but how.

        :raises Unseen: If it does not answer.
        """
        found = self._get(f"queues/{self._virtual_host}/{quote(name, safe='')}")
        return dict(found) if isinstance(found, dict) else None

    def policies(self) -> dict[str, list[dict[str, Any]]]:
        """The policies of the virtual host: what they are called, for people → those.

        :raises Unseen: If it does not answer.
        """
        policies = {}
        for kind, path in (("policy", "policies"), ("operator policy", "operator-policies")):
            found = self._get(f"{path}/{self._virtual_host}")
            if not isinstance(found, list) or not all(policy.keys() >= _POLICY for policy in found):
                raise Unseen(f"the management API at {self.shown} knows no {path}")
            policies[kind] = found
        return policies

    def feature_flags(self) -> dict[str, str]:
        """The state of each feature flag; administrators only.

        :raises Unseen: If it does not answer.
        """
        found = self._get("feature-flags")
        flags = found if isinstance(found, list) else []
        return {str(flag.get("name")): str(flag.get("state")) for flag in flags}

    def _get(self, path: str) -> Any:
        """The answer to one request; ``None`` for what is not there.

        :raises Unseen: If there is none that can be used.
        """
        import httpx

        try:
            context: ssl.SSLContext | bool = False  # of no effect without TLS
            if self.shown.startswith("https:"):
                context = self._address.ssl_context() or ssl.create_default_context()
            # No proxy and no netrc of the environment: the password is for one host alone.
            with (
                httpx.Client(verify=context, timeout=ANSWER_TIMEOUT, trust_env=False) as client,
                client.stream(
                    "GET",
                    f"{self.shown}/api/{path}",
                    auth=(self._address.login, self._address.password),
                    headers={"Accept": "application/json"},
                ) as answer,
            ):
                if answer.status_code == 404:
                    return None
                if answer.status_code in (401, 403):
                    raise Unseen(
                        f"the management API at {self.shown} refuses user {self._address.login!r},"
                        " who needs the tag 'management'"
                    )
                if answer.status_code != 200:
                    raise Unseen(
                        f"the management API at {self.shown} answers with status"
                        f" {answer.status_code}"
                    )
                body = b""
                for part in answer.iter_bytes():
                    body += part
                    if len(body) > _MAX_ANSWER_BYTES:
                        raise Unseen(f"the answer of {self.shown} is too long")
            return json.loads(body)
        except ConnectionMissing as error:
            raise Unseen(str(error)) from None
        except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise Unseen(f"the management API at {self.shown} cannot be reached: {why}") from None
        except ValueError:
            raise Unseen(f"what answers at {self.shown} is no management API") from None


def delivery_limit(address: Address, queue: str, version: str) -> int | None:
    """Returns how often a queue may get a message back; ``None``: there is no limit.

    A quorum queue drops or dead-letters a message that was returned to it more often.  The limit is
    an argument of the queue or of a policy, and since RabbitMQ 4 there is a default.
    See https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling.

    :param version: The broker's version, as the broker reports it.
    :raises ProducerError: If the management API does not show it.
    """
    try:
        known = Management(address).queue(queue)
        if known is None:
            raise Unseen("the management API knows no such queue")
        if "effective_policy_definition" not in known and known.get("policy"):
            raise Unseen("the management API does not show the definition of its policy yet")
    except Unseen as error:
        raise ProducerError(
            f"the dead letters in the queue {queue!r} cannot be listed: each look counts as a"
            f" delivery, and whether the queue has a delivery limit is not known ({error}); set the"
            " connection's extra 'management_url', or send back or delete all of them (--all)"
        ) from None
    if known.get("type", "classic") != "quorum":
        return None
    declared = (known.get("arguments") or {}).get("x-delivery-limit")
    policy = (known.get("effective_policy_definition") or {}).get("delivery-limit")
    limits = [limit for limit in (declared, policy) if isinstance(limit, int)]
    if version.partition(".")[0] in ("", "3"):
        # -1 is a limit here: the first return is one too many.
        return min(limits, default=None)
    finite = [limit for limit in limits if limit >= 0]
    return min(finite) if finite else None if limits else _DEFAULT_LIMIT
