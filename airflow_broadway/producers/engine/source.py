"""Receives for one generation, in the run's own thread."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from airflow_broadway.core import telemetry
from airflow_broadway.core.custody.findings import enforce
from airflow_broadway.core.custody.protocol import Delivery, Lease
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerUnavailable
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.text import pluralize
from airflow_broadway.producers.engine.polls import Polls
from airflow_broadway.producers.engine.port import Answer, Broker, Hidden, Received, Refusal
from airflow_broadway.producers.engine.receipts import Earlier, ReceiptsFolder
from airflow_broadway.producers.engine.requests import BatchRequests
from airflow_broadway.producers.engine.settlement import REMOVES
from airflow_broadway.producers.kit.state_files import timestamp_of

log = logging.getLogger(__name__)

#: Seconds for which a receive waits for more messages after its first; longer if receipts are
#: written to a file.
_GATHER_TIMEOUT, _GATHER_TIMEOUT_FILES = 0.05, 1.0
#: The fraction of a lease after which a prefetched message is extended before it is delivered.
_STALE_PART: Final = 0.3
#: A larger demand is delivered in halves: one while the other is in flight.
_LARGEST_WHOLE_DEMAND: Final = 200
#: Seconds for which the broker may be unreachable before the run fails, and between attempts.
_OUTAGE_TIMEOUT, _RECEIVE_AGAIN_INTERVAL = 60.0, 2.0
#: Seconds between two explanations of empty receives.
_EMPTY_CHECK_INTERVAL: Final = 60.0
#: The minimum sleep in seconds.
_SHORTEST_SLEEP: Final = 0.02


class EngineSource:
    """Receives for one generation."""

    def __init__(self, broker: Broker[Any]) -> None:
        self._broker, self._env, self._clock = broker, broker.env, broker.clock
        self._seconds = broker.seconds
        try:
            enforce(broker.check(), log)
            self._folder = ReceiptsFolder(broker)
            self._folder.failures.merge(self._clock.now())
            self._receipts = self._folder.open(self._env.generation)
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            broker.close()
            raise
        self._earlier = Earlier(self._folder, self._env.generation)
        self._requests = BatchRequests(broker)
        self._polls = Polls(broker, self._fetch, self._release_late)
        self._span = f"{broker.kind}.receive_messages"
        #: Prefetched messages, each with the timestamp from which it is hidden.
        self._ready: list[tuple[float, Received]] = []
        #: Groups of which a prefetched message was lost: later messages of them are released.
        self._overtaken: set[str] = set()
        #: Receipts of messages that this run does not handle: released at the end.
        self._spare: dict[str, str] = {}
        #: Receipts, groups and timestamp of the last delivered messages, until they are secured.
        self._unsecured: tuple[dict[str, str], dict[str, str], float] | None = None
        #: The number of secured messages.
        self._secured = 0
        self._gather = _GATHER_TIMEOUT_FILES if self._folder.durable else _GATHER_TIMEOUT
        self._position = 0
        self._full = False
        self._outage_began: float | None = None
        self._look_at = 0.0
        self._stopped = False
        self._closed = False

    @property
    def lease(self) -> Lease:
        receipts = self._receipts
        until, since = receipts.until, receipts.since
        if until is None:  # a lease without messages cannot lapse
            until = self._clock.now().timestamp() + self._seconds
        return Lease(
            kind=self._broker.kind,
            generation=self._env.generation,
            seconds=self._broker.lease,
            deadline=timestamp_of(until),
            owner=dict(self._env.owner),
            state={
                "queue": self._broker.place,
                "messages": self._secured,
                "since": None if since is None else timestamp_of(since).isoformat(),
            },
        )

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        if self._receipts.report is not None:
            raise self._lapsed()
        if demand < 1 or self._stopped:
            return []
        self._discard_unsecured()
        end = self._clock.monotonic() + timeout
        while True:
            self._collect(demand, end)
            if not self._ready:
                if not self._env.stopping():
                    self._explain_empty()
                return []
            messages = self._messages(demand)
            if messages:  # otherwise this run has received all of them before
                return messages

    def _explain_empty(self) -> None:
        """Logs, at most once a minute, the reason for empty receives from a non-empty queue."""
        now = self._clock.monotonic()
        if self._polls.quiet and not self._full and now >= self._look_at:
            self._look_at = now + _EMPTY_CHECK_INTERVAL
            self._broker.explain_empty()

    def _fetch(self, count: int) -> Answer:
        """Makes one receive in a telemetry span; called in any thread."""
        if not telemetry.observed(self._span):
            return self._broker.receive(count)
        limit = min(count, self._broker.max_fetch)
        fields = {"name": self._env.pipeline, "demand": count, "max_messages": limit}
        span = telemetry.Span(self._span, fields)
        try:
            answer = self._broker.receive(count)
        except Exception as error:
            span.exception("error", error, "")
            raise
        span.stop({**fields, "messages": [message.raw for message in answer.messages]})
        return answer

    def _collect(self, demand: int, end: float) -> None:
        """Waits for messages until ``end``, or until enough have arrived.

        A run that is stopping does not wait: :meth:`stop` collects the receives in flight.
        """
        clock, polls = self._clock, self._polls
        gathering: float | None = None
        # Half of a large demand is delivered while the other half is in flight.
        enough = demand if demand <= _LARGEST_WHOLE_DEMAND else demand // 2
        while len(self._ready) < enough and not self._env.stopping():
            if gathering is not None and clock.monotonic() >= gathering:
                break
            if not self._full:
                polls.want(demand - len(self._ready))
            left = (end if gathering is None else gathering) - clock.monotonic()
            # The queue counts as quiet only after empty receives.
            patient = gathering is None and not polls.quiet and not self._full
            count = 1 if gathering is None else enough - len(self._ready)
            answers = self._answers(math.inf if patient else left, count)
            if answers:
                self._ready += [(a.at, message) for a in answers for message in a.messages]
                gathering = gathering or clock.monotonic() + self._gather
            elif self._outage_began is not None:
                clock.sleep(_RECEIVE_AGAIN_INTERVAL)
            elif polls.flying:
                if not patient:  # the remaining time is over
                    break
            elif left <= 0 or self._ready:
                break
            else:
                clock.sleep(min(left, left if self._full else max(polls.pause, _SHORTEST_SLEEP)))

    def _answers(self, wait: float, count: int) -> list[Answer]:
        """Returns answers of ``count`` messages; fewer if there are none yet, or an outage."""
        try:
            answers = self._polls.take(max(0.0, wait), count)
        except self._broker.full as error:
            log.error("%s", error)
            self._full = True
            return []
        except self._broker.ends:
            raise
        except ProducerUnavailable as error:
            now = self._clock.monotonic()
            self._outage_began = now if self._outage_began is None else self._outage_began
            if now - self._outage_began >= _OUTAGE_TIMEOUT:
                raise
            log.warning("%s; trying again", error)
            return []
        self._outage_began = None
        return answers

    def _messages(self, demand: int) -> list[Message]:
        taken, self._ready = self._ready[:demand], self._ready[demand:]
        if not taken:
            return []
        try:
            return self._new_messages(self._extend_stale(taken))
        except BaseException:  # they are released at the end; re-raised
            self._ready[:0] = taken
            raise

    def _new_messages(self, taken: list[tuple[float, Received]]) -> list[Message]:
        """Returns the messages that are new to this run."""
        now = self._clock.now()
        receipts, spare = self._receipts, self._spare
        settled_now, known = receipts.now, receipts.handles
        fresh: dict[str, Received] = {}
        newer: dict[str, str] = {}
        oldest = now.timestamp()
        for at, message in taken:
            key = message.key
            if key in settled_now or key in spare:
                # This run has released it: hidden from other consumers until the run ends.
                spare[key] = message.receipt
                continue
            if key in known and key not in fresh:
                newer[key] = message.receipt
            else:
                fresh[key] = message  # the newer of two receipts
            oldest = min(oldest, at)
        # Messages in progress are settled by their newest receipt.
        self._hold(newer, {}, oldest)
        messages = self._to_messages(fresh, now)
        if not messages:
            return []
        handles = {message.message_id: fresh[message.message_id].receipt for message in messages}
        groups = {
            key: received.group for key, received in fresh.items() if received.group is not None
        }
        self._unsecured = handles, groups, oldest
        return messages

    def _hold(self, handles: dict[str, str], groups: dict[str, str], since: float) -> None:
        """Records receipts, and holds their messages from now on.

        :raises StagingError: If they cannot be written; the messages are then not held.
        """
        if handles:
            self._receipts.hold(handles, groups, since, since + self._seconds)

    def _extend_stale(self, taken: list[tuple[float, Received]]) -> list[tuple[float, Received]]:
        """Extends prefetched messages that have waited long; returns those that are still held."""
        now, stale = self._clock.now().timestamp(), _STALE_PART * self._seconds
        if now - taken[0][0] <= stale and not self._overtaken:
            return taken
        old = {message.receipt for at, message in taken if now - at > stale}
        refused = self._hide(((message, message) for message in old), self._seconds) if old else {}
        extended = old - refused.keys()
        taken = self._keep_order(taken, refused)
        return [(now if message.receipt in extended else at, message) for at, message in taken]

    def _keep_order(
        self, taken: list[tuple[float, Received]], refused: Mapping[str, Refusal]
    ) -> list[tuple[float, Received]]:
        """Drops refused messages and those that follow in their group; all are redelivered."""
        rest = []
        for at, message in taken:
            group, refusal = message.group, refused.get(message.receipt)
            if refusal is not None and group is not None:
                self._overtaken.add(group)
            if refusal is not None and (refusal.invalid or group is None):
                continue  # the broker redelivers it
            if group in self._overtaken and message.key not in self._receipts.handles:
                self._spare[message.key] = message.receipt  # also a refused one, if still hidden
            else:
                rest.append((at, message))
        return rest

    def _attempts(self, fresh: Mapping[str, Received], now: datetime) -> dict[str, int]:
        """Returns the attempts of redelivered messages."""
        failures = self._folder.failures
        again = {key for key, message in fresh.items() if message.deliveries > 1}
        if not self._broker.native_attempts:
            # In this order: the settlement of a lapse is recorded before the generation ends.
            again |= self._earlier.among(fresh, now)
            counted = failures.of(fresh, now)
            again |= counted.keys()
        elif self._folder.durable:
            counted = failures.of(again, now) if again else {}
        else:  # without records of failures, deliveries count, including releases and lapses
            return {key: fresh[key].deliveries for key in again}
        return {key: counted.get(key, 0) + 1 for key in again}

    def _to_messages(self, fresh: Mapping[str, Received], now: datetime) -> list[Message]:
        attempts = self._attempts(fresh, now)
        messages = []
        for key, received in fresh.items():
            try:
                data, metadata, properties, requeued = self._broker.read(received)
                delivery = Delivery(payload=data, properties=properties)
                message = Message(
                    data,
                    metadata=metadata,
                    acknowledger=AckRef(None, self._env.generation, delivery),
                    message_id=key,
                    attempt=attempts.get(key, 1),
                    redelivered=requeued or key in attempts,
                    received_at=now,
                    position=self._position,
                    size=len(data),
                )
                messages.append(message)
                self._position += 1
            except Exception as error:  # a malformed message fails alone
                self._spare[key] = received.receipt
                log.error(
                    "message %r of the %s %r cannot be read (%s: %s): it is left to the"
                    " queue's redrive policy, and released when the run ends",
                    *(key, self._broker.queue_word, self._broker.name, type(error).__name__, error),
                )
        return messages

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        portion = self._unsecured
        if portion is None or not messages:
            return messages
        self._hold(*portion)
        if self._receipts.is_settled_elsewhere():
            # A newer execution of this task, or a sweep, may have missed the portion just written,
            # so this is checked after the write.
            raise self._lapsed()
        self._unsecured = None
        self._secured += len(portion[0])
        return messages

    def _discard_unsecured(self) -> None:
        """Marks delivered messages that were never secured for release at the end."""
        portion, self._unsecured = self._unsecured, None
        if portion is not None:
            self._spare.update(portion[0])

    def _lapsed(self) -> LeaseLapsed:
        return LeaseLapsed(
            f"generation {self._env.generation} was settled while it still received: a newer"
            " execution of its task, or a sweep, gave its messages back"
        )

    # -- the end -------------------------------------------------------------------------------

    def stop(self) -> Sequence[Message]:
        if self._stopped:
            return []
        self._stopped = True
        for answer in self._polls.close():
            self._ready += [(answer.at, message) for message in answer.messages]
        if not self._env.stopping():  # this may take as long as a long poll
            self._ready += self._broker.receive_lost()
        self._discard_unsecured()
        ready, self._ready = self._ready, []
        newer: dict[str, str] = {}
        for _, message in ready:
            held = message.key in self._receipts.handles and message.key not in self._receipts.now
            (newer if held else self._spare)[message.key] = message.receipt
        self._release_spare()
        # Messages received again are settled by their newest receipts.
        self._hold(newer, {}, min((at for at, _ in ready), default=0.0))
        return []

    def _release_spare(self) -> None:
        """Releases received messages that are not held."""
        if not self._spare:
            return
        spare = dict(self._spare)
        try:
            # Settled immediately, and redelivered all the same: not every broker counts this.
            done = [key for key in spare if self._receipts.now.get(key) in REMOVES]
            self._folder.failures.note(dict.fromkeys(done, 0), self._clock.now())
            refused = self._hide(spare.items(), 0)
        except BroadwayError as error:  # retried by close()
            log.warning("Could not release %s unused: %s", pluralize(len(spare), "message"), error)
            return
        self._spare.clear()
        log.info("Gave back %s unused.", pluralize(len(spare) - len(refused), "message"))

    def _release_late(self, messages: Sequence[Received]) -> None:
        """Releases the messages of an abandoned receive, in its own thread.

        Redelivered messages that the run holds stay hidden until they are settled.
        """
        spare = [message for message in messages if message.key not in self._receipts.handles]
        if not spare:
            return
        try:
            entries = ((message.key, Hidden(message.receipt, 0)) for message in spare)
            self._requests.send_alone(self._broker.client.hide, entries)
        except BroadwayError as error:
            log.warning("Could not release %s unused: %s", pluralize(len(spare), "message"), error)

    def _hide(self, receipts: Iterable[tuple[str, str]], seconds: int) -> dict[str, Refusal]:
        """Hides messages for some seconds from now; returns the refusals.

        :param receipts: Receipts, each with the key for its refusal.
        """
        entries = ((key, Hidden(receipt, seconds)) for key, receipt in receipts)
        return self._requests.send(self._broker.client.hide, entries)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.stop()
            self._release_spare()
        except BroadwayError as error:
            log.warning("Could not note newer receipts: %s", error)
        finally:
            self._requests.close()
            if not self._polls.flying:  # otherwise its messages are still to be released
                self._broker.close()
            self._folder.close(self._env.generation)
