"""Implements the custody engine's port for SQS: receives, messages, checks and depth."""

from __future__ import annotations

import logging
import math
import uuid
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Delivery, QueueDepth
from airflow_broadway.core.errors import BroadwayError, ProducerError, ProducerUnavailable
from airflow_broadway.core.text import pluralize
from airflow_broadway.producers.engine.port import (
    Answer,
    Broker,
    Contents,
    DeadLetterTarget,
    Denied,
    Received,
)
from airflow_broadway.producers.kit.checks import findings_of_limit
from airflow_broadway.producers.sqs import dead_letters, limits
from airflow_broadway.producers.sqs.client import Queue, count_of, open_queue, redrive_of
from airflow_broadway.producers.sqs.errors import InFlightLimit
from airflow_broadway.producers.sqs.options import SYSTEM_ATTRIBUTES, SqsProducer

log = logging.getLogger(__name__)

_OURS: Final = {theirs: ours for ours, theirs in SYSTEM_ATTRIBUTES.items()}
_NUMBERS: Final = frozenset(
    {"SentTimestamp", "ApproximateReceiveCount", "ApproximateFirstReceiveTimestamp"}
)
#: System attributes that custody itself needs.
_NEEDED: Final = ("ApproximateReceiveCount", "AWSTraceHeader")
_NEEDED_FIFO: Final = (*_NEEDED, "MessageGroupId", "MessageDeduplicationId", "SequenceNumber")
#: The recommended minimum of maxReceiveCount: each release of a failed run counts as a receive.
FEWEST_RECEIVES: Final = 5
_NO_DEAD_LETTER: Final = (
    "there is no queue for dead letters: give the producer dead_letter=…, or the queue {!r} a"
    " redrive policy; until then such messages are redelivered"
)
#: The fields without which a message cannot be held.
_KEYS: Final = ("MessageId", "ReceiptHandle")


class SqsBroker(Broker[Queue]):
    """One queue, standard or FIFO."""

    producer: SqsProducer
    service: ClassVar[str] = "SQS"
    queue_word: ClassVar[str] = "SQS queue"
    max_hide: ClassVar[int] = limits.LONGEST_VISIBILITY
    max_hold: ClassVar[int | None] = limits.LONGEST_VISIBILITY
    max_batch: ClassVar[int] = limits.MAX_BATCH
    kept_days: ClassVar[int] = 14
    full: ClassVar[tuple[type[ProducerError], ...]] = (InFlightLimit,)

    def __init__(self, producer: SqsProducer, env: ProducerEnv) -> None:
        super().__init__(producer, env)
        self.max_fetch = producer.max_number_of_messages
        self.concurrency = producer.receive_concurrency
        self.interval = producer.receive_interval
        self._warned_of_groups = False
        #: FIFO requests whose response was lost; SQS repeats the response when they are retried.
        self._unanswered: deque[dict[str, Any]] = deque()
        #: System attributes and message attributes in a message's metadata; ``None``: all.
        names, own = producer.attribute_names, producer.message_attribute_names
        self._system = None if names == "all" else {SYSTEM_ATTRIBUTES[name] for name in names or ()}
        if self._system is not None and producer.fifo:
            self._system.add("MessageGroupId")
        self._own = None if own == "all" else tuple(own or ())

    def open(self) -> Queue:
        return open_queue(self.producer, self.env)

    # -- receiving -----------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        producer, queue = self.producer, self.client
        findings = []
        if producer.visibility_timeout == 0:
            text = (
                "visibility_timeout=0 hides a message from no consumer, so no run can hold it:"
                " leave it out, or set it to the seconds of a lease"
            )
            findings.append(Finding("error", text))
        try:
            policy = redrive_of(queue.attributes("All"))
        except Denied:
            text = (
                f"GetQueueAttributes is not allowed on {queue.name!r}: its redrive policy cannot be"
                " checked, and its depth not shown"
            )
            return [*findings, Finding("note", text)]
        limit = int(policy.get("maxReceiveCount") or 0)
        findings += findings_of_limit(
            producer,
            limit,
            FEWEST_RECEIVES,
            policy=f"the redrive policy of {queue.name!r}",
            counted=pluralize(limit, "receive"),
            setting="maxReceiveCount",
        )
        if not policy and producer.dead_letter is None and producer.may_publish(Delivery()):
            findings.append(Finding("error", _NO_DEAD_LETTER.format(queue.name)))
        return findings

    def receive(self, count: int) -> Answer:
        at, request = self.clock.now().timestamp(), request_of(self.producer, count)
        if self._unanswered:
            with suppress(IndexError):  # another thread was faster
                request = self._unanswered.popleft()
        return Answer(at, self._receive(request))

    def receive_lost(self) -> list[tuple[float, Received]]:
        """Retries FIFO receives whose response was lost.

        Otherwise the message groups of those messages would be blocked for a lease.  A message that
        is still unreachable becomes visible again after its visibility timeout.
        """
        messages: list[tuple[float, Received]] = []
        with suppress(BroadwayError):
            while self._unanswered:
                at = self.clock.now().timestamp()
                messages += [(at, message) for message in self._receive(self._unanswered.popleft())]
        return messages

    def _receive(self, request: dict[str, Any]) -> list[Received]:
        fifo = self.producer.fifo
        try:
            raw_messages = self.client.receive(request)
        except ProducerUnavailable:
            if fifo:  # SQS may have carried it out, and then its message groups are blocked
                self._unanswered.append(request)
            raise
        received = [
            Received(
                raw["MessageId"],
                raw["ReceiptHandle"],
                raw,
                dead_letters.receives_of(raw),
                dead_letters.group_of(raw) if fifo else None,
            )
            for raw in raw_messages
            if self._is_whole(raw)
        ]
        if fifo and not self._warned_of_groups and any(message.group == "" for message in received):
            self._warned_of_groups = True
            log.warning(
                "messages of the FIFO queue %r carry no message group: they count as one group, in"
                " order of arrival; send them with a MessageGroupId",
                self.name,
            )
        return received

    def _is_whole(self, raw: Any) -> bool:
        """Returns whether a message has the fields without which it cannot be held."""
        missing = [name for name in _KEYS if not (isinstance(raw.get(name), str) and raw[name])]
        if missing:
            log.error(
                "a message of the SQS queue %r arrived without %s: it cannot be held, and is"
                " redelivered",
                self.name,
                " or ".join(missing),
            )
        return not missing

    def explain_empty(self) -> None:
        """Logs the reason why a receive was empty though the queue is not.

        With long polling, and for FIFO queues, SQS returns no OverLimit error at the limit of
        in-flight messages: the queue looks empty.
        """
        queue = self.client
        try:
            attributes = queue.attributes("All")
        except BroadwayError:  # it may be denied, and is optional
            return
        visible, hidden = count_of(attributes), count_of(attributes, "NotVisible")
        if not visible:
            return
        if hidden >= limits.IN_FLIGHT:
            log.error(
                "the SQS queue %r looks empty because it has as many messages in flight as it may"
                " have (about %d of %d): about %d more wait until runs settle what they hold",
                queue.name,
                hidden,
                limits.IN_FLIGHT,
                visible,
            )
        elif self.producer.fifo and hidden:
            log.warning(
                "about %s of the FIFO queue %r waiting behind about %d in flight of the same"
                " groups, to come when these are settled",
                pluralize(visible, "message"),
                queue.name,
                hidden,
            )

    def read(self, received: Received) -> Contents:
        raw: Mapping[str, Any] = received.raw
        attributes = dead_letters.received_again(raw.get("MessageAttributes") or {})
        if attributes is not None:  # a requeued dead letter
            raw = {**raw, "MessageAttributes": attributes}
        body = raw["Body"].encode("utf-8", "surrogatepass")
        return Contents(
            body, self.metadata(raw), dead_letters.properties_of(raw), attributes is not None
        )

    def metadata(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns Broadway's metadata, with the attributes selected by the options."""
        attributes = {}
        if self._system is None or self._system:
            for name, value in dead_letters.system_of(raw).items():
                if self._system is None or name in self._system:
                    read = dead_letters.number_of if name in _NUMBERS else dead_letters.as_text
                    attributes[_OURS.get(name, name)] = read(value)
        own = raw.get("MessageAttributes")
        return {
            "message_id": raw["MessageId"],
            "receipt_handle": raw["ReceiptHandle"],
            "md5_of_body": dead_letters.as_text(raw.get("MD5OfBody")),
            "attributes": attributes,
            "message_attributes": {
                name: dead_letters.value_of(value)
                for name, value in own.items()
                if self._own is None or any(_matches(name, pattern) for pattern in self._own)
            }
            if own
            else {},
        }

    # -- settling ------------------------------------------------------------------------------

    def dead_letter_target(self) -> DeadLetterTarget:
        target = self._dead_letter_queue()
        try:
            max_size = target.attributes("MaximumMessageSize").get("MaximumMessageSize")
        except BroadwayError:  # it may be denied, and is optional
            max_size = None
        make = partial(
            dead_letters.letter,
            queue=self.name,
            fifo=target.url.endswith(".fifo"),
            max_bytes=int(max_size or limits.MAX_BODY),
        )
        return DeadLetterTarget(dead_letters.publisher_of(target), make)

    def _dead_letter_queue(self) -> Queue:
        """Opens the dead-letter queue of the option, else of the redrive policy.

        :raises ProducerError: If there is none, or GetQueueAttributes is denied.
        """
        place = self.producer.dead_letter or redrive_of(
            self.client.attributes("RedrivePolicy")
        ).get("deadLetterTargetArn")
        if not place:
            raise ProducerError(_NO_DEAD_LETTER.format(self.name))
        return self.client.other(str(place))

    # -- inspecting ----------------------------------------------------------------------------

    def depth(self) -> QueueDepth | None:
        """Returns the approximate depth of the queue; ``None`` if GetQueueAttributes is denied."""
        try:
            attributes = self.client.attributes("All")
        except Denied as error:
            log.info("The depth of %r is not known: %s", self.name, error)
            return None
        try:
            dead_letter_attributes = self._dead_letter_queue().attributes("All")
        except BroadwayError:  # there is no dead-letter queue, or access is denied
            dead_letter_attributes = {}
        return QueueDepth(
            ready=count_of(attributes),
            delayed=count_of(attributes, "Delayed"),
            leased=count_of(attributes, "NotVisible"),
            dead=count_of(dead_letter_attributes),
            oldest_age=None,
        )

    def dead_letters(self, place: str | None) -> DeadLetters:
        dead = self.client.other(place) if place else self._dead_letter_queue()
        return dead_letters.SqsDeadLetters(self, dead)


def options_of_receive(producer: SqsProducer, demand: int) -> dict[str, Any]:
    """Returns the options of one receive, without unset ones."""
    options = {
        "max_number_of_messages": min(demand, producer.max_number_of_messages, limits.MAX_BATCH),
        "wait_time_seconds": producer.wait_time_seconds,
        "visibility_timeout": producer.visibility_timeout,
        "attribute_names": producer.attribute_names,
        "message_attribute_names": producer.message_attribute_names,
    }
    return {name: value for name, value in options.items() if value is not None}


def request_of(producer: SqsProducer, demand: int) -> dict[str, Any]:
    """Returns the arguments of one ``ReceiveMessage``.

    In addition to the options it requests the visibility timeout, which is the lease, the receive
    count, the attributes that a dead letter keeps, and for a FIFO queue the message group.  A FIFO
    receive that is retried after a lost response gets the same response.
    """
    options = options_of_receive(producer, demand)
    request: dict[str, Any] = {
        "MaxNumberOfMessages": options["max_number_of_messages"],
        "VisibilityTimeout": options.get("visibility_timeout", math.ceil(producer.lease)),
    }
    if "wait_time_seconds" in options:
        request["WaitTimeSeconds"] = int(options["wait_time_seconds"])
    needed = _NEEDED_FIFO if producer.fifo else _NEEDED
    names = options.get("attribute_names", ())
    if names == "all":
        request["MessageSystemAttributeNames"] = ["All"]
    else:
        wanted = dict.fromkeys([*needed, *(SYSTEM_ATTRIBUTES[name] for name in names)])
        request["MessageSystemAttributeNames"] = list(wanted)
    request["MessageAttributeNames"] = ["All"]  # a dead letter keeps all of its attributes
    if producer.fifo:
        request["ReceiveRequestAttemptId"] = uuid.uuid4().hex
    return request


def _matches(name: str, pattern: str) -> bool:
    if pattern in ("All", ".*"):
        return True
    if pattern.endswith(".*"):
        return name.startswith(pattern[:-2])
    return name == pattern
