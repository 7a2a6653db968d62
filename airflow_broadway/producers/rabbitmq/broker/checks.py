"""Whether the broker's policies make a run's queues lose messages.

The arguments of our own queues are checked by declaring them: the broker refuses others.  Policies
apply on top of arguments, by a queue's name, and may make any queue lose what it holds.  Only the
management API shows them; where it does not answer, that is a warning, and nothing fails.

Among the users' policies whose pattern matches the queue, the one with the highest priority
applies, alone; so among the operators'.  Where a policy and an argument of the queue set the same
limit, the lower one applies; in all else, the argument: https://www.rabbitmq.com/docs/parameters.

The management API computes the same for queues that exist, as ``effective_policy_definition``, but
shows it with its statistics: a policy that was set just now is missing there for up to 10 seconds.

A pattern can be written so that matching it takes for ever.  So all but the plainest patterns are
matched in a process of its own, which is ended when it takes too long.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.findings import Finding, Level, enforce
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.amqp.address import Address
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker.holding_queues import HoldingQueues
from airflow_broadway.producers.rabbitmq.broker.management import Management, Unseen
from airflow_broadway.producers.rabbitmq.broker.names import KEEPING, LADDER, QueueNames
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

log = logging.getLogger(__name__)

#: The first release whose quorum queues dead-letter without loss, and the first in which no feature
#: flag is needed for that.
_NEEDED, _WITHOUT_FLAGS = (3, 10), (3, 12)
#: The first release in which a quorum queue gives up a message after 20 returns by default.
_LIMITED = (4, 0)
_FLAGS = ("quorum_queue", "stream_queue")
#: Seconds for which a settlement uses the same answer about the broker's policies.
CHECK_INTERVAL = 30.0


class Role(NamedTuple):
    """A queue, and what it is for.

    :param name: ``source``, ``held``, ``delay``, ``dead``; ``sink`` for dead letters in a queue of
        the user's own.
    :param arguments: What it is declared with; ``None`` if others declare it.
    """

    name: str
    queue: str
    arguments: Mapping[str, Any] | None = None


def roles_of(options: RabbitMQOptions, held: Iterable[str] = ()) -> list[Role]:
    """Returns every queue that a run may use.

    :param held: The holding queues that exist; the first of all by default.
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

#: The limits, of which the lower one counts: milliseconds, returns, messages, bytes.
LIMITS = ("expires", "message-ttl", "delivery-limit", "max-length", "max-length-bytes")
#: The types of queues that a policy may be for, beside all.
_TYPES = {"classic_queues": "classic", "quorum_queues": "quorum", "streams": "stream"}


class Setting(NamedTuple):
    """A setting that counts for a queue.

    :param by: What sets it, for people.
    """

    value: Any
    by: str


class Policies:
    """The policies of a virtual host, as they apply to some queues.

    A pattern that Python cannot read (Erlang's dialect knows more) or that takes too long counts as
    matching all: rather too many than too few.

    :param policies: What they are called, for people → those, as the management API shows them.
    :param queues: The names of the queues.
    """

    def __init__(
        self, policies: Mapping[str, Iterable[Mapping[str, Any]]], queues: Sequence[str]
    ) -> None:
        # The highest priority first.
        self._policies = {
            kind: sorted(shown, key=lambda policy: -policy["priority"])
            for kind, shown in policies.items()
        }
        patterns = [policy["pattern"] for shown in self._policies.values() for policy in shown]
        self._matching = _matching(patterns, queues)

    def effective(self, queue: str, kind: str, arguments: Mapping[str, Any]) -> dict[str, Setting]:
        """Returns what counts for a queue: name without ``x-`` → value and what sets it.

        :param kind: ``classic``, ``quorum`` or ``stream``.
        :param arguments: With which the queue is declared.
        """
        settings = {
            name.removeprefix("x-"): Setting(value, "its declaration")
            for name, value in arguments.items()
        }
        for policy_kind, policies in self._policies.items():
            fitting = [policy for policy in policies if self._applies(policy, queue, kind)]
            for policy in fitting[:1]:
                for name, value in policy["definition"].items():
                    before = settings.get(name)
                    if before is None or (name in LIMITS and _is_less(value, before.value)):
                        settings[name] = Setting(value, f"the {policy_kind} {policy['name']!r}")
        return settings

    def _applies(self, policy: Mapping[str, Any], queue: str, kind: str) -> bool:
        apply_to = policy["apply-to"]
        if apply_to not in ("all", "queues") and _TYPES.get(apply_to) != kind:
            return False
        return queue in self._matching[policy["pattern"]]


def _is_less(value: Any, other: Any) -> bool:
    numbers = isinstance(value, (int, float)) and isinstance(other, (int, float))
    return bool(numbers and value < other)


# -- patterns --------------------------------------------------------------------------------------

#: A pattern that takes no time: literal characters, and ``.*`` at its end.
_PLAIN = re.compile(r"\^?(?:[\w<>/:%=-]|\\[.-]|\.(?![*+?{]))*(?:\.\*)?\$?")
#: Seconds that matching may take; patterns that may take longer, before all others are given up.
_MATCH_TIMEOUT, _MAX_SLOW = 2.0, 3
#: Reads patterns and names, writes the names that each pattern matches, a line each.
_MATCH = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    try:
        matching = [name for name in names if re.search(pattern, name)]
    except (re.error, OverflowError, RecursionError):
        matching = names
    print(json.dumps(matching), flush=True)
"""


def _matching(patterns: Iterable[str], names: Sequence[str]) -> dict[str, Collection[str]]:
    """Returns the names that each pattern matches; all names where that takes too long."""
    matching: dict[str, Collection[str]] = {}
    hard = []
    for pattern in dict.fromkeys(patterns):
        if _PLAIN.fullmatch(pattern):
            matching[pattern] = [name for name in names if re.search(pattern, name)]
        else:
            hard.append(pattern)
    slow = 0
    while hard and slow < _MAX_SLOW:
        answers = _match_apart(hard, names)
        matching.update(zip(hard, answers, strict=False))
        hard = hard[len(answers) :]
        if hard:
            matching[hard.pop(0)] = names
            slow += 1
    return {**matching, **dict.fromkeys(hard, names)}


def _match_apart(patterns: list[str], names: Sequence[str]) -> list[list[str]]:
    """Returns the names that the first patterns match: of all that were matched in time."""
    try:
        lines = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([patterns, list(names)]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_MATCH_TIMEOUT,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as late:
        lines = late.stdout or b""
    return [json.loads(line) for line in lines.splitlines(keepends=True) if line[-1:] == b"\n"]


# -- the rules -------------------------------------------------------------------------------------

_OURS: Final = {
    "expires": "the queue is deleted, with what is in it, when nobody used it for so long",
    "message-ttl": "what waits longer in it is lost",
    "delivery-limit": "what is returned to it more often is lost",
    "drops": "the oldest in it is lost when it is full",
    "refuses": "it takes nothing more when it is full, so that runs fail",
}
#: Role → setting → what it means; ``drops`` and ``refuses`` are a bound on the queue's length, by
#: how it overflows.
_MEANINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "source": {
        "expires": _OURS["expires"],
        "message-ttl": "a message that waits longer for a run {gone}, a retry too",
        "delivery-limit": "a message returned more often {gone}, also by runs that died",
        "drops": "the oldest message {gone} when the queue is full, a retry too",
        "refuses": "what a run releases into the full queue stays in its holding queue",
    },
    "held": _OURS,
    "delay": {
        **_OURS,
        "message-ttl": "retries come earlier than they should",
        "delivery-limit": "what is returned to it more often leaves it",
    },
    "dead": _OURS,
    "sink": _OURS,
}
#: Role → the settings that are errors: our own queues would lose messages.  All else is a warning.
_ERRORS: Final[Mapping[str, Iterable[str]]] = {
    "held": ("expires", "message-ttl", "delivery-limit", "drops"),
    "delay": ("expires",),
    "dead": ("expires", "message-ttl", "delivery-limit", "drops"),
}


def judge(role: Role, kind: str, settings: Mapping[str, Setting]) -> list[Finding]:
    """Returns what the settings of one queue mean for what it holds.

    :param kind: ``classic``, ``quorum`` or ``stream``.
    :param settings: As :meth:`.Policies.effective` returns them.
    """
    if role.name == "source" and kind == "stream":
        text = "reading a stream removes nothing from it, so there is nothing to settle"
        return [_finding("error", role, text)]
    dead_letters = "dead-letter-exchange" in settings
    gone = "goes to its dead-letter exchange" if dead_letters else "is dropped"
    refuses = str(settings.get("overflow", Setting("", "")).value).startswith("reject-publish")
    findings = []
    for name in LIMITS:
        setting = settings.get(name)
        if setting is None or setting.value == (role.arguments or {}).get(f"x-{name}"):
            continue
        rule = ("refuses" if refuses else "drops") if name.startswith("max-length") else name
        level: Level = "error" if rule in _ERRORS.get(role.name, ()) else "warning"
        value = f"{setting.value} ms" if name in ("expires", "message-ttl") else setting.value
        meaning = _MEANINGS[role.name][rule].format(gone=gone)
        findings.append(_finding(level, role, f"{setting.by} gives it {name} {value}: {meaning}"))
    return findings


def _finding(level: Level, role: Role, text: str) -> Finding:
    return Finding(level, f"the queue {role.queue!r}: {text}")


# -- checks ----------------------------------------------------------------------------------------


def refuse_losses(connection: ConnectionThread, options: RabbitMQOptions) -> None:
    """Refuses a broker whose policies make a run's queues lose messages, as far as it shows them.

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
    """Returns which queues of ours would lose messages by a policy, and why, as far as it is seen.

    An answer is used again for :data:`CHECK_INTERVAL` only: no more messages are at risk than those
    that lie in the queue when the policy is set.
    """
    roles = [role for role in roles_of(options) if role.arguments is not None]
    try:
        policies = Policies(Management(address).policies(), [role.queue for role in roles])
    except Unseen as error:  # each run's source warns of it
        log.debug("Policies could not be checked: %s", error)
        return {}
    return {
        role.queue: f"RabbitMQ would lose what is in {finding.text}"
        for role in roles
        for finding in judge(
            role, "quorum", policies.effective(role.queue, "quorum", role.arguments or {})
        )
        if finding.level == "error"
    }


def check_version(connection: ConnectionThread) -> list[Finding]:
    """Checks that the broker's quorum queues do not lose what lapses."""
    version = connection.version
    if not () < _numbers(version) < _NEEDED:
        return []
    text = (
        f"RabbitMQ at {connection.address.shown} is {version}: its quorum queues lose retries that"
        " wait, which 3.10 and later do not; upgrade it"
    )
    return [Finding("error", text)]


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; empty if the broker does not report it."""
    try:
        return tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return ()


def check_queues(
    connection: ConnectionThread, options: RabbitMQOptions, *, exists: bool = True
) -> list[Finding]:
    """Checks every queue of a run by the management API.

    :param exists: Whether the source queue is known to exist; else a run is to declare it.
    """
    held = [name for name, _ in HoldingQueues(QueueNames(options.queue)).present(connection)]
    version = _numbers(connection.version)
    try:
        management = Management(connection.address)
        declare = None if exists else options.declare
        findings = list(_check_each(roles_of(options, held), management, version, declare))
        if not version >= _WITHOUT_FLAGS:
            findings += _check_flags(management)
    except Unseen as error:
        return [_unseen(str(error))]
    return findings


def _unseen(why: str) -> Finding:
    return Finding(
        "warning", f"whether policies make this run lose messages could not be checked: {why}"
    )


def _check_each(
    roles: list[Role],
    management: Management,
    version: tuple[int, ...],
    declare: Mapping[str, Any] | None,
) -> Iterator[Finding]:
    policies = Policies(management.policies(), [role.queue for role in roles])
    for role in roles:
        kind, arguments = "quorum", role.arguments
        if arguments is None:
            known: Mapping[str, Any] | None = management.queue(role.queue)
            if known is None and role.name == "source":
                known = declare
                if known is None:
                    yield _unseen(
                        f"the management API at {management.shown} knows no queue {role.queue!r},"
                        " so it is another broker's; set the connection's extra 'management_url'"
                    )
                    return
            if known is None:
                yield _finding("warning", role, "does not exist: dead letters would come back")
                continue
            arguments = known.get("arguments") or {}
            kind = str(known.get("type") or arguments.get("x-queue-type") or "classic")
            if not known.get("durable", True):
                text = "is not durable: it and its messages end with the broker"
                yield _finding("warning", role, text)
        settings = policies.effective(role.queue, kind, arguments)
        yield from judge(role, kind, settings)
        limited = role.name == "source" and kind == "quorum" and version >= _LIMITED
        if limited and not {"delivery-limit", "dead-letter-exchange"} & settings.keys():
            text = (
                "has no delivery-limit and no dead-letter exchange: what was returned to it more"
                " than 20 times, also by runs that died, is dropped"
            )
            yield _finding("warning", role, text)


def _check_flags(management: Management) -> Iterator[Finding]:
    try:
        flags = management.feature_flags()
    except Unseen:
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
