"""Declares the options of the Pub/Sub producer; does not import the client."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import (
    AUTO,
    BOOL,
    CONN_ID,
    SECONDS,
    SECONDS_OR_ZERO,
    TEXT,
    Rule,
    between,
    matching,
)
from airflow_broadway.producers.engine.producer import BrokerProducer
from airflow_broadway.producers.pubsub import limits

#: The environment variable of Google's own libraries.
EMULATOR: Final = "PUBSUB_EMULATOR_HOST"
#: The default connection; without it Application Default Credentials are used.
DEFAULT_CONNECTION: Final = "google_cloud_default"

#: Google's rule for the ids of subscriptions and topics.
_ID = r"(?!goog)[A-Za-z][A-Za-z0-9\-_.~+%]{2,254}"
#: Google's rule for project ids; those of a domain have a colon.
_PROJECT = r"(?:[a-z0-9.\-]+:)?[a-z][a-z0-9\-]{4,28}[a-z0-9]"
_DEADLINES: Final = limits.SHORTEST_DEADLINE, limits.LONGEST_DEADLINE
_NACK = re.compile(r"nack\((\d{1,3})\)")


def _named(kind: str) -> Rule:
    """Returns the rule for a subscription or a topic, by id or full name."""
    return matching(
        rf"projects/{_PROJECT}/{kind}s/{_ID}|{_ID}",
        f"a {kind}: its id, or 'projects/PROJECT/{kind}s/ID'; an id has 3 to 255 letters, digits"
        " and -_.~+%, begins with a letter, and not with 'goog'",
    )


_ENDPOINT = matching(
    r"(?:http://)?[^\s/@?#]+",
    "a host and a port, such as 'europe-west1-pubsub.googleapis.com:443', or of an emulator"
    " 'http://127.0.0.1:8085'",
)
_ACTION = Rule(
    "an action of this producer",
    lambda v: isinstance(v, str) or (isinstance(v, (tuple, list)) and len(v) == 2),
)


class _Actions(Mapping[str, Action]):
    """The actions by name, including ``nack(30)``, the text form of ``("nack", 30)``."""

    _named: Final = {**BrokerProducer.actions, "nack": Action.RETRY}

    def __getitem__(self, name: str) -> Action:
        nack = _NACK.fullmatch(name)
        if nack is not None and int(nack.group(1)) <= limits.LONGEST_DEADLINE:
            return Action.RETRY
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)


@options
class PubSubProducer(BrokerProducer):
    """The producer for a pull subscription of Google Cloud Pub/Sub; see ``docs/pubsub.md``.

    ``on_success`` and ``on_failure`` accept Broadway's values: ``"ack"``; ``"noop"``, which
    redelivers the message after its lease; ``"nack"`` and ``("nack", seconds)``, which redeliver it
    immediately or after the delay, as often as Pub/Sub's own dead-letter policy permits.  In
    addition they accept ``"retry"`` (by the option ``retry``), ``"dead_letter"``, and
    ``"release"``, which redelivers the message immediately and uses up no attempt.
    """

    adapter: ClassVar[str] = "airflow_broadway.producers.pubsub.adapter:PubSubBroker"
    kind: ClassVar[str] = "pubsub"
    #: Cloud Monitoring samples every minute, and a sample is visible up to three minutes later.
    depth_staleness: ClassVar[float] = 240.0
    #: Half of it is delivered while the other half is pulled, so that all pulls are in flight.
    max_fetch: ClassVar[int] = 4000
    actions: ClassVar[Mapping[str, Action]] = _Actions()

    subscription: str = option(
        rule=_named("subscription"),
        doc="``projects/PROJECT/subscriptions/ID``, or the id alone.",
    )
    project_id: str | None = option(
        default=None,
        rule=TEXT.or_none(),
        doc="The project of ids; by default that of the connection, else of the credentials.",
    )
    conn_id: str | None = option(
        default=DEFAULT_CONNECTION,
        rule=CONN_ID.or_none(),
        doc="A connection of type ``google_cloud_platform``; without it Application Default"
        " Credentials.",
    )
    endpoint: str | None = option(
        default=None,
        rule=_ENDPOINT.or_none(),
        doc="Another endpoint than Google's global one, such as a region's; ``http://…`` is"
        " an emulator, without credentials.  By default ``PUBSUB_EMULATOR_HOST``.",
    )
    receive_concurrency: int = option(
        default=4,
        rule=between(1, 100),
        doc="Pulls in flight at a time, and requests that renew and settle messages.",
    )
    max_number_of_messages: int = option(
        default=250,
        rule=between(1, limits.MAX_PULL),
        doc="Messages in one pull, at most.",
    )
    receive_timeout: float = option(
        default=5.0,
        rule=SECONDS,
        doc="How long a pull waits for a message, until the subscription counts as empty.",
    )
    receive_interval: float = option(
        default=5.0,
        rule=SECONDS_OR_ZERO,
        doc="Time from an empty pull to the next one.",
    )
    request_timeout: float = option(
        default=60.0,
        rule=SECONDS,
        doc="How long other requests are retried while Pub/Sub is unreachable.",
    )
    on_success: Any = option(
        default="ack",
        rule=_ACTION,
        doc="The action for a message that succeeded: ``ack``, ``noop``, ``nack``, ``(nack,"
        " seconds)``, ``retry``, ``dead_letter`` or ``release``.",
    )
    on_failure: Any = option(
        default="noop",
        rule=_ACTION,
        doc="The action for a message that failed; the same values.",
    )
    message_ordering: bool = option(
        default=False,
        rule=BOOL,
        doc="Whether messages of one ordering key stay in order.  Must match the subscription.",
    )
    lease: float = option(
        default=AUTO,
        rule=Rule(
            f"seconds from {_DEADLINES[0]} to {_DEADLINES[1]}, what Pub/Sub allows",
            lambda v: type(v) in (int, float) and _DEADLINES[0] <= v <= _DEADLINES[1],
            float,
        ),
        doc="How long messages are held; renewed during the run.",
    )
    dead_letter: str | None = option(
        default=None,
        rule=_named("topic").or_none(),
        doc="The topic for dead letters; ``None``: that of the subscription's dead-letter policy.",
    )
    dead_letter_subscription: str | None = option(
        default=None,
        rule=_named("subscription").or_none(),
        doc="The pull subscription from which dead letters are read; ``None``: the one with"
        " their topic's name.",
    )

    def _resolve(self) -> None:
        super()._resolve()
        self._default("lease", float(limits.LONGEST_DEADLINE))
        wait = self.receive_timeout
        if (
            type(self.lease) in (int, float)
            and type(wait) in (int, float)
            and self.lease < 2 * wait
        ):
            raise OptionsError(
                "PubSubProducer.lease",
                f"at least twice receive_timeout ({wait:g}): it runs from before the pull",
                self.lease,
            )

    def check_action(self, name: str, value: object, path: str) -> str:
        """Converts an action to text: ``("nack", 30)`` to ``nack(30)``, and with 0 to ``nack``."""
        if isinstance(value, (tuple, list)) and len(value) == 2 and value[0] == "nack":
            delay = value[1]
            if type(delay) in (int, float) and math.isfinite(delay) and delay == int(delay):
                value = f"nack({int(delay)})"
        if value == "nack(0)":
            value = "nack"
        if isinstance(value, str) and (value in self.actions or "{{" in value):
            return value
        raise OptionsError(
            path,
            "'ack', 'noop', 'nack', ('nack', seconds) with whole seconds from 0 to"
            f" {limits.LONGEST_DEADLINE}, 'retry', 'dead_letter' or 'release'",
            value,
        )

    def judge(self, facts: Facts) -> Verdict:
        """Returns the verdict on a message; a nack is redelivered after its own delay.

        The number of nacks is limited only by Pub/Sub's dead-letter policy.
        """
        if facts.name.startswith("nack"):
            nack = _NACK.fullmatch(facts.name)
            delay = 0.0 if nack is None else float(nack.group(1))
            return Verdict(Action.RETRY, delay, facts.reason, facts.stage)
        return super().judge(facts)

    # -- derived values ------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """The subscription's name, as in leases and records.

        A short name is resolved by ``project_id``, but not by the connection's project, which may
        change.
        """
        if "/" in self.subscription or self.project_id is None:
            return self.subscription
        return f"projects/{self.project_id}/subscriptions/{self.subscription}"

    def may_publish(self, own: Delivery) -> bool:
        """Returns whether an action may publish; unlike a retry, a nack never does."""
        names = {own.on_success or self.on_success, own.on_failure or self.on_failure}
        return "dead_letter" in names or ("retry" in names and self.retry.dead_letter)

    @property
    def keeps_order(self) -> bool:
        """Whether order is kept per ordering key; the subscription must deliver in order."""
        return self.message_ordering

    def group_of(self, message: Message) -> str | None:
        return (message.metadata.get("orderingKey") or None) if self.message_ordering else None

    def console(self, env: ProducerEnv) -> str | None:
        plain = (self.endpoint or "").startswith("http://")
        if plain or (self.endpoint is None and os.environ.get(EMULATOR)):
            return None  # an emulator has no console
        parts = self.place.split("/")
        if len(parts) != 4:  # the project is unknown without the connection
            return None
        detail = "cloudpubsub/subscription/detail"
        return f"https://console.cloud.google.com/{detail}/{parts[3]}?project={parts[1]}"

    def datasets(self, env: ProducerEnv) -> Sequence[tuple[str, str]]:
        parts = self.place.split("/")
        return [("pubsub", ":".join(["subscription", *(parts[1::2] or parts)]))]

    def sent_back_as(self, message: Message) -> str | None:
        attributes: Mapping[str, str] = message.metadata["attributes"]
        return attributes.get(limits.REQUEUED)
