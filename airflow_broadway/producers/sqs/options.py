"""Declares the options of the SQS producer; does not import the client."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final
from urllib.parse import quote

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import (
    AUTO,
    CONN_ID,
    SECONDS,
    SECONDS_OR_ZERO,
    TEXT,
    Rule,
    between,
    matching,
)
from airflow_broadway.producers.engine.producer import BrokerProducer
from airflow_broadway.producers.sqs.limits import LONGEST_VISIBILITY, MAX_BATCH, REQUEUED

log = logging.getLogger(__name__)

#: The default connection; without it boto3's default credentials are used.
DEFAULT_CONNECTION: Final = "aws_default"
#: Broadway's names of a message's system attributes → SQS's.
SYSTEM_ATTRIBUTES: Final = {
    "sender_id": "SenderId",
    "sent_timestamp": "SentTimestamp",
    "approximate_receive_count": "ApproximateReceiveCount",
    "approximate_first_receive_timestamp": "ApproximateFirstReceiveTimestamp",
    "sequence_number": "SequenceNumber",
    "message_deduplication_id": "MessageDeduplicationId",
    "message_group_id": "MessageGroupId",
    "aws_trace_header": "AWSTraceHeader",
}

_NAME: Final = r"[A-Za-z0-9_-]{1,80}|[A-Za-z0-9_-]{1,75}\.fifo"


def _whole(high: int) -> Rule:
    return Rule(
        f"whole seconds from 0 to {high}",
        lambda v: type(v) in (int, float) and 0 <= v <= high and v == int(v),
        float,
    )


_URL = matching(r"(?s)https?://.*", "the URL of a queue, https://… (or http://… of a test server)")
_QUEUE_NAME = matching(
    _NAME, "a queue's name: up to 80 letters, digits, '-' and '_', of a FIFO queue with '.fifo'"
)
_ATTRIBUTES = Rule(
    f"'all' or a list of {sorted(SYSTEM_ATTRIBUTES)}",
    lambda v: (
        v == "all"
        or (isinstance(v, (list, tuple)) and all(name in SYSTEM_ATTRIBUTES for name in v))
    ),
)
_MESSAGE_ATTRIBUTES = Rule(
    "'all' or a list of non-empty names, such as 'kind' or 'trace.*'",
    lambda v: (
        v == "all"
        or (isinstance(v, (list, tuple)) and all(isinstance(name, str) and name for name in v))
    ),
)
_PLACE = matching(rf"(?s)(?:https?://|arn:).*|{_NAME}", "a queue's URL, ARN or name")
_AWS_URL = re.compile(
    r"https://(?:sqs\.([a-z0-9-]+)|([a-z0-9-]+)\.queue)\.(?:amazonaws\.com(?:\.cn)?|api\.aws)/"
)


def region_of(url: str) -> str | None:
    """Parses the region from a queue URL of AWS; ``None`` for other URLs."""
    match = _AWS_URL.match(url)
    return None if match is None else match.group(1) or match.group(2)


#: The hosts of AWS's consoles, by region prefix.
_CONSOLES: Final = {
    "cn-": "amazonaws.cn",
    "us-gov-": "amazonaws-us-gov.com",
    "": "aws.amazon.com",
}


@options
class SqsProducer(BrokerProducer):
    """The producer for an Amazon SQS queue, standard or FIFO; see ``docs/sqs.md``.

    ``on_success`` and ``on_failure`` accept Broadway's values: ``"ack"``, which deletes the
    message, and ``"noop"``, which leaves it to visibility timeout and redrive policy.  In addition
    they accept ``"retry"`` (by the option ``retry``), ``"dead_letter"``, and ``"release"``, which
    makes the message visible immediately and uses up no attempt.  As in Broadway any other text
    means ``"noop"``, here with a warning.
    """

    adapter: ClassVar[str] = "airflow_broadway.producers.sqs.adapter:SqsBroker"
    kind: ClassVar[str] = "sqs"
    sent_at: ClassVar[tuple[str, ...]] = ("attributes", "sent_timestamp")
    reports_oldest_age: ClassVar[bool] = False

    queue_url: str | None = option(
        default=None, rule=_URL.or_none(), doc="The queue's URL; or ``queue_name``."
    )
    queue_name: str | None = option(
        default=None,
        rule=_QUEUE_NAME.or_none(),
        doc="The queue's name, looked up in the connection's account.",
    )
    conn_id: str | None = option(
        default=DEFAULT_CONNECTION,
        rule=CONN_ID.or_none(),
        doc="A connection of type ``aws``; without it boto3's default credentials.",
    )
    region_name: str | None = option(
        default=None,
        rule=TEXT.or_none(),
        doc="The AWS region; that of ``queue_url``, else of the connection.",
    )
    endpoint_url: str | None = option(
        default=None,
        rule=_URL.or_none(),
        doc="Another endpoint than AWS's; by default the connection's, else the host of a"
        " ``queue_url`` that is not AWS's own.",
    )
    receive_concurrency: int = option(
        default=10,
        rule=between(1, 100),
        doc="Receives in flight at a time, and requests that renew and settle messages.",
    )
    max_number_of_messages: int = option(
        default=10,
        rule=between(1, MAX_BATCH),
        doc="Messages in one receive, at most.",
    )
    wait_time_seconds: float | None = option(
        default=None,
        rule=_whole(20).or_none(),
        doc="How long a receive waits for a message; ``None``: the queue's setting.",
    )
    visibility_timeout: float | None = option(
        default=None,
        rule=_whole(LONGEST_VISIBILITY).or_none(),
        doc="The lease under its name in SQS.",
    )
    receive_interval: float = option(
        default=5.0,
        rule=SECONDS_OR_ZERO,
        doc="Time from an empty receive to the next one.",
    )
    attribute_names: Any = option(
        default=None,
        rule=_ATTRIBUTES.or_none(),
        doc="System attributes in a message's metadata.",
    )
    message_attribute_names: Any = option(
        default=None,
        rule=_MESSAGE_ATTRIBUTES.or_none(),
        doc="Message attributes in its metadata: ``all``, names, or prefixes (``trace.*``).",
    )
    on_failure: str = option(
        default="noop",
        rule=Rule("an action of this producer", lambda v: isinstance(v, str)),
        doc="The action for a message that failed; the values of ``on_success``.",
    )
    lease: float = option(
        default=AUTO,
        rule=SECONDS,
        doc="Seconds for which messages are held, at most 43,200; renewed during the run,"
        " up to 12 hours from receipt.  ``visibility_timeout``, else 900.",
    )
    dead_letter: str | None = option(
        default=None,
        rule=_PLACE.or_none(),
        doc="The queue for dead letters; ``None``: that of the redrive policy.",
    )

    def _resolve(self) -> None:
        super()._resolve()
        url, timeout, wait = self.queue_url, self.visibility_timeout, self.wait_time_seconds
        if url is None and self.queue_name is None:
            raise OptionsError.missing(
                "SqsProducer.queue_url",
                'SqsProducer(queue_name="orders"), or its whole address as queue_url',
            )
        if url is not None:
            self._check("queue_name", None, "no value with 'queue_url': use one of the two")
        self._default("lease", timeout or 900.0)
        if self._is_open():
            return
        region = region_of(url or "")
        if region is not None and self.region_name is not None:
            self._check("region_name", region, f"{region!r}, the region of queue_url")
        if self.lease > LONGEST_VISIBILITY:
            self._check("lease", None, f"at most {LONGEST_VISIBILITY} seconds, SQS's 12 hours")
        if isinstance(wait, (int, float)) and self.lease < 2 * wait and timeout != 0:
            rule = f"at least twice wait_time_seconds ({wait:g}): it runs from before the long poll"
            self._check("lease", None, rule)
        if timeout:
            self._check("lease", timeout, f"{timeout:g}, as visibility_timeout: they are one")

    def _check(self, name: str, allowed: Any, rule: str) -> None:
        value = getattr(self, name)
        if value != allowed:
            raise OptionsError(f"SqsProducer.{name}", rule, value)

    def _is_open(self) -> bool:
        """Returns whether an option is still a Jinja template."""
        values = (self.queue_url, self.region_name, self.lease, self.visibility_timeout)
        return any(isinstance(value, str) and "{{" in value for value in values)

    def check_action(self, name: str, value: object, path: str) -> str:
        """Returns ``value``, or ``noop`` for any other text, as Broadway's SQS producer does."""
        if not isinstance(value, str) or value in self.actions or "{{" in value:
            return super().check_action(name, value, path)
        near = difflib.get_close_matches(value, self.actions, n=1)
        log.warning(
            "%s=%r is no action of SqsProducer (%s) and means 'noop', as in Broadway%s",
            path,
            value,
            ", ".join(self.actions),
            f"; did you mean {near[0]!r}?" if near else "",
        )
        return "noop"

    # -- derived values ------------------------------------------------------------------------

    @property
    def fifo(self) -> bool:
        """Whether the queue is a FIFO queue: AWS requires the suffix ``.fifo``."""
        return (self.queue_url or self.queue_name or "").endswith(".fifo")

    @property
    def place(self) -> str:
        """The queue's URL or name, as in leases and records."""
        return str(self.queue_url or self.queue_name)

    @property
    def keeps_order(self) -> bool:
        """Whether order is kept per message group: only in a FIFO queue."""
        return self.fifo

    def group_of(self, message: Message) -> str | None:
        attributes = message.metadata.get("attributes") or {}
        return str(attributes.get("message_group_id", "")) if self.fifo else None

    def header_of(self, message: Message, name: str) -> Any:
        # Of all attributes, also those that are not in the metadata.
        attributes = json.loads(message.acknowledger.data.properties or "{}").get("attributes", {})
        value = attributes.get(name) or {}
        return value.get("string_value") or value.get("binary_value")

    def console(self, env: ProducerEnv) -> str | None:
        url, region = self.queue_url or "", region_of(self.queue_url or "")
        if region is None:  # another server than AWS, or an unknown account
            return None
        kind = next((prefix for prefix in _CONSOLES if region.startswith(prefix)), "")
        host = f"{region}.console.{_CONSOLES[kind]}"
        return f"https://{host}/sqs/v3/home?region={region}#/queues/{quote(url, safe='')}"

    def datasets(self, env: ProducerEnv) -> Sequence[tuple[str, str]]:
        server, _, path = self.place.rpartition("://")[2].partition("/")
        return [(f"sqs://{server}", path)] if path else [("sqs", self.place)]

    def sent_back_as(self, message: Message) -> str | None:
        properties = message.acknowledger.data.properties or ""
        if REQUEUED not in properties:
            return None
        mark = json.loads(properties).get("attributes", {}).get(REQUEUED, {})
        return mark.get("string_value") or None
