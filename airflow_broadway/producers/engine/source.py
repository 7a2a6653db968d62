"""The half that receives: in the run's own thread, for one generation."""

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
from airflow_broadway.core.text import many
from airflow_broadway.producers.engine.polls import Polls
from airflow_broadway.producers.engine.port import Answer, Broker, Hidden, Received, Refusal
from airflow_broadway.producers.engine.receipts import Earlier, ReceiptsFolder
from airflow_broadway.producers.engine.requests import BatchRequests
from airflow_broadway.producers.engine.settlement import REMOVES
from airflow_broadway.producers.kit.state_files import instant_of

log = logging.getLogger(__name__)

#: Seconds for which a receive waits for more messages after its first; longer where their receipts
#: are written to a file.
_GATHER_TIMEOUT, _GATHER_TIMEOUT_FILES = 0.05, 1.0
#: The part of a lease after which what waits in this process is renewed before it is handed out.
_STALE_PART: Final = 0.3
#: A larger demand is handed out in halves: one while the other is on its way.
_LARGEST_WHOLE_DEMAND: Final = 200
#: Seconds for which the broker may be out of reach before the run ends with an error, and between
#: tries.
_OUTAGE_TIMEOUT, _RECEIVE_AGAIN_INTERVAL = 60.0, 2.0
#: Seconds between two looks at why a queue seems empty though it may not be.
_EMPTY_CHECK_INTERVAL: Final = 60.0
#: The least seconds worth sleeping.
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
        self._events = tuple(f"{self._span}.{end}" for end in ("start", "stop", "exception"))
        #: Received and not handed out yet, each with the timestamp from which it is hidden.
        self._ready: list[tuple[float, Received]] = []
        #: Groups of which one was lost here before it was handed out: what follows it waits too.
        self._overtaken: set[str] = set()
        #: Receipts of messages that are not for this run any more: released at the end.
        self._spare: dict[str, str] = {}
        #: Handed out by the last receive, not yet secured.
        self._unsecured: tuple[dict[str, str], dict[str, str], float] | None = None
        #: Messages secured: all that the generation holds.
        self._secured = 0
        self._gather = _GATHER_TIMEOUT_FILES if self._folder.durable else _GATHER_TIMEOUT
        self._position = 0
        self._full = False
        self._trouble: float | None = None
        self._look_at = 0.0
        self._stopped = False
        self._closed = False

    @property
    def lease(self) -> Lease:
        receipts = self._receipts
        until, since = receipts.until, receipts.since
        if until is None:  # what holds nothing cannot lapse
            until = self._clock.now().timestamp() + self._seconds
        return Lease(
            kind=self._broker.kind,
            generation=self._env.generation,
            seconds=self._broker.lease,
            deadline=instant_of(until),
            owner=dict(self._env.owner),
            state={
                "queue": self._broker.place,
                "messages": self._secured,
                "since": None if since is None else instant_of(since).isoformat(),
            },
        )

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        if self._receipts.report is not None:
            raise self._lapsed()
        if demand < 1 or self._stopped:
            return []
        self._take_back_unsecured()
        end = self._clock.monotonic() + timeout
        while True:
            self._collect(demand, end)
            if not self._ready:
                if not self._env.stopping():
                    self._look_at_empty()
                return []
            messages = self._messages(demand)
            if messages:  # not only such as this run knows already
                return messages

    def _look_at_empty(self) -> None:
        """Explains once in a while why nothing comes though the queue is not empty."""
        now = self._clock.monotonic()
        if self._polls.quiet and not self._full and now >= self._look_at:
            self._look_at = now + _EMPTY_CHECK_INTERVAL
            self._broker.explain_empty()

    def _fetch(self, count: int) -> Answer:
        """Makes one receive, in a span of its own; in any thread."""
        if not telemetry.handlers(*self._events):
            return self._broker.receive(count)
        most = min(count, self._broker.max_fetch)
        about = {"name": self._env.pipeline, "demand": count, "max_messages": most}
        span = telemetry.Span(self._span, about)
        try:
            answer = self._broker.receive(count)
        except Exception as error:
            span.exception("error", error, "")
            raise
        span.stop({**about, "messages": [message.raw for message in answer.messages]})
        return answer

    def _collect(self, demand: int, end: float) -> None:
        """Waits for messages until ``end``, or until enough are there.

        A run that is to stop does not wait: what is in flight is for :meth:`stop`.
        """
        clock, polls = self._clock, self._polls
        gathering: float | None = None
        # Of a large demand a half is handed out while the other half is on its way.
        enough = demand if demand <= _LARGEST_WHOLE_DEMAND else demand // 2
        while len(self._ready) < enough and not self._env.stopping():
            if gathering is not None and clock.monotonic() >= gathering:
                break
            if not self._full:
                polls.want(demand - len(self._ready))
            left = (end if gathering is None else gathering) - clock.monotonic()
            # The queue is called quiet only after receives that found nothing.
            patient = gathering is None and not polls.quiet and not self._full
            answer = self._answer(math.inf if patient else left)
            if answer is not None:
                self._ready += [(answer.at, message) for message in answer.messages]
                gathering = gathering or clock.monotonic() + self._gather
            elif self._trouble is not None:
                clock.sleep(_RECEIVE_AGAIN_INTERVAL)
            elif polls.flying:
                if not patient:  # waited for as long as is left
                    break
            elif left <= 0 or self._ready:
                break
            else:
                clock.sleep(min(left, left if self._full else max(polls.pause, _SHORTEST_SLEEP)))

    def _answer(self, wait: float) -> Answer | None:
        """Returns the next answer; ``None``: none yet, or the broker is out of reach for now."""
        try:
            answer = self._polls.take(max(0.0, wait))
        except self._broker.full as error:
            log.error("%s", error)
            self._full = True
            return None
        except self._broker.ends:
            raise
        except ProducerUnavailable as error:
            now = self._clock.monotonic()
            self._trouble = now if self._trouble is None else self._trouble
            if now - self._trouble >= _OUTAGE_TIMEOUT:
                raise
            log.warning("%s; trying again", error)
            return None
        self._trouble = None
        return answer

    def _messages(self, demand: int) -> list[Message]:
        taken, self._ready = self._ready[:demand], self._ready[demand:]
        if not taken:
            return []
        try:
            return self._sorted(self._still_held(taken))
        except BaseException:  # it goes back at the end
            self._ready[:0] = taken
            raise

    def _sorted(self, taken: list[tuple[float, Received]]) -> list[Message]:
        """Returns the messages that are new to this run."""
        now = self._clock.now()
        receipts, spare = self._receipts, self._spare
        given_back, known = receipts.now, receipts.handles
        fresh: dict[str, Received] = {}
        newer: dict[str, str] = {}
        oldest = now.timestamp()
        for at, message in taken:
            key = message.key
            if key in given_back or key in spare:
                # This run gave it back: kept out of everybody's way until the run has ended.
                spare[key] = message.receipt
                continue
            if key in known and key not in fresh:
                newer[key] = message.receipt
            else:
                fresh[key] = message  # of two receipts in hand, the newer
            oldest = min(oldest, at)
        # Handed out before, it is being handled, and settled by its newest receipt.
        self._hold(newer, {}, oldest)
        made = self._made(fresh, now)
        if not made:
            return []
        handles = {message.message_id: fresh[message.message_id].receipt for message in made}
        groups = {
            key: received.group for key, received in fresh.items() if received.group is not None
        }
        self._unsecured = handles, groups, oldest
        return made

    def _hold(self, handles: dict[str, str], groups: dict[str, str], since: float) -> None:
        """Records receipts, and holds their messages from now on.

        :raises StagingError: If they cannot be written: then they are not held.
        """
        if handles:
            self._receipts.hold(handles, groups, since, since + self._seconds)

    def _still_held(self, taken: list[tuple[float, Received]]) -> list[tuple[float, Received]]:
        """Extends deliveries that have waited here for long; returns those that can be held."""
        now, stale = self._clock.now().timestamp(), _STALE_PART * self._seconds
        if now - taken[0][0] <= stale and not self._overtaken:
            return taken
        old = {message.receipt for at, message in taken if now - at > stale}
        refused = self._hide(((message, message) for message in old), self._seconds) if old else {}
        anew = old - refused.keys()
        taken = self._in_order(taken, refused)
        return [(now if message.receipt in anew else at, message) for at, message in taken]

    def _in_order(
        self, taken: list[tuple[float, Received]], refused: Mapping[str, Refusal]
    ) -> list[tuple[float, Received]]:
        """Drops what was refused and what follows it in its group: both come again."""
        kept = []
        for at, message in taken:
            group, refusal = message.group, refused.get(message.receipt)
            if refusal is not None and group is not None:
                self._overtaken.add(group)
            if refusal is not None and (refusal.gone or group is None):
                continue  # it comes again by itself
            if group in self._overtaken and message.key not in self._receipts.handles:
                self._spare[message.key] = message.receipt  # a refused one too, if hidden still
            else:
                kept.append((at, message))
        return kept

    def _attempts(self, fresh: Mapping[str, Received], now: datetime) -> dict[str, int]:
        """Returns the attempts of those that were delivered before."""
        failures = self._folder.failures
        again = {key for key, message in fresh.items() if message.deliveries > 1}
        if not self._broker.native_attempts:
            # In this order: who settles a lapse meanwhile records it before it ends the generation.
            again |= self._earlier.among(fresh, now)
            counted = failures.of(fresh, now)
            again |= counted.keys()
        elif self._folder.durable:
            counted = failures.of(again, now) if again else {}
        else:  # without records of failures the deliveries stand for them, releases and lapses too
            return {key: fresh[key].deliveries for key in again}
        return {key: counted.get(key, 0) + 1 for key in again}

    def _made(self, fresh: Mapping[str, Received], now: datetime) -> list[Message]:
        attempts = self._attempts(fresh, now)
        made = []
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
                made.append(message)
                self._position += 1
            except Exception as error:  # one that cannot be read fails alone
                self._spare[key] = received.receipt
                log.error(
                    "message %r of the %s %r cannot be read (%s: %s): it is left to the"
                    " queue's redrive policy, and given back when the run ends",
                    *(key, self._broker.queue_word, self._broker.name, type(error).__name__, error),
                )
        return made

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        portion = self._unsecured
        if portion is None or not messages:
            return messages
        self._hold(*portion)
        if self._receipts.is_settled_elsewhere():
            # By a newer execution of this task, or a sweep, which may not have seen what was just
            # written: so it is asked afterwards.
            raise self._lapsed()
        self._unsecured = None
        self._secured += len(portion[0])
        return messages

    def _take_back_unsecured(self) -> None:
        """Marks what was handed out and never secured for release at the end."""
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
        if not self._env.stopping():  # it may take as long as a long poll
            self._ready += self._broker.receive_lost()
        self._take_back_unsecured()
        ready, self._ready = self._ready, []
        newer: dict[str, str] = {}
        for _, message in ready:
            held = message.key in self._receipts.handles and message.key not in self._receipts.now
            (newer if held else self._spare)[message.key] = message.receipt
        self._release_spare()
        # Received again, and settled by their newest receipts.
        self._hold(newer, {}, min((at for at, _ in ready), default=0.0))
        return []

    def _release_spare(self) -> None:
        """Releases what was received and is not held."""
        if not self._spare:
            return
        spare = dict(self._spare)
        try:
            # Done with at once, and delivered all the same: not every broker tells the next run.
            done = [key for key in spare if self._receipts.now.get(key) in REMOVES]
            self._folder.failures.note(dict.fromkeys(done, 0), self._clock.now())
            refused = self._hide(spare.items(), 0)
        except BroadwayError as error:  # tried once more at the very end
            log.warning("Could not give back %s unused: %s", many(len(spare), "message"), error)
            return
        self._spare.clear()
        log.info("Gave back %s unused.", many(len(spare) - len(refused), "message"))

    def _release_late(self, found: Sequence[Received]) -> None:
        """Releases the messages of a receive that was given up; in its own thread.

        What the run holds, delivered again, stays hidden: it is to be settled.
        """
        spare = [message for message in found if message.key not in self._receipts.handles]
        if not spare:
            return
        try:
            entries = ((message.key, Hidden(message.receipt, 0)) for message in spare)
            self._requests.send_alone(self._broker.client.hide, entries)
        except BroadwayError as error:
            log.warning("Could not give back %s unused: %s", many(len(spare), "message"), error)

    def _hide(self, receipts: Iterable[tuple[str, str]], seconds: int) -> dict[str, Refusal]:
        """Hides messages for so long, from now on; returns the refusals.

        :param receipts: The key that a refusal goes by, and the receipt.
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
            if not self._polls.flying:  # else what it finds is still to be given back
                self._broker.close()
            self._folder.close(self._env.generation)
