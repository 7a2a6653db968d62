"""The half that receives: in the run's own thread, for one generation."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core import telemetry
from airflow_broadway.core.custody import Delivery, Lease
from airflow_broadway.core.errors import (
    BroadwayError,
    LeaseLapsed,
    ProducerError,
    ProducerUnavailable,
)
from airflow_broadway.core.message import AckRef, Message
from airflow_broadway.producers.sqs.book import (
    KEPT_FAILURES,
    KEPT_REPORTS,
    Shelf,
    day_of,
)
from airflow_broadway.producers.sqs.bulk import Bulk
from airflow_broadway.producers.sqs.client import open_queue
from airflow_broadway.producers.sqs.errors import Expired, InFlightLimit
from airflow_broadway.producers.sqs.looking import check
from airflow_broadway.producers.sqs.polling import Answer, Polls
from airflow_broadway.producers.sqs.receiving import Reader, properties_of, request_of

if TYPE_CHECKING:
    from airflow_broadway.core.producer import ProducerEnv
    from airflow_broadway.producers.sqs.producer import SqsProducer

__all__ = ["SqsSource"]

log = logging.getLogger(__name__)

#: Seconds for which a receive gathers, after its first message, what comes within its demand: a
#: portion of receipts is a file, where they are written down.
_GATHER, _GATHER_FILES = 0.05, 1.0
#: The part of a lease after which what waits in this process is renewed before it is handed out.
_STALE: Final = 0.3
#: Messages up to which a demand is handed out whole.
_SMALL: Final = 200
#: Seconds for which SQS may be out of reach before the run ends with an error, and between tries.
_OUTAGE, _AGAIN = 60.0, 2.0
#: The least seconds worth sleeping.
_TICK: Final = 0.02


class SqsSource:
    """Receives for one generation."""

    def __init__(self, producer: SqsProducer, env: ProducerEnv) -> None:
        if producer.visibility_timeout == 0:
            raise ProducerError(
                "visibility_timeout=0 hides a message from nobody, so no run can hold it: leave it"
                " out, or give the seconds of a lease"
            )
        self._producer = producer
        self._env = env
        self._clock = env.clock
        self._queue = open_queue(producer, env)
        try:
            check(producer, self._queue)
        except BaseException:
            self._queue.close()
            raise
        self._shelf = Shelf(env.staging, producer.place)
        self._book = self._shelf.open(env.generation, day_of(env.clock.now(), before=KEPT_REPORTS))
        self._reader = Reader(producer)
        self._polls = Polls(
            self._receive_some,
            most=producer.max_number_of_messages,
            concurrency=producer.receive_concurrency,
            interval=producer.receive_interval,
            clock=env.clock,
        )
        self._bulk = Bulk(producer.receive_concurrency, env.clock)
        #: Received and not handed out yet, each with the instant it was asked for.
        self._ready: list[tuple[float, Any]] = []
        #: Receipts of messages that are not for this run any more: given back at the end.
        self._spare: dict[str, str] = {}
        #: Handed out by the last receive, not yet secured.
        self._unsecured: tuple[dict[str, str], dict[str, str], float] | None = None
        self._gather = _GATHER_FILES if self._shelf.durable else _GATHER
        self._position = 0
        self._full = False
        self._trouble: float | None = None
        self._told = False
        self._closed = False

    @property
    def lease(self) -> Lease:
        book, producer = self._book, self._producer
        until = book.until
        if until is None:  # what holds nothing cannot lapse
            until = self._clock.now().timestamp() + producer.visibility
        since = book.since
        return Lease(
            kind=producer.kind,
            generation=self._env.generation,
            seconds=producer.lease,
            deadline=_instant(until),
            owner=dict(self._env.owner),
            state={
                "queue": producer.place,
                "messages": self._position,
                "since": None if since is None else _instant(since).isoformat(),
            },
        )

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        if self._book.report is not None:
            raise self._lapsed()
        if demand < 1:
            return []
        end = self._clock.monotonic() + timeout
        while True:
            self._collect(demand, end)
            if not self._ready:
                return []
            messages = self._messages(demand)
            if messages:  # not only such as this run knows already
                return messages

    def _collect(self, demand: int, end: float) -> None:
        """Wait for messages until ``end``, or until those are there that go together."""
        clock, polls = self._clock, self._polls
        gathering: float | None = None
        # Of a large demand a half is handed out while the other half is on its way.
        enough = demand if demand <= _SMALL else demand // 2
        while len(self._ready) < enough:
            if gathering is not None and clock.monotonic() >= gathering:
                break
            if not self._full:
                polls.want(demand - len(self._ready))
            left = (end if gathering is None else gathering) - clock.monotonic()
            # The queue is called quiet only after receives that found nothing.
            patient = gathering is None and not polls.quiet and not self._full
            answer = self._answer(math.inf if patient else left)
            if answer is not None:
                self._ready += [(answer.at, raw) for raw in answer.messages]
                gathering = gathering or clock.monotonic() + self._gather
            elif self._trouble is not None:
                clock.sleep(_AGAIN)
            elif polls.flying:
                if not patient:  # waited for as long as is left
                    break
            elif left <= 0 or self._ready:
                break
            else:
                clock.sleep(min(left, left if self._full else max(polls.pause, _TICK)))

    def _answer(self, wait: float) -> Answer | None:
        """The next answer; ``None`` if there was none, or SQS is out of reach for now."""
        try:
            answer = self._polls.take(max(0.0, wait))
        except InFlightLimit as error:
            log.error("%s", error)
            self._full = True
            return None
        except Expired:
            raise
        except ProducerUnavailable as error:
            now = self._clock.monotonic()
            self._trouble = now if self._trouble is None else self._trouble
            if now - self._trouble >= _OUTAGE:
                raise
            log.warning("%s; trying again", error)
            return None
        self._trouble = None
        return answer

    def _receive_some(self, count: int) -> list[dict[str, Any]]:
        request = request_of(self._producer, count)
        if not telemetry.handlers(*_EVENTS):
            return self._queue.receive(request)
        span = telemetry.Span(_SPAN, {"name": self._env.pipeline, "demand": count})
        try:
            found = self._queue.receive(request)
        except Exception as error:
            span.exception("error", error, "")
            raise
        span.stop({"name": self._env.pipeline, "demand": count, "messages": found})
        return found

    def _messages(self, demand: int) -> list[Message]:
        taken, self._ready = self._ready[:demand], self._ready[demand:]
        if not taken:
            return []
        lease = self._producer.visibility
        taken = self._still_held(taken, lease)
        now = self._clock.now()
        instant = now.timestamp()
        book, spare = self._book, self._spare
        fresh: dict[str, Any] = {}
        newer: dict[str, str] = {}
        oldest = instant
        for at, raw in taken:
            key = raw["MessageId"]
            if key in book.now or key in spare:
                # This run gave it back: kept out of everybody's way until the run has ended.
                spare[key] = raw["ReceiptHandle"]
            elif book.knows(key) and key not in fresh:
                newer[key] = raw["ReceiptHandle"]
                oldest = min(oldest, at)
            else:
                fresh[key] = raw  # of two receipts in hand, the newer
                oldest = min(oldest, at)
        receipts = {key: raw["ReceiptHandle"] for key, raw in fresh.items()}
        groups = self._groups(fresh)
        until = oldest + lease
        if newer:
            # Handed out before: it is being handled, and settled by its newest receipt.
            book.add(newer, {}, oldest, until)
            book.write(newer, {}, oldest, until)
        if not fresh:
            return []
        book.add(receipts, groups, oldest, until)
        self._unsecured = receipts, groups, oldest
        return self._made(fresh, now)

    def _still_held(self, taken: list[tuple[float, Any]], lease: int) -> list[tuple[float, Any]]:
        """``taken`` with what has waited here for long held anew, if it still can be."""
        now = self._clock.now().timestamp()
        if now - taken[0][0] <= _STALE * lease:
            return taken
        receipts = {raw["ReceiptHandle"]: raw for at, raw in taken if now - at > _STALE * lease}
        refused = self._bulk.send(
            self._queue.change,
            ((each, {"ReceiptHandle": each, "VisibilityTimeout": lease}) for each in receipts),
        )
        return [
            (now if raw["ReceiptHandle"] in receipts else at, raw)
            for at, raw in taken
            if raw["ReceiptHandle"] not in refused
        ]

    def _groups(self, fresh: dict[str, Any]) -> dict[str, str]:
        if not self._producer.fifo:
            return {}
        groups = {
            key: raw.get("Attributes", {}).get("MessageGroupId", "") for key, raw in fresh.items()
        }
        if "" in groups.values() and not self._told:
            self._told = True
            log.warning(
                "messages of the FIFO queue %r carry no message group: they count as one group, in"
                " order of arrival; send them with a MessageGroupId",
                self._queue.name,
            )
        return groups

    def _made(self, fresh: dict[str, Any], now: datetime) -> list[Message]:
        counts = {
            key: int(raw.get("Attributes", {}).get("ApproximateReceiveCount", 1))
            for key, raw in fresh.items()
        }
        again = [key for key, count in counts.items() if count > 1]
        failures: dict[str, int] = {}
        if again:
            oldest = day_of(now, before=KEPT_FAILURES)
            failures = self._shelf.failures(again, oldest, now.timestamp())
        # Without notes of failures the receives must stand for them, releases and lapses included.
        durable = self._shelf.durable
        keeps, generation = self._producer.keeps_payload, self._env.generation
        metadata, position = self._reader.metadata, self._position
        plain = AckRef(None, generation, Delivery())
        made = []
        for key, raw in fresh.items():
            body = raw["Body"].encode("utf-8", "surrogatepass")
            count = counts[key]
            made.append(
                Message(
                    body,
                    metadata=metadata(raw),
                    acknowledger=AckRef(
                        None, generation, Delivery(payload=body, properties=properties_of(raw))
                    )
                    if keeps
                    else plain,
                    message_id=key,
                    attempt=1 if count == 1 else failures.get(key, 0) + 1 if durable else count,
                    redelivered=count > 1,
                    received_at=now,
                    position=position,
                    size=len(body),
                )
            )
            position += 1
        self._position = position
        return made

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        portion, self._unsecured = self._unsecured, None
        if portion is None or not messages:
            return messages
        if self._book.ended():
            # A newer execution of this task, or a sweep, has ended the generation meanwhile.
            self._spare.update(portion[0])
            raise self._lapsed()
        receipts, groups, since = portion
        self._book.write(receipts, groups, since, since + self._producer.visibility)
        return messages

    def _lapsed(self) -> LeaseLapsed:
        return LeaseLapsed(
            f"generation {self._env.generation} was settled while it still received: a newer"
            " execution of its task, or a sweep, gave its messages back"
        )

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for answer in self._polls.close():
            self._ready += [(answer.at, raw) for raw in answer.messages]
        unused: dict[str, str] = {}
        newer: dict[str, str] = {}
        for _, raw in self._ready:
            known = self._book.knows(raw["MessageId"]) and raw["MessageId"] not in self._book.now
            (newer if known else unused)[raw["MessageId"]] = raw["ReceiptHandle"]
        unused |= self._spare
        try:
            if newer:  # received again, and settled by their newest receipts
                since = min(at for at, _ in self._ready)
                until = since + self._producer.visibility
                self._book.add(newer, {}, since, until)
                self._book.write(newer, {}, since, until)
            if unused:
                refused = self._bulk.send(
                    self._queue.change,
                    (
                        (key, {"ReceiptHandle": receipt, "VisibilityTimeout": 0})
                        for key, receipt in unused.items()
                    ),
                )
                log.info("Gave back %d messages unused.", len(unused) - len(refused))
        except BroadwayError as error:  # they come back by themselves
            log.warning("Could not give back %d unused messages: %s", len(unused), error)
        self._bulk.close()
        self._queue.close()
        self._shelf.close(self._env.generation)


_SPAN: Final = "sqs.receive_messages"
_EVENTS: Final = tuple(f"{_SPAN}.{end}" for end in ("start", "stop", "exception"))


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
