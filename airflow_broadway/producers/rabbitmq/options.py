"""The options of a RabbitMQ producer, validated while the Dag is parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model import rules
from airflow_broadway.core.model.options import Options, option, options, override

#: The default Airflow connection.
DEFAULT_CONNECTION = "rabbitmq_default"

#: The back-off strategies for reconnecting, by Broadway's names.
BACKOFF_TYPES = ("rand_exp", "exp", "rand", "stop")
#: The default shortest and longest delay, in seconds.
_BACKOFF_MIN, _BACKOFF_MAX = 1.0, 30.0
#: The properties of an AMQP message by their bit, from the highest.
FIELDS = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
#: The values of the option ``metadata``.  Broadway's ``delivery_tag`` is missing: a secured
#: delivery is acknowledged already.
METADATA_FIELDS = (
    *("redelivered", "exchange", "routing_key", "persistent"),
    *(name for name in FIELDS if name not in ("delivery_mode", "expiration")),
)

#: Options that are the same for all producers: tasks and verdicts use the declared ones.
_FOR_ALL = {
    *("concurrency", "merge_options", "message_identity", "rate_limiting", "retry", "transformer")
}


def _has_only_keys(value: object, names: tuple[str, ...]) -> bool:
    return isinstance(value, Mapping) and set(value) <= set(names)


def _is_binding(value: object) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and isinstance(value[0], str)
        and _has_only_keys(value[1], ("routing_key", "arguments"))
    )


def _mapping_rule(names: tuple[str, ...], note: str = "") -> rules.Rule:
    text = f"a mapping with keys of {list(names)}{note}"
    return rules.Rule(text, lambda value: _has_only_keys(value, names)).or_none()


_BINDINGS = rules.Rule(
    "a list of (exchange, {'routing_key': …, 'arguments': …})",
    lambda v: isinstance(v, (tuple, list)) and all(map(_is_binding, v)),
)
_URI = rules.Rule(
    "amqp://host:port/virtual-host without a password: that belongs into an Airflow connection",
    lambda v: (
        isinstance(v, str)
        and v.startswith(("amqp://", "amqps://"))
        and ":" not in v.partition("://")[2].rpartition("@")[0]
    ),
)
_DEAD_LETTER = rules.Rule(
    "a queue's name, or {'exchange': …, 'routing_key': …}",
    lambda v: (isinstance(v, str) and v != "") or _has_only_keys(v, ("exchange", "routing_key")),
)


def backoff_bounds(low: float | None, high: float | None) -> tuple[float, float]:
    """Returns the shortest and longest delay in seconds; a missing one is derived from the other.

    :raises OptionsError: If the lower is above the upper.
    """
    if low is None:
        low = _BACKOFF_MIN if high is None else min(_BACKOFF_MIN, high)
    if high is None:
        high = max(low, _BACKOFF_MAX)
    if low > high:
        raise OptionsError("RabbitMQProducer.backoff_min", f"at most backoff_max ({high})", low)
    return low, high


@options
class Qos(Options):
    """The consumer's prefetch settings."""

    prefetch_count: int = option(
        default=1000,
        rule=rules.POSITIVE,
        doc="The consumer's prefetch count; by default two bundles of 500.",
    )


@options
class RabbitMQOptions(Producer):
    """The options of a :class:`RabbitMQProducer`, and the values derived from them alone.

    Spark drivers, which have Python 3.10 and no RabbitMQ client, load this class too.
    """

    kind: ClassVar[str] = "rabbitmq"
    sent_at: ClassVar[tuple[str, ...]] = ("timestamp",)
    keeps_payload: ClassVar[bool] = True
    renews: ClassVar[bool] = False
    reports_oldest_age: ClassVar[bool] = False
    assigns_ids: ClassVar[bool] = False
    actions: ClassVar[Mapping[str, Action]] = {
        "ack": Action.ACK,
        "reject": Action.DEAD_LETTER,
        "reject_and_requeue": Action.RETRY,
        "reject_and_requeue_once": Action.RETRY,
        "retry": Action.RETRY,
        "dead_letter": Action.DEAD_LETTER,
        "noop": Action.LEAVE,
    }

    queue: str = option(rule=rules.TEXT, doc="The source queue: classic or quorum, not a stream.")
    conn_id: str | None = option(
        default=rules.AUTO,
        rule=rules.CONN_ID.or_none(),
        doc="The Airflow connection, unless ``uri`` is set.",
    )
    uri: str | None = option(
        default=None,
        rule=_URI.or_none(),
        doc="The broker's address without a password, for testing.",
    )
    on_failure: str = option(
        default=rules.AUTO,
        rule=rules.Rule("an action of this producer", lambda v: isinstance(v, str)),
        doc="The action for a message that failed.  A run warns if it is not set.",
    )
    lease: float = option(
        default=21600.0,
        rule=rules.SECONDS,
        doc="How long a run may hold messages, from receiving to settling; not renewed.",
    )
    qos: Qos = option(
        default=Qos(),
        rule=rules.Rule("a Qos", lambda v: isinstance(v, Qos)),
        doc="Prefetching.",
        nested=Qos,
    )
    declare: Mapping[str, Any] | None = option(
        default=None,
        rule=_mapping_rule(("durable", "passive", "arguments")),
        doc="Declares the queue with these arguments before receiving; ``None``: it must exist.",
    )
    bindings: Any = option(
        default=(),
        rule=_BINDINGS,
        doc="Binds the queue to exchanges; the default routing key is ``''``.",
    )
    consume_options: Mapping[str, Any] | None = option(
        default=None,
        rule=_mapping_rule(
            ("consumer_tag", "exclusive", "arguments"), " (no_ack would lose messages)"
        ),
        doc="More arguments of ``basic.consume``.",
    )
    name: str | None = option(
        default=None, rule=rules.TEXT.or_none(), doc="The connection's name in the management UI."
    )
    metadata: Any = option(
        default=(),
        rule=rules.Rule(
            f"a list of {list(METADATA_FIELDS)}",
            lambda v: isinstance(v, (tuple, list)) and all(name in METADATA_FIELDS for name in v),
        ),
        doc="The fields of a message's metadata.",
    )
    after_connect: Callable[[Any], Any] | None = option(
        default=None,
        rule=rules.FUNCTION.or_none(),
        doc="Called with a channel after connecting, before anything is declared:"
        " ``channel.call('queue_declare', queue=…)``.  If it raises, it is retried for"
        " ``reconnect_timeout``.",
    )
    merge_options: Callable[[int], Mapping[str, Any]] | None = option(
        default=None,
        rule=rules.FUNCTION.or_none(),
        doc="Called with the producer's index, from 0; returns the options that differ for"
        " it: see ``docs/rabbitmq.md``.",
    )
    backoff_type: str = option(
        default="rand_exp",
        rule=rules.one_of(*BACKOFF_TYPES),
        doc="How the delay grows between attempts to reconnect; ``stop``: none.",
    )
    backoff_min: float | None = option(
        default=None, rule=rules.SECONDS.or_none(), doc="The shortest such delay; 1."
    )
    backoff_max: float | None = option(
        default=None, rule=rules.SECONDS.or_none(), doc="The longest such delay; 30."
    )
    reconnect_timeout: float = option(
        default=60.0,
        rule=rules.SECONDS,
        doc="After this a run that cannot connect fails.",
    )
    dead_letter: Any = option(
        default=None,
        rule=_DEAD_LETTER.or_none(),
        doc="The target of dead letters; ``None``: ``broadway.dead.<queue>``.",
    )
    max_message_bytes: int = option(
        default=15 * 1024 * 1024,
        rule=rules.POSITIVE,
        doc="A message with a larger body is dead-lettered.  Must fit the broker's"
        " ``max_message_size``.",
    )

    def _resolve(self) -> None:
        self._default("on_failure", "reject_and_requeue")
        super()._resolve()
        self._default("conn_id", DEFAULT_CONNECTION if self.uri is None else None)
        if self.uri is not None and self.conn_id is not None:
            raise OptionsError(
                "RabbitMQProducer.conn_id", "no value with 'uri': use one of the two", self.conn_id
            )
        if self.uri is None and self.conn_id is None:
            raise OptionsError.missing(
                "RabbitMQProducer.conn_id",
                'RabbitMQProducer(conn_id="rabbitmq_default", …), or an address as uri',
            )
        if not any(isinstance(v, str) for v in (self.backoff_min, self.backoff_max)):
            backoff_bounds(self.backoff_min, self.backoff_max)

    # -- of one producer -----------------------------------------------------------------------

    def merged(self, index: int) -> RabbitMQOptions:
        """Returns the options of one producer: these, overridden by those of ``merge_options``.

        :raises OptionsError: If it returns an unknown option, or one that is for all producers.
        """
        if self.merge_options is None:
            return self
        replaced = self.merge_options(index)
        if isinstance(replaced, Mapping):
            for name in _FOR_ALL & replaced.keys():
                raise OptionsError(
                    f"merge_options.{name}", "nothing: it is for all producers", replaced[name]
                )
            for name, other in (("uri", "conn_id"), ("conn_id", "uri")):
                if name in replaced and other not in replaced:
                    replaced = {**replaced, other: None}
            replaced = {**replaced, "merge_options": None}
        merged: RabbitMQOptions = override(self, replaced, "merge_options", rendered=True)
        actions = {name: getattr(merged, name) for name in ("on_success", "on_failure")}
        object.__setattr__(
            merged, "_actions", {name: value for name, value in actions.items() if name in replaced}
        )
        return merged

    @property
    def actions_of_messages(self) -> dict[str, str]:
        """The ``on_success`` and ``on_failure`` that ``merge_options`` sets for this producer."""
        return dict(getattr(self, "_actions", {}))

    def shards(self) -> list[RabbitMQOptions]:
        """Returns the options of the producers, one per source queue."""
        count = self.concurrency if isinstance(self.concurrency, int) else 1
        merged = [self.merged(index) for index in range(count)]
        return list({(shard.queue, shard.uri, shard.conn_id): shard for shard in merged}.values())
