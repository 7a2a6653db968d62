"""Whether the broker's policies make a run's queues lose messages.

The arguments of our own queues are checked by declaring them: the broker refuses others.  Policies
apply on top of arguments, by a queue's name, and may make any queue lose what it holds.  Only the
management API shows them; where it does not answer, that is a warning, and nothing fails.

==============  =============================  =============================================
queue           an error                       a warning
==============  =============================  =============================================
source          a stream                       all else: it is not ours
held, dead      expires, message-ttl,          max-length: they are declared to refuse
                delivery-limit
delay           expires                        max-length, message-ttl, delivery-limit
==============  =============================  =============================================

A queue of the user's own for dead letters has warnings only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_broadway.core.custody.findings import Level
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.broker.holding_queues import HoldingQueues
from airflow_broadway.producers.rabbitmq.broker.management import Management, Unseen
from airflow_broadway.producers.rabbitmq.broker.names import KEEPING, LADDER, QueueNames
from airflow_broadway.producers.rabbitmq.broker.policies import Setting, effective, matched

if TYPE_CHECKING:
    from airflow_broadway.producers.rabbitmq.amqp.address import Address
    from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
    from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

log = logging.getLogger(__name__)

#: How grave a finding is.  A note says what could not be checked and hardly matters.
ERROR: Final = "error"
WARNING: Final = "warning"
NOTE: Final = "note"

#: The first release whose quorum queues dead-letter without loss, and the first in which no feature
#: flag is needed for that.
_NEEDED, _WITHOUT_FLAGS = (3, 10), (3, 12)
#: Roles of queues from which nothing is to leave by itself.
_LASTING = ("held", "dead", "sink")
#: The first release in which a quorum queue gives up a message after 20 returns by default.
_LIMITED = (4, 0)
_FLAGS = ("quorum_queue", "stream_queue")
#: Seconds for which a settlement uses the same answer about the broker's policies.
_CHECK_INTERVAL = 30.0

_Found = tuple[Level, str, str]


class Finding(NamedTuple):
    """Something that people should know of a queue.

    :param level: ``error``, ``warning`` or ``note``.
    :param queue: Empty for the broker as a whole.
    """

    level: Level
    queue: str
    text: str

    @property
    def shown(self) -> str:
        """It, for people."""
        return f"the queue {self.queue!r}: {self.text}" if self.queue else self.text


@dataclass(frozen=True, slots=True)
class Role:
    """A queue, and what it is for.

    :param name: ``source``, ``held``, ``delay``, ``dead``; ``sink`` for dead letters in a queue of
        the user's own.
    :param arguments: What it is declared with; ``None`` if others declare it.
    """

    name: str
    queue: str
    arguments: Mapping[str, Any] | None = None


def roles_of(options: RabbitMQOptions, held: Iterable[str] = ()) -> list[Role]:
    """Every queue that a run may use.

    :param held: The holding queues that exist; the first of all by default.
    """
    queues = QueueNames(options.queue)
    found = [Role("source", queues.source)]
    found += [Role("held", name, KEEPING) for name in held or [queues.held(0)]]
    found += [Role("delay", queues.delay(step), queues.delay_arguments(step)) for step in LADDER]
    place = options.dead_letter
    if place is None:
        found.append(Role("dead", queues.dead, KEEPING))
    elif isinstance(place, str):
        found.append(Role("sink", place))
    elif not place.get("exchange"):
        found.append(Role("sink", str(place.get("routing_key", ""))))
    return found


def refuse_losses(connection: ConnectionThread, options: RabbitMQOptions) -> None:
    """Refuse a broker whose policies make a run's queues lose messages, as far as it shows them.

    :raises ProducerError: If messages would be lost.
    """
    address = connection.address
    refuse_version(connection.version, address.shown)
    if address.management_url == "":
        log.info("Policies are not checked: the connection's extra 'management_url' is false.")
    else:
        held = [name for name, _ in HoldingQueues(QueueNames(options.queue)).present(connection)]
        act_on(check_queues(options, address, version=connection.version, held=held))


class LossCheck:
    """Checks, before messages move into a queue of ours, that no policy makes it lose them.

    A policy may be set at any time, so an answer is used again for half a minute only: no more
    messages are at risk than those that lie in the queue when the policy is set.
    """

    def __init__(self, options: RabbitMQOptions) -> None:
        self._roles = [role for role in roles_of(options) if role.arguments is not None]
        self._losses: dict[str, str] = {}
        self._checked_at = -math.inf

    def reason(self, address: Address, queue: str) -> str:
        """Why the queue would lose messages; empty if it would not, or if that cannot be seen."""
        if time.monotonic() - self._checked_at > _CHECK_INTERVAL:
            self._losses = self._check(address)
            self._checked_at = time.monotonic()
        return self._losses.get(queue, "")

    def _check(self, address: Address) -> dict[str, str]:
        try:
            policies = matched(Management(address).policies(), [r.queue for r in self._roles])
        except Unseen as error:  # each run's source warns of it
            log.debug("Policies could not be checked: %s", error)
            return {}
        return {
            finding.queue: f"RabbitMQ would lose what is in {finding.shown}"
            for role in self._roles
            for finding in judge(
                role,
                "quorum",
                effective(role.queue, "quorum", role.arguments or {}, policies),
            )
            if finding.level == ERROR
        }


def refuse_version(version: str, where: str) -> None:
    """Refuse a broker whose quorum queues lose what lapses.

    :param version: As the broker says; empty if it does not.
    :raises ProducerError: If it is too old.
    """
    known = _numbers(version)
    if known and known < _NEEDED:
        raise ProducerError(
            f"RabbitMQ at {where} is {version}: its quorum queues lose retries that wait, which"
            " 3.10 and later do not; upgrade it"
        )


def _numbers(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return ()


def check_queues(
    options: RabbitMQOptions,
    address: Address,
    *,
    version: str = "",
    held: Iterable[str] = (),
    there: bool = True,
) -> list[Finding]:
    """Look at every queue of a run by the management API.

    :param version: The broker's, as it says itself.
    :param held: The holding queues that exist.
    :param there: Whether the source queue is known to be there; else a run is to declare it.
    """
    try:
        management = Management(address)
        found = list(_look(options, management, version, held, there))
        if not _numbers(version) >= _WITHOUT_FLAGS:
            found += _flags(management)
    except Unseen as error:
        return [_unseen(str(error))]
    return found


def _unseen(why: str) -> Finding:
    return Finding(
        WARNING, "", f"whether policies make this run lose messages could not be checked: {why}"
    )


def _look(
    options: RabbitMQOptions,
    management: Management,
    version: str,
    held: Iterable[str],
    there: bool,
) -> Iterator[Finding]:
    roles = roles_of(options, held)
    policies = matched(management.policies(), [role.queue for role in roles])
    for role in roles:
        kind, arguments = "quorum", role.arguments
        if arguments is None:
            known = management.queue(role.queue)
            if known is None and role.name == "source" and not there:
                known = dict(options.declare or {})
            if known is None:
                if role.name == "source":
                    yield _unseen(
                        f"the management API at {management.shown} knows no queue {role.queue!r},"
                        " so it is another broker's; set the connection's extra 'management_url'"
                    )
                    return
                yield Finding(WARNING, role.queue, "does not exist: dead letters would come back")
                continue
            arguments = known.get("arguments") or {}
            kind = str(known.get("type") or arguments.get("x-queue-type") or "classic")
            if not known.get("durable", True):
                yield Finding(
                    WARNING, role.queue, "is not durable: it and its messages end with the broker"
                )
        settings = effective(role.queue, kind, arguments, policies)
        yield from judge(role, kind, settings)
        if role.name == "source" and kind == "quorum" and _numbers(version) >= _LIMITED:
            yield from _of_default_limit(role, settings)


def _of_default_limit(role: Role, settings: Mapping[str, Setting]) -> Iterator[Finding]:
    """What a release means for the source that limits deliveries by itself."""
    if not {"delivery-limit", "dead-letter-exchange"} & settings.keys():
        yield Finding(
            WARNING,
            role.queue,
            "has no delivery-limit and no dead-letter exchange: what was returned to it more"
            " than 20 times, also by runs that died, is dropped",
        )


def _flags(management: Management) -> Iterator[Finding]:
    try:
        flags = management.feature_flags()
    except Unseen:
        yield Finding(
            NOTE, "", f"feature flags {' and '.join(_FLAGS)}: only an administrator may see them"
        )
        return
    for name in _FLAGS:
        if flags.get(name, "enabled") != "enabled":
            yield Finding(
                ERROR,
                "",
                f"the feature flag {name} is {flags[name]}: without it a retry that waits may be"
                f" lost; run: rabbitmqctl enable_feature_flag {name}",
            )


# -- the rules -------------------------------------------------------------------------------------


def judge(role: Role, kind: str, settings: Mapping[str, Setting]) -> list[Finding]:
    """What the settings of one queue mean for what it holds.

    :param kind: ``classic``, ``quorum`` or ``stream``.
    :param settings: As :func:`effective` gives them.
    """
    found: Iterable[_Found]
    if role.name == "source":
        found = _of_source(kind, settings)
    elif role.name == "sink":
        found = ((WARNING, by, text) for _, by, text in _of_ours(role, settings))
    else:
        found = _of_ours(role, settings)
    return [
        Finding(level, role.queue, f"{by}: {text}" if by else text) for level, by, text in found
    ]


def _of_source(kind: str, settings: Mapping[str, Setting]) -> Iterator[_Found]:
    if kind == "stream":
        yield ERROR, "", "reading a stream removes nothing from it, so there is nothing to settle"
        return
    target = settings.get("dead-letter-exchange")
    gone = "goes to its dead-letter exchange" if target is not None else "is dropped"
    for name, text in (
        ("expires", "the queue is deleted, with what is in it, when nobody used it for so long"),
        ("message-ttl", f"a message that waits longer for a run {gone}, a retry too"),
        (
            "delivery-limit",
            f"a message returned more often {gone}, also by runs that died",
        ),
    ):
        if name in settings:
            yield _finding(WARNING, name, settings[name], text)
    yield from _full(
        settings,
        drops=(WARNING, f"the oldest message {gone} when the queue is full, a retry too"),
        refuses=(WARNING, "what a run releases into the full queue stays in its holding queue"),
    )


def _of_ours(role: Role, settings: Mapping[str, Setting]) -> Iterator[_Found]:
    name, own = role.name, role.arguments or {}
    if "expires" in settings:
        text = "the queue is deleted, with what is in it, when nobody used it for so long"
        yield _finding(ERROR, "expires", settings["expires"], text)
    ttl = settings.get("message-ttl")
    if ttl is not None and ttl.value != own.get("x-message-ttl"):
        level: Level = ERROR
        text = "what waits longer in it is lost"
        if name == "delay":
            text, level = "retries come earlier than they should", WARNING
        yield _finding(level, "message-ttl", ttl, text)
    limit = settings.get("delivery-limit")
    if limit is not None and limit.value != own.get("x-delivery-limit"):
        lost = name in _LASTING
        text = (
            "what is returned to it more often is lost"
            if lost
            else "what is returned to it more often leaves it"
        )
        yield _finding(ERROR if lost else WARNING, "delivery-limit", limit, text)
    dropped: Level = ERROR if name in _LASTING else WARNING
    yield from _full(
        settings,
        drops=(dropped, "the oldest in it is lost when it is full"),
        refuses=(WARNING, "it takes nothing more when it is full, so that runs fail"),
    )


def _full(
    settings: Mapping[str, Setting], *, drops: tuple[Level, str], refuses: tuple[Level, str]
) -> Iterator[_Found]:
    """What a bound on the queue's length means, by how it overflows."""
    overflow = settings.get("overflow")
    refusing = overflow is not None and str(overflow.value).startswith("reject-publish")
    level, text = refuses if refusing else drops
    for name in ("max-length", "max-length-bytes"):
        if name in settings:
            yield _finding(level, name, settings[name], text)


def _finding(level: Level, name: str, setting: Setting, text: str) -> _Found:
    unit = " ms" if name in ("expires", "message-ttl") else ""
    return level, f"{setting.by} gives it {name} {setting.value}{unit}", text


def act_on(findings: Iterable[Finding]) -> None:
    """Raise the errors as one; log the rest.

    :raises ProducerError: If there is an error, with how to mend it.
    """
    errors = []
    for each in findings:
        if each.level == ERROR:
            errors.append(each.shown)
        else:
            log.log(logging.WARNING if each.level == WARNING else logging.INFO, "%s.", each.shown)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ProducerError(
            f"RabbitMQ would lose messages of this run: {errors[0]}{more}; let no such policy match"
            " ^broadway\\., and clear the task; `airflow-broadway check` lists all"
        )
