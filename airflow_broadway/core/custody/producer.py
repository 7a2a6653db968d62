"""The base class of all producers: shared options, and how source and custodian are opened.

A producer is a frozen set of options until :meth:`Producer.source` or :meth:`Producer.custodian`
opens it; only then is the broker's client imported.  ``docs/producers.md`` shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Any, ClassVar

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.protocol import Custodian, Delivery, QueueDepth, Source
from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict, decide
from airflow_broadway.core.errors import OptionsError, ProducerError
from airflow_broadway.core.model.connections import Connections, NoConnections
from airflow_broadway.core.model.identity import HEADER, IDENTITY, MESSAGE_ID, digest, payload_value
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import Options, option, options
from airflow_broadway.core.model.pipeline_options import RateLimiting, RetryPolicy
from airflow_broadway.core.model.rules import FUNCTION, POSITIVE, SECONDS, Rule


def _never() -> bool:
    return False


@lru_cache(maxsize=64)
def _parse_timestamp(text: str) -> datetime | None:
    """Parses an ISO 8601 timestamp; cached, since messages sent together share one."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


_NO_DELIVERY = Delivery()
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_ACTION = Rule("an action of this producer", lambda v: isinstance(v, str))
#: A larger number is milliseconds: as seconds it would be after the year 5138.
_MILLISECONDS = 100_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerEnv:
    """The environment in which a producer is opened.

    :param pipeline: The pipeline's name.
    :param generation: The execution of a process task; unique for ever.
    :param owner: For display and sweeps: dag_id, run_id, task_id, map_index, try_number.
    :param index: Which of ``concurrency`` producers this is, from 0.
    :param alone: Whether this is the run's only producer, regardless of ``concurrency``; it then
        receives all messages.
    :param staging: The pipeline's own folder URI, for staged custody and for notes kept between
        runs; ``None`` outside a run.
    :param shared: A folder URI that all pipelines of the staging root share, for notes on a queue's
        messages that other pipelines need too; ``None`` outside a run.
    :param store: The staging root itself, for a source without a broker.
    :param interval: The data interval of a backfill, end exclusive: the source delivers exactly its
        messages; ``None`` delivers the backlog.
    :param stopping: Whether the run is to stop: a source then starts no long wait, since Airflow
        kills its task five seconds later.
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
    """The base class of producers, with the options that all of them share."""

    #: The short name of the broker, in leases, manifests and metrics.
    kind: ClassVar[str] = ""
    #: The valid values of ``on_success`` and ``on_failure``, and their actions.
    actions: ClassVar[Mapping[str, Action]] = {
        "ack": Action.ACK,
        "retry": Action.RETRY,
        "dead_letter": Action.DEAD_LETTER,
        "noop": Action.LEAVE,
    }
    #: Whether settling may republish messages, so that staging must keep bodies;
    #: :meth:`publishes` decides for which actions.
    keeps_payload: ClassVar[bool] = False
    #: Whether a past interval can be read again, so that backfill runs are supported.
    backfills: ClassVar[bool] = False
    #: The path, in a message's metadata, of its enqueue timestamp; empty if there is none.
    sent_at: ClassVar[tuple[str, ...]] = ()
    #: Whether the broker assigns each message an id that it keeps; otherwise a process that dies
    #: may leave a message twice, under two ids.
    assigns_ids: ClassVar[bool] = True
    #: The largest demand of one receive, unless the processors take more.
    max_fetch: ClassVar[int] = 1000
    #: Whether a lease may be renewed; its deadline is fixed otherwise.
    renews: ClassVar[bool] = True
    #: Whether the broker is this machine, whose clock then judges leases; else staging's does.
    local_clock: ClassVar[bool] = False
    #: Whether :meth:`depth` reports the age of the oldest message.
    reports_oldest_age: ClassVar[bool] = True
    #: The staleness of :meth:`depth`, in seconds.
    depth_staleness: ClassVar[float] = 0.0

    @property
    def keeps_order(self) -> bool:
        """Whether messages of one group (:meth:`group_of`) stay in order: a message that failed and
        is redelivered blocks those behind it, which are then released unhandled.
        """
        return False

    def group_of(self, message: Message) -> str | None:
        """Returns the message's ordering group; ``None`` if it is unordered."""
        return None

    def publishes(self, action: Action) -> bool:
        """Returns whether carrying out this action republishes the message, with its body."""
        return self.keeps_payload

    def may_publish(self, own: Delivery) -> bool:
        """Returns whether settling a message may republish it, by its current ack configuration."""
        success = self.actions.get(own.on_success or self.on_success)
        failure = self.actions.get(own.on_failure or self.on_failure)
        actions = {action for action in (success, failure) if action is not None}
        if Action.RETRY in actions and self.retry.dead_letter:
            actions.add(Action.DEAD_LETTER)
        return any(map(self.publishes, actions))

    concurrency: int = option(
        default=1, rule=POSITIVE, doc="Producers of a run, each a mapped process task of its own."
    )
    on_success: str = option(
        default="ack",
        rule=_ACTION,
        doc="The action for a message that succeeded.",
    )
    on_failure: str = option(
        default="retry",
        rule=_ACTION,
        doc="The action for a message that failed.",
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
        doc="Bounds the messages that all producers of a run take per interval.",
        nested=RateLimiting,
    )
    transformer: Callable[[Any], Message] | None = option(
        default=None,
        rule=FUNCTION.or_none(),
        doc="Called with every message as received; returns the message to continue with.",
    )
    message_identity: str | None = option(
        default=None,
        rule=IDENTITY.or_none(),
        doc="Identifies copies of one message, whose rows a sink gets once: ``header:NAME``,"
        " or a JSON pointer into the payload; RabbitMQ: ``message_id`` too.  ``None``:"
        " the broker's id (RabbitMQ: ``message_id``, of redelivered messages alone).",
    )
    max_crashes: int = option(
        default=5,
        rule=POSITIVE,
        doc="Child processes that a message may end before it is dead-lettered as"
        " ``crashed``: see ``docs/poison.md``.",
    )
    lease: float = option(
        default=900.0,
        rule=SECONDS,
        doc="How long messages are held; renewed during the run, where the broker supports it.",
    )

    def _resolve(self) -> None:
        for name in ("on_success", "on_failure"):
            value = getattr(self, name)
            checked = self.check_action(name, value, f"{type(self).__name__}.{name}")
            if checked != value:
                object.__setattr__(self, name, checked)
        if self.message_identity == MESSAGE_ID and self.assigns_ids:
            raise OptionsError(
                f"{type(self).__name__}.message_identity",
                "'header:NAME' or a JSON pointer such as '/order/id', since its messages have no"
                " property message_id; leave it out for the broker's id",
                self.message_identity,
            )

    def check_action(self, name: str, value: object, path: str) -> str:
        """Returns ``value``, under this producer's name for the action, if it is a valid action.

        :raises OptionsError: Naming the valid actions.
        """
        if isinstance(value, str) and (value in self.actions or "{{" in value):
            return value
        raise OptionsError(path, f"one of {sorted(self.actions)}", value)

    def source(self, env: ProducerEnv) -> Source:
        """Opens the receiving half; connects.

        :raises ProducerError: If the broker refuses or cannot be reached.
        :raises ConnectionMissing: If the connection is not defined.
        """
        raise TypeError(f"{type(self).__name__} has no source")

    def custodian(self, env: ProducerEnv) -> Custodian:
        """Opens the settling half; connects on first use."""
        raise TypeError(f"{type(self).__name__} has no custodian")

    def check(self, env: ProducerEnv) -> list[Finding]:
        """Returns the errors and warnings of the next run; receives and changes nothing.

        :raises ProducerError: If a run cannot begin, for a reason that also stops the check.
        """
        return [Finding("note", f"{type(self).__name__} has nothing that can be checked")]

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        """Returns the queue's depth, or ``None`` if the broker does not report one."""
        return None

    def console(self, env: ProducerEnv) -> str | None:
        """Returns the URL of the queue in its broker's console, if known; makes no request.

        :raises BroadwayError: If the connection is missing.
        """
        return None

    def datasets(self, env: ProducerEnv) -> Sequence[tuple[str, str]]:
        """Returns its queues as OpenLineage datasets, namespace and name; makes no request.

        :raises BroadwayError: If the connection is missing.
        """
        return []

    def count_interval(self, env: ProducerEnv) -> int | None:
        """Returns an upper bound of the messages in the environment's interval; receives none.

        :returns: ``None`` if unknown.
        """
        return None

    def dead_letters(self, env: ProducerEnv, *, place: str | None = None) -> DeadLetters:
        """Opens this producer's dead-letter queue or topic, for administration.

        :param place: Another queue or topic to open.
        :raises ProducerError: If there is none, or its name is unknown.
        """
        raise ProducerError(f"{type(self).__name__} has no dead letters that can be looked at")

    def sent_back_as(self, message: Message) -> str | None:
        """Returns the id that a requeued message had as a dead letter, if the broker assigned a new
        one on requeue.
        """
        return None

    def identity_of(self, message: Message) -> str | None:
        """Returns a digest of the identity that its publisher has given a received message.

        :returns: ``None`` if it has none, or if the broker's id is its identity.
        """
        source = self.message_identity
        if source is None:
            return None
        if source.startswith("/"):
            return digest(source, payload_value(message.data, source))
        return digest(source, self.header_of(message, source.removeprefix(HEADER)))

    def header_of(self, message: Message, name: str) -> Any:
        """Returns a header or attribute of a received message; ``None`` if it is missing."""
        return (message.metadata.get("attributes") or {}).get(name)

    def enqueued_at(self, message: Message) -> datetime | None:
        """Returns when the broker enqueued a received message; ``None`` if unknown."""
        if not self.sent_at:
            return None
        value: Any = message.metadata
        for name in self.sent_at:
            # Checking for a Mapping costs three times as much as checking for a dict.
            is_mapping = type(value) is dict or isinstance(value, Mapping)
            value = value.get(name) if is_mapping else None
        if type(value) is str:
            return _parse_timestamp(value)
        # Brokers use Unix time, in seconds or in milliseconds.
        if type(value) is not int or value <= 0:
            return None
        return _EPOCH + timedelta(milliseconds=value if value >= _MILLISECONDS else value * 1000)

    def shards(self) -> Sequence[Producer]:
        """Returns the producers, one per queue, whose depths add up to this one's."""
        return [self]

    def unsafe_options(self) -> Sequence[str]:
        """Returns the options by which the client may read a file, load a library or run a command.
        A process that runs no user code refuses them.
        """
        return ()

    def prepare_for_start(self, pipeline: Any) -> Mapping[str, Any]:
        """Called once, in every process, when a pipeline with this producer has been built.

        May validate the pipeline as a whole (by raising :class:`OptionsError`), and may return
        options that replace the pipeline's own; they are validated like any others.
        """
        return {}

    def verdict(self, message: Message, *, failed: bool, stage: str) -> Verdict:
        """Returns the verdict on a message that succeeded or failed: :meth:`judge` of its facts.
        The message's own ack configuration takes precedence.
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
        verdict = self.judge(tuple.__new__(Facts, facts))  # half the cost of calling the class
        exception = message.status.exception if failed else ""
        return verdict._replace(exception=exception) if exception else verdict

    def is_dead_letter(self, verdict: Verdict) -> bool:
        """Returns whether a verdict dead-letters its message."""
        return verdict.action is Action.DEAD_LETTER

    def judge(self, facts: Facts) -> Verdict:
        """Returns the verdict by plain facts; the only decision, at every stage and in every task.

        A producer that overrides it uses ``facts`` alone, and acks only names that ``actions`` maps
        to an ack.
        """
        return decide(self.actions[facts.name], facts, self.retry)
