"""The base of all producers: the options they share, and how each opens its two halves.

A producer is a frozen set of options until :meth:`Producer.source` or :meth:`Producer.custodian`
opens it; only then is the broker's client imported.  ``docs/producers.md`` shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.protocol import Custodian, Delivery, QueueDepth, Source
from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict, decide
from airflow_broadway.core.errors import ConnectionMissing, OptionsError, ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import Options, option, options
from airflow_broadway.core.model.pipeline_options import RateLimiting, RetryPolicy
from airflow_broadway.core.model.rules import FUNCTION, POSITIVE, SECONDS, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What an Airflow connection says; ``password`` and ``extra`` never reach a ``repr``."""

    conn_id: str
    conn_type: str = ""
    host: str = ""
    port: int | None = None
    login: str = ""
    password: str = field(default="", repr=False)
    schema: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)


class Connections(Protocol):
    """Looks connections up where they are used; Airflow's in a task."""

    def get(self, conn_id: str) -> Connection:
        """The connection of that id.

        :raises ConnectionMissing: If there is none.
        """
        ...


class NoConnections:
    """Knows no connection: the default outside Airflow."""

    def get(self, conn_id: str) -> Connection:
        raise ConnectionMissing(
            f"the connection {conn_id!r} is not defined: outside Airflow pass `connections=` with a"
            " mapping's lookup, or give the producer its address as an option"
        )


def _never() -> bool:
    return False


@lru_cache(maxsize=64)
def _instant(text: str) -> datetime | None:
    """An instant in ISO 8601; of what was sent together it is asked for again and again."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


_NO_DELIVERY = Delivery()
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
#: From here on a number of seconds would be the year 5138, and is one of milliseconds.
_MILLISECONDS = 100_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerEnv:
    """What a producer is opened in.

    :param pipeline: The pipeline's name.
    :param generation: The execution of a process task; unique for ever.
    :param owner: For people and sweeps: dag_id, run_id, task_id, map_index, try_number.
    :param index: Which of ``concurrency`` producers this is, from 0.
    :param alone: Whether there are no others in this run, whatever ``concurrency`` says: it is to
        receive all.
    :param staging: For staged custody, and notes kept between runs: a folder URI of the pipeline's
        own; ``None`` outside a run.
    :param shared: For notes on a queue's messages that a pipeline of another name must find too: a
        folder URI that all pipelines of the staging root share; ``None`` outside a run.
    :param store: The staging root itself, for a source that no broker serves.
    :param interval: The data interval of a backfill, of which the source hands out each message and
        no other: from the first instant to before the second; ``None``: what waits.
    :param stopping: Whether the run is to stop: a source then waits for nothing that takes
        long, since Airflow kills its task five seconds later.
    """

    pipeline: str = "pipeline"
    generation: str = "local"
    owner: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    alone: bool = True
    clock: Clock = field(default_factory=SystemClock)
    connections: Connections = field(default_factory=NoConnections)
    staging: str | None = None
    shared: str | None = None
    store: Any = field(default=None, repr=False, compare=False)
    interval: tuple[datetime, datetime] | None = None
    stopping: Callable[[], bool] = field(default=_never, repr=False, compare=False)


@options
class Producer(Options):
    """Where messages come from, and the options that all producers share."""

    #: The short name of the broker, in leases, manifests and metrics.
    kind: ClassVar[str] = ""
    #: What ``on_success`` and ``on_failure`` may say, and what each means to custody.
    actions: ClassVar[Mapping[str, Action]] = {
        "ack": Action.ACK,
        "retry": Action.RETRY,
        "dead_letter": Action.DEAD_LETTER,
        "noop": Action.LEAVE,
    }
    #: Whether settling may publish messages again, so that staging must keep bodies: of which
    #: messages, :meth:`publishes` says.
    keeps_payload: ClassVar[bool] = False
    #: Whether a past interval can be read again, so that runs of type backfill are served.
    backfills: ClassVar[bool] = False
    #: Where in a message's metadata stands when the broker took it; empty where it does not say.
    sent_at: ClassVar[tuple[str, ...]] = ()
    #: Messages that a run asks a source for at once, at most, unless its processors take more.
    most_at_once: ClassVar[int] = 1000
    #: Whether a lease may be renewed; a fixed bound otherwise.
    renews: ClassVar[bool] = True
    #: Whether its broker is this machine, whose clock then judges leases; else staging's does.
    local_clock: ClassVar[bool] = False
    #: Whether :meth:`depth` may know the age of the oldest message.
    tells_age: ClassVar[bool] = True
    #: Seconds by which :meth:`depth` may be behind.
    depth_lag: ClassVar[float] = 0.0

    @property
    def keeps_order(self) -> bool:
        """Whether messages of one group stay in order, by :meth:`group_of`: one that failed and
        comes again holds back those behind it, which are then not handled but given back.
        """
        return False

    def group_of(self, message: Message) -> str | None:
        """The group within which the message stays in order; ``None``: it may go alone."""
        return None

    def publishes(self, action: Action) -> bool:
        """Whether to carry out this action a message is published again, with its body."""
        return self.keeps_payload

    def may_publish(self, own: Delivery) -> bool:
        """Whether settling a message may publish it again, as it is configured by now."""
        success = self.actions.get(own.on_success or self.on_success)
        failure = self.actions.get(own.on_failure or self.on_failure)
        found = {action for action in (success, failure) if action is not None}
        if Action.RETRY in found and self.retry.dead_letter:
            found.add(Action.DEAD_LETTER)
        return any(map(self.publishes, found))

    concurrency: int = option(
        default=1, rule=POSITIVE, doc="Producers of one run, each a mapped process task of its own."
    )
    on_success: str = option(
        default="ack",
        rule=Rule("an action of this producer", lambda v: isinstance(v, str)),
        doc="What is done with a message that succeeded: ``ack``, ``retry``, ``dead_letter`` or"
        " ``noop``, unless the producer names others.",
    )
    on_failure: str = option(
        default="retry",
        rule=Rule("an action of this producer", lambda v: isinstance(v, str)),
        doc="What is done with a message that failed; the same values.",
    )
    retry: RetryPolicy = option(
        default=RetryPolicy(),
        rule=Rule("a RetryPolicy", lambda v: isinstance(v, RetryPolicy)),
        doc="How often and when a failed message is retried.",
        nested=RetryPolicy,
    )
    rate_limiting: RateLimiting | None = option(
        default=None,
        rule=Rule("a RateLimiting or None", lambda v: v is None or isinstance(v, RateLimiting)),
        doc="Bounds the messages taken per interval by all producers of a run together.",
        nested=RateLimiting,
    )
    transformer: Callable[[Any], Message] | None = option(
        default=None,
        rule=FUNCTION.or_none(),
        doc="Called with every message as received; returns the message to go on with.",
    )
    max_crashes: int = option(
        default=5,
        rule=POSITIVE,
        doc="How many child processes may end on a message that they handle alone, before it is"
        " dead-lettered with the reason ``crashed``: see ``docs/poison.md``.",
    )
    lease: float = option(
        default=900.0,
        rule=SECONDS,
        doc="Seconds for which messages are held; renewed while the run is at work, where the"
        " broker can.",
    )

    def _resolve(self) -> None:
        for name in ("on_success", "on_failure"):
            value = getattr(self, name)
            checked = self.check_action(name, value, f"{type(self).__name__}.{name}")
            if checked != value:
                object.__setattr__(self, name, checked)

    def check_action(self, name: str, value: object, path: str) -> str:
        """Return ``value``, as this producer calls the action, if it is one of its actions.

        :raises OptionsError: Naming the valid ones.
        """
        if isinstance(value, str) and (value in self.actions or "{{" in value):
            return value
        raise OptionsError(path, f"one of {sorted(self.actions)}", value)

    def source(self, env: ProducerEnv) -> Source:
        """Open the half that receives; connects.

        :raises ProducerError: If the broker refuses or cannot be reached.
        :raises ConnectionMissing: If the connection is not defined.
        """
        raise TypeError(f"{type(self).__name__} has no source")

    def custodian(self, env: ProducerEnv) -> Custodian:
        """Open the half that settles; connects when first used."""
        raise TypeError(f"{type(self).__name__} has no custodian")

    def check(self, env: ProducerEnv) -> list[Finding]:
        """Returns what the next run would refuse or warn of; receives and changes nothing.

        :raises ProducerError: If a run cannot begin, for a reason that stops the check as well.
        """
        return [Finding("note", f"{type(self).__name__} has nothing that can be checked")]

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        """How full the queue is, or ``None`` where the broker does not say."""
        return None

    def console(self, env: ProducerEnv) -> str | None:
        """The queue's page in its broker's own console, where that is known; asks no broker.

        :raises BroadwayError: If the connection is missing.
        """
        return None

    def count_interval(self, env: ProducerEnv) -> int | None:
        """How many messages there are of the environment's interval, at most; takes none.

        :returns: ``None`` where that cannot be told.
        """
        return None

    def dead_letters(self, env: ProducerEnv, *, place: str | None = None) -> DeadLetters:
        """Open the place where this producer's dead letters lie, for people.

        :param place: A queue or topic to look into instead of the producer's own.
        :raises ProducerError: If there is none, or nobody knows where it is.
        """
        raise ProducerError(f"{type(self).__name__} has no dead letters that can be looked at")

    def sent_back_as(self, message: Message) -> str | None:
        """The id that a message had as the dead letter that it was, where its broker gave it
        another when it was sent back.
        """
        return None

    def enqueued_at(self, message: Message) -> datetime | None:
        """When the broker took a message, as received; ``None`` where it does not say."""
        if not self.sent_at:
            return None
        value: Any = message.metadata
        for name in self.sent_at:
            # Asking for a Mapping costs three times what asking for a dict does.
            there = type(value) is dict or isinstance(value, Mapping)
            value = value.get(name) if there else None
        if type(value) is str:
            return _instant(value)
        # Brokers count from 1970, in seconds or in milliseconds.
        if type(value) is not int or value <= 0:
            return None
        return _EPOCH + timedelta(milliseconds=value if value >= _MILLISECONDS else value * 1000)

    def shards(self) -> Sequence[Producer]:
        """The producers, one for each queue, whose depths together are this one's."""
        return [self]

    def unsafe_options(self) -> Sequence[str]:
        """Returns the names of options by which the client may read a file, load a library or run
        a command.  A process that runs no code of users refuses them.
        """
        return ()

    def prepare_for_start(self, pipeline: Any) -> Mapping[str, Any]:
        """Called once when a pipeline with this producer has been built, in every process.

        May check the pipeline as a whole (by raising :class:`OptionsError`), and may return options
        that replace the pipeline's own; they are checked like any others.
        """
        return {}

    def verdict(self, message: Message, *, failed: bool, stage: str) -> Verdict:
        """What is done with a message that succeeded or failed, by its own configuration first:
        :meth:`judge` of its facts.
        """
        if failed and message.status.kind == "crashed":  # a retry would end the next process
            return Verdict(Action.DEAD_LETTER, 0.0, message.status.text, stage)
        data = message.acknowledger.data
        own = data if isinstance(data, Delivery) else _NO_DELIVERY
        name = (
            (own.on_failure or self.on_failure) if failed else (own.on_success or self.on_success)
        )
        facts = (
            name,
            message.attempt,
            message.redelivered,
            message.status.text if failed else "",
            stage,
            message.message_id,
        )
        return self.judge(tuple.__new__(Facts, facts))  # half the cost of calling the class

    def judge(self, facts: Facts) -> Verdict:
        """The verdict by plain facts; nothing else decides, at whatever stage and in whatever task.

        A producer that overrides it goes by ``facts`` alone, and acks by whatever ``actions`` maps
        to an ack.
        """
        return decide(self.actions[facts.name], facts, self.retry)
