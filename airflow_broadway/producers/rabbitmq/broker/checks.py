"""Checks a producer's queues, mainly for policies that lose messages; reports their depth.

The arguments of our own queues are checked by declaring them: the broker refuses other arguments.
Policies match queues by name, and may make any queue lose messages.  Only the management API lists
them.  If it is unavailable, this is a warning, and no run fails.

Of the policies whose pattern matches the queue, only the one with the highest priority applies; the
same holds for operator policies.  If a policy and an argument of the queue set the same limit, the
lower one applies; for other settings, the argument: https://www.rabbitmq.com/docs/parameters.

The management API computes the same for existing queues, as ``effective_policy_definition``.  But
this value is part of its statistics: a new policy is missing there for up to 10 seconds.

The management API is a separate server on another port, often unreachable or forbidden to the user.
So a check handles its absence, by :class:`ApiError`.  Redirects are not followed and proxies not
used: the password is sent only to the host in the connection.
"""

from __future__ import annotations

import json
import logging
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from math import comb
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

from airflow_broadway.core.custody.findings import Finding, Level, enforce
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import ConnectionMissing, ProducerError
from airflow_broadway.producers.kit.checks import is_loopback, warn_of_plain_http
from airflow_broadway.producers.rabbitmq.amqp.address import Address, address_for
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker.holding_queues import (
    KEEPING,
    LADDER,
    HoldingQueues,
    QueueNames,
)
from airflow_broadway.producers.rabbitmq.bundle import BundleError
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

log = logging.getLogger(__name__)

#: Timeout of a request to the management API, in seconds.
ANSWER_TIMEOUT = 2.0
#: Maximum bytes of a response: enough for very many policies.
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
#: The default delivery limit of quorum queues in RabbitMQ 4.
_DEFAULT_LIMIT = 20
#: The required keys of a policy in the API's response.
_POLICY = {"name", "pattern", "apply-to", "priority", "definition"}
#: The ports of the management plugin without and with TLS.
_PORT, _TLS_PORT = 15672, 15671


class ApiError(Exception):
    """The management API is unavailable; the text is the reason, as a phrase."""


class Management:
    """A client of the management API, for one virtual host.

    By default it connects to the API's default port on the broker's host.  There the password is
    sent only by TLS or to this machine: another program may listen on that port.

    :raises ApiError: If the connection disables the API or has no usable address of it.
    """

    def __init__(self, address: Address) -> None:
        configured, secure = address.management_url, address.tls is not None
        host = f"[{address.host}]" if ":" in address.host else address.host
        default_url = f"https://{host}:{_TLS_PORT}" if secure else f"http://{host}:{_PORT}"
        if configured == "":
            raise ApiError("the connection's extra 'management_url' is false")
        if configured is None and not secure and not is_loopback(address.host):
            raise ApiError(
                "without TLS the password is sent to no port but the broker's; set the connection's"
                f" extra 'management_url' to {default_url!r}, or false"
            )
        url = configured or default_url
        try:
            parts = urlsplit(url)
            is_valid = bool(parts.hostname) and parts.port != 0
        except ValueError:
            parts, is_valid = urlsplit(""), False
        if parts.scheme not in ("http", "https") or not is_valid or parts.username:
            raise ApiError(
                "the connection's extra 'management_url' must be http(s)://host:port, without a"
                " password"
            )
        if not address.login:
            raise ApiError(
                "the connection has no user and password, which the management API needs in"
                " addition to the certificate"
            )
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        warn_of_plain_http(self.url, "The user and password of RabbitMQ")
        self._address = address
        self._virtual_host = quote(address.virtual_host, safe="")

    def queue(self, name: str) -> dict[str, Any] | None:
        """Returns the API's description of a queue; ``None`` if the queue does not exist.

        For a queue that was declared just now, it has the declaration only.

        :raises ApiError: If the API is unavailable.
        """
        response = self._get(f"queues/{self._virtual_host}/{quote(name, safe='')}")
        return dict(response) if isinstance(response, dict) else None

    def policies(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the policies of the virtual host: kind, for display → policies.

        :raises ApiError: If the API is unavailable.
        """
        policies = {}
        for kind, path in (("policy", "policies"), ("operator policy", "operator-policies")):
            rows = self._get(f"{path}/{self._virtual_host}")
            if not isinstance(rows, list) or not all(policy.keys() >= _POLICY for policy in rows):
                raise ApiError(f"the management API at {self.url} has no {path}")
            policies[kind] = rows
        return policies

    def feature_flags(self) -> dict[str, str]:
        """Returns the state of each feature flag; for administrators only.

        :raises ApiError: If the API is unavailable.
        """
        response = self._get("feature-flags")
        flags = response if isinstance(response, list) else []
        return {str(flag.get("name")): str(flag.get("state")) for flag in flags}

    def _get(self, path: str) -> Any:
        """Sends a GET request and returns the JSON response; ``None`` for status 404.

        :raises ApiError: If there is no valid response.
        """
        import httpx

        try:
            context: ssl.SSLContext | bool = False  # of no effect without TLS
            if self.url.startswith("https:"):
                context = self._address.ssl_context() or ssl.create_default_context()
            # Without proxy and netrc of the environment: the password is for one host only.
            with (
                httpx.Client(verify=context, timeout=ANSWER_TIMEOUT, trust_env=False) as client,
                client.stream(
                    "GET",
                    f"{self.url}/api/{path}",
                    auth=(self._address.login, self._address.password),
                    headers={"Accept": "application/json"},
                ) as response,
            ):
                if response.status_code == 404:
                    return None
                if response.status_code in (401, 403):
                    raise ApiError(
                        f"the management API at {self.url} refuses user {self._address.login!r},"
                        " who needs the tag 'management'"
                    )
                if response.status_code != 200:
                    raise ApiError(
                        f"the management API at {self.url} answers with status"
                        f" {response.status_code}"
                    )
                body = b""
                for part in response.iter_bytes():
                    body += part
                    if len(body) > _MAX_ANSWER_BYTES:
                        raise ApiError(f"the answer of {self.url} is too long")
            return json.loads(body)
        except ConnectionMissing as error:
            raise ApiError(str(error)) from None
        except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
            text = str(error) or type(error).__name__
            raise ApiError(f"the management API at {self.url} cannot be reached: {text}") from None
        except ValueError:
            raise ApiError(f"the server at {self.url} is not a management API") from None


def delivery_limit(address: Address, queue: str, version: str) -> int | None:
    """Returns the delivery limit of a queue; ``None`` without a limit.

    A quorum queue drops or dead-letters a message that is returned more often.  The limit is set by
    an argument of the queue or by a policy; RabbitMQ 4 has a default.
    See https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling.

    :param version: The version that the broker reports.
    :raises ProducerError: If the management API does not show the limit.
    """
    try:
        known = Management(address).queue(queue)
        if known is None:
            raise ApiError("the management API knows no such queue")
        if "effective_policy_definition" not in known and known.get("policy"):
            raise ApiError("the management API does not show the definition of its policy yet")
    except ApiError as error:
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
        # -1 is a limit in RabbitMQ 3: a message is dropped at its first return.
        return min(limits, default=None)
    finite = [limit for limit in limits if limit >= 0]
    return min(finite) if finite else None if limits else _DEFAULT_LIMIT


def check(options: RabbitMQOptions, env: ProducerEnv) -> list[Finding]:
    """Checks the broker's version, the source queue, and the policies of every queue of a run."""
    address = address_for(options, env)
    with closing(ConnectionThread.to(address)) as connection:
        findings = check_version(connection)
        exists = connection.depth(options.queue) is not None
        if exists or options.declare is not None:
            return findings + check_queues(connection, options, exists=exists)
    text = (
        f"RabbitMQ at {address.netloc} has no queue {options.queue!r} in the virtual host"
        f" {address.virtual_host!r}: create it, or correct the name"
    )
    return [*findings, Finding("error", text)]


def depth(all_options: Iterable[RabbitMQOptions], env: ProducerEnv) -> QueueDepth:
    """Returns the total depth of all queues.

    A bundle that the next run will take over counts as one ready message, though it has up to 500.
    """
    ready = delayed = dead = 0
    for options in all_options:
        names = QueueNames(options.queue)
        place: Any = options.dead_letter
        with closing(ConnectionThread.to(address_for(options, env))) as connection:
            ready += connection.depth(names.source) or 0
            ready += _count_lapsed(connection, options, env)
            delayed += sum(connection.depth(names.delay(step)) or 0 for step in LADDER)
            dead += connection.depth(place if isinstance(place, str) else names.dead) or 0
    return QueueDepth(ready=ready, delayed=delayed, leased=0, dead=dead, oldest_age=None)


def _count_lapsed(connection: ConnectionThread, options: RabbitMQOptions, env: ProducerEnv) -> int:
    """Counts the bundles that the next run will take over."""
    holding = HoldingQueues(QueueNames(options.queue))
    journal = QueueJournal(env.staging, options.queue, env.shared)
    total, now = 0, env.clock.now().timestamp()
    for name, ready in holding.present(connection):
        if not ready:
            continue
        with holding.claim(connection, name) as queue:
            try:
                owner = None if queue is None else queue.owner()
            except BundleError:
                continue
            if owner is not None and (owner.until <= now or journal.is_over(owner.generation)):
                total += ready - (owner.count == 0)
    return total


#: The first release with at-least-once dead-lettering, and the first that needs no feature flag for
#: it.
_NEEDED, _WITHOUT_FLAGS = (3, 10), (3, 12)
#: The first release whose quorum queues have a default delivery limit, of 20.
_LIMITED = (4, 0)
_FLAGS = ("quorum_queue", "stream_queue")
#: Seconds for which a settlement caches its check of the policies.
CHECK_INTERVAL = 30.0


class Role(NamedTuple):
    """A queue and its role.

    :param name: ``source``, ``held``, ``delay``, ``dead``; ``sink`` for the user's own queue of
        dead letters.
    :param arguments: The arguments of its declaration; ``None`` if the user declares it.
    """

    name: str
    queue: str
    arguments: Mapping[str, Any] | None = None


def roles_of(options: RabbitMQOptions, held: Iterable[str] = ()) -> list[Role]:
    """Returns every queue that a run may use.

    :param held: The existing holding queues; by default the first possible one.
    """
    queues = QueueNames(options.queue)
    roles = [Role("source", queues.source)]
    roles += [Role("held", name, KEEPING) for name in held or [queues.held(0)]]
    roles += [Role("delay", queues.delay(step), queues.delay_arguments(step)) for step in LADDER]
    place = options.dead_letter
    if place is None:
        roles.append(Role("dead", queues.dead, KEEPING))
    elif isinstance(place, str):
        roles.append(Role("sink", place))
    elif not place.get("exchange"):
        roles.append(Role("sink", str(place.get("routing_key", ""))))
    return roles


# -- policies --------------------------------------------------------------------------------------

#: The settings of which the lower value applies: milliseconds, returns, messages, bytes.
LIMITS = ("expires", "message-ttl", "delivery-limit", "max-length", "max-length-bytes")
#: Type of a queue → ``apply-to`` of a policy for this type only.
_APPLY_TO = {"classic": "classic_queues", "quorum": "quorum_queues", "stream": "streams"}


class Setting(NamedTuple):
    """An effective setting of a queue.

    :param by: Its origin, for display.
    """

    value: Any
    by: str


def effective(
    policies: Mapping[str, Iterable[Mapping[str, Any]]],
    queue: str,
    kind: str,
    arguments: Mapping[str, Any],
) -> dict[str, Setting]:
    """Returns the effective settings of a queue: name without ``x-`` → value and origin.

    :param policies: The policies of the virtual host, as :meth:`Management.policies` returns them.
    :param kind: ``classic``, ``quorum`` or ``stream``.
    :param arguments: The arguments of the queue's declaration.
    """
    settings = {
        name.removeprefix("x-"): Setting(value, "its declaration")
        for name, value in arguments.items()
    }
    for policy_kind, policies_of_kind in policies.items():
        fitting = [
            policy
            for policy in policies_of_kind
            if policy["apply-to"] in ("all", "queues", _APPLY_TO.get(kind))
            and _matches(policy["pattern"], queue)
        ]
        if fitting:
            policy = max(fitting, key=lambda policy: int(policy["priority"]))
            for name, value in policy["definition"].items():
                before = settings.get(name)
                if before is None or (name in LIMITS and _is_less(value, before.value)):
                    settings[name] = Setting(value, f"the {policy_kind} {policy['name']!r}")
    return settings


def _is_less(value: Any, other: Any) -> bool:
    numbers = isinstance(value, (int, float)) and isinstance(other, (int, float))
    return bool(numbers and value < other)


#: The maximum number of steps to match a pattern: about a tenth of a second.
_MAX_STEPS = 2_000_000


def _matches(pattern: str, name: str) -> bool:
    """Whether a policy's pattern matches a name, decided in bounded time.

    Patterns with repeated groups can take exponential time, and each repetition multiplies the
    steps.  A pattern that may take too long, or is invalid in Python but not in Erlang, counts as
    matching: a false warning is better than a missed one.
    """
    bare = re.sub(r"\\\D|\(\?", "", pattern)
    repetitions = 1 + len(re.findall(r"[*+?{]", bare))
    if re.search(r"\)[*+{]|\\\d", bare) or comb(len(name) + repetitions, repetitions) > _MAX_STEPS:
        return True
    try:
        return re.search(pattern, name) is not None
    except (re.error, OverflowError, RecursionError):
        return True


# -- the rules -------------------------------------------------------------------------------------

_OWN_QUEUE: Final = {
    "expires": "the queue is deleted with its messages when it is unused for so long",
    "message-ttl": "messages that wait longer in it are lost",
    "delivery-limit": "messages that are returned more often are lost",
    "drops": "the oldest message is lost when it is full",
    "refuses": "it refuses messages when it is full, so that runs fail",
}
#: Role → setting → consequence.  ``drops`` and ``refuses`` stand for a maximum length, depending on
#: the queue's overflow behaviour.
_MEANINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "source": {
        "expires": _OWN_QUEUE["expires"],
        "message-ttl": "a message that waits longer for a run {loss}, a retry too",
        "delivery-limit": "a message returned more often {loss}, also by runs that died",
        "drops": "the oldest message {loss} when the queue is full, a retry too",
        "refuses": "a message released into the full queue stays in its holding queue",
    },
    "held": _OWN_QUEUE,
    "delay": {
        **_OWN_QUEUE,
        "message-ttl": "retries come earlier than they should",
        "delivery-limit": "retries that are returned more often come early",
    },
    "dead": _OWN_QUEUE,
    "sink": _OWN_QUEUE,
}
#: Role → settings that are errors, because our own queue would lose messages.  All others are
#: warnings.
_ERRORS: Final[Mapping[str, Iterable[str]]] = {
    "held": ("expires", "message-ttl", "delivery-limit", "drops"),
    "delay": ("expires",),
    "dead": ("expires", "message-ttl", "delivery-limit", "drops"),
}


def judge(role: Role, kind: str, settings: Mapping[str, Setting]) -> list[Finding]:
    """Returns findings on the settings of one queue.

    :param kind: ``classic``, ``quorum`` or ``stream``.
    :param settings: The result of :func:`effective`.
    """
    if role.name == "source" and kind == "stream":
        text = "reading a stream removes nothing from it, so there is nothing to settle"
        return [_finding("error", role, text)]
    dead_letters = "dead-letter-exchange" in settings
    loss = "goes to its dead-letter exchange" if dead_letters else "is dropped"
    refuses = str(settings.get("overflow", Setting("", "")).value).startswith("reject-publish")
    findings = []
    for name in LIMITS:
        setting = settings.get(name)
        if setting is None or setting.value == (role.arguments or {}).get(f"x-{name}"):
            continue
        rule = ("refuses" if refuses else "drops") if name.startswith("max-length") else name
        level: Level = "error" if rule in _ERRORS.get(role.name, ()) else "warning"
        value = f"{setting.value} ms" if name in ("expires", "message-ttl") else setting.value
        meaning = _MEANINGS[role.name][rule].format(loss=loss)
        findings.append(_finding(level, role, f"{setting.by} sets {name} {value}: {meaning}"))
    return findings


def _finding(level: Level, role: Role, text: str) -> Finding:
    return Finding(level, f"the queue {role.queue!r}: {text}")


# -- checks ----------------------------------------------------------------------------------------


def refuse_losses(connection: ConnectionThread, options: RabbitMQOptions) -> None:
    """Refuses a broker whose visible policies make a run's queues lose messages.

    :raises ProducerError: If messages would be lost.
    """
    enforce(check_version(connection), log)
    if connection.address.management_url == "":
        log.info("Policies are not checked: the connection's extra 'management_url' is false.")
        return
    try:
        enforce(check_queues(connection, options), log)
    except ProducerError as error:
        raise ProducerError(
            f"RabbitMQ would lose messages of this run: {error}; let no such policy match"
            " ^broadway\\., and clear the task; `airflow-broadway check` lists all"
        ) from None


def losses(address: Address, options: RabbitMQOptions) -> dict[str, str]:
    """Returns the queues of ours that would lose messages by a policy: queue → reason.

    Callers cache the result for :data:`CHECK_INTERVAL` only.  A new policy puts the messages that
    are already in the queue at risk anyway.
    """
    roles = [role for role in roles_of(options) if role.arguments is not None]
    try:
        policies = Management(address).policies()
    except ApiError as error:  # the run's source has logged a warning
        log.debug("Policies could not be checked: %s", error)
        return {}
    return {
        role.queue: f"RabbitMQ would lose messages of {finding.text}"
        for role in roles
        for finding in judge(
            role, "quorum", effective(policies, role.queue, "quorum", role.arguments or {})
        )
        if finding.level == "error"
    }


def check_version(connection: ConnectionThread) -> list[Finding]:
    """Checks that the broker's quorum queues support at-least-once dead-lettering."""
    version = connection.version
    if not () < _numbers(version) < _NEEDED:
        return []
    text = (
        f"RabbitMQ at {connection.address.netloc} is {version}: its quorum queues lose retries that"
        " wait, which 3.10 and later do not; upgrade it"
    )
    return [Finding("error", text)]


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version; empty if the broker does not report it."""
    try:
        return tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return ()


def check_queues(
    connection: ConnectionThread, options: RabbitMQOptions, *, exists: bool = True
) -> list[Finding]:
    """Checks every queue of a run with the management API.

    :param exists: Whether the source queue exists; otherwise the run will declare it.
    """
    held = [name for name, _ in HoldingQueues(QueueNames(options.queue)).present(connection)]
    version = _numbers(connection.version)
    try:
        management = Management(connection.address)
        declare = None if exists else options.declare
        findings = list(_check_roles(roles_of(options, held), management, version, declare))
        if not version >= _WITHOUT_FLAGS:
            findings += _check_flags(management)
    except ApiError as error:
        return [_unchecked_finding(str(error))]
    return findings


def _unchecked_finding(reason: str) -> Finding:
    return Finding(
        "warning", f"whether policies make this run lose messages could not be checked: {reason}"
    )


def _check_roles(
    roles: list[Role],
    management: Management,
    version: tuple[int, ...],
    declare: Mapping[str, Any] | None,
) -> Iterator[Finding]:
    policies = management.policies()
    for role in roles:
        kind, arguments = "quorum", role.arguments
        if arguments is None:
            known: Mapping[str, Any] | None = management.queue(role.queue)
            if known is None and role.name == "source":
                known = declare
                if known is None:
                    yield _unchecked_finding(
                        f"the management API at {management.url} knows no queue {role.queue!r},"
                        " so it is another broker's; set the connection's extra 'management_url'"
                    )
                    return
            if known is None:
                yield _finding("warning", role, "does not exist: dead letters would be redelivered")
                continue
            arguments = known.get("arguments") or {}
            kind = str(known.get("type") or arguments.get("x-queue-type") or "classic")
            if not known.get("durable", True):
                text = "is not durable: it and its messages end with the broker"
                yield _finding("warning", role, text)
        settings = effective(policies, role.queue, kind, arguments)
        yield from judge(role, kind, settings)
        limited = role.name == "source" and kind == "quorum" and version >= _LIMITED
        if limited and not {"delivery-limit", "dead-letter-exchange"} & settings.keys():
            text = (
                "has no delivery-limit and no dead-letter exchange: messages that are returned more"
                " than 20 times, also by runs that died, are dropped"
            )
            yield _finding("warning", role, text)


def _check_flags(management: Management) -> Iterator[Finding]:
    try:
        flags = management.feature_flags()
    except ApiError:
        text = f"feature flags {' and '.join(_FLAGS)}: only an administrator may see them"
        yield Finding("note", text)
        return
    for name in _FLAGS:
        if flags.get(name, "enabled") != "enabled":
            text = (
                f"the feature flag {name} is {flags[name]}: without it a retry that waits may be"
                f" lost; run: rabbitmqctl enable_feature_flag {name}"
            )
            yield Finding("error", text)
