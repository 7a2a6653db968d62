"""The half that receives: in the run's own thread, for one generation."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import (
    BroadwayError,
    LeaseLapsed,
    ProducerError,
    ProducerUnavailable,
)
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.state_files import day_of
from airflow_broadway.producers.sqs.batch_requests import BatchRequests
from airflow_broadway.producers.sqs.client import open_queue
from airflow_broadway.producers.sqs.errors import Expired, InFlightLimit
from airflow_broadway.producers.sqs.inspect import check, look_at_empty
from airflow_broadway.producers.sqs.polling import Answer, Polls, Receives
from airflow_broadway.producers.sqs.reading import (
    Reader,
    group_of,
    receives_of,
)
from airflow_broadway.producers.sqs.receipts import KEPT_REPORTS, ReceiptsFolder

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.sqs.options import SqsOptions

__all__ = ["SqsSource"]

log = logging.getLogger(__name__)

#: Seconds for which a receive waits for more messages after its first; longer where their receipts
#: are written to a file.
_GATHER_TIMEOUT, _GATHER_TIMEOUT_FILES = 0.05, 1.0
#: The part of a lease after which what waits in this process is renewed before it is handed out.
_STALE_PART: Final = 0.3
#: A larger demand is handed out in halves: one while the other is on its way.
_LARGEST_WHOLE_DEMAND: Final = 200
#: Seconds for which SQS may be out of reach before the run ends with an error, and between tries.
_OUTAGE_TIMEOUT, _RECEIVE_AGAIN_INTERVAL = 60.0, 2.0
#: Seconds between two looks at why a queue seems empty though it may not be.
_EMPTY_CHECK_INTERVAL: Final = 60.0
#: The least seconds worth sleeping.
_SHORTEST_SLEEP: Final = 0.02


class SqsSource:
    """Receives for one generation."""

    def __init__(self, producer: SqsOptions, env: ProducerEnv) -> None:
        _check_visibility(producer)
        self._producer, self._env, self._clock = producer, env, env.clock
        self._queue = open_queue(producer, env)
        try:
            check(producer, self._queue, env.clock)
            self._folder = ReceiptsFolder(env.staging, producer.place)
            self._folder.failures.merge(env.clock.now())
            oldest = day_of(env.clock.now(), before=KEPT_REPORTS)
            self._receipts = self._folder.open(env.generation, oldest)
        except BaseException:  # a kill too; raised again
            self._queue.close()
            raise
        self._reader = Reader(producer, env.generation)
        self._receives = Receives(producer, self._queue, env.pipeline, env.clock)
        self._polls = Polls(
            self._receives.receive,
            most=producer.max_number_of_messages,
            concurrency=producer.receive_concurrency,
            interval=producer.receive_interval,
            clock=env.clock,
            late=self._release_late,
            hurry=env.stopping,
        )
        self._requests = BatchRequests(producer.receive_concurrency, env.clock)
        #: Received and not handed out yet, each with the instant it was asked for.
        self._ready: list[tuple[float, Any]] = []
        #: Receipts of messages that are not for this run any more: given back at the end.
        self._spare: dict[str, str] = {}
        #: Handed out by the last receive, not yet secured.
        self._unsecured: tuple[dict[str, str], dict[str, str], float] | None = None
        #: Messages secured: all that the generation holds.
        self._secured = 0
        self._gather = _GATHER_TIMEOUT_FILES if self._folder.durable else _GATHER_TIMEOUT
        self._position = 0
        self._full = False
        self._trouble: float | None = None
        self._warned_of_groups = False
        self._look_at = 0.0
        self._stopped = False
        self._closed = False

    @property
    def lease(self) -> Lease:
        receipts, producer = self._receipts, self._producer
        until = receipts.until
        if until is None:  # what holds nothing cannot lapse
            until = self._clock.now().timestamp() + producer.visibility
        since = receipts.since
        return Lease(
            kind=producer.kind,
            generation=self._env.generation,
            seconds=producer.lease,
            deadline=_instant(until),
            owner=dict(self._env.owner),
            state={
                "queue": producer.place,
                "messages": self._secured,
                "since": None if since is None else _instant(since).isoformat(),
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
                    self._explain_empty()
                return []
            messages = self._messages(demand)
            if messages:  # not only such as this run knows already
                return messages

    def _explain_empty(self) -> None:
        """Once in a while, say why nothing comes if there is something."""
        now = self._clock.monotonic()
        if self._polls.quiet and not self._full and now >= self._look_at:
            self._look_at = now + _EMPTY_CHECK_INTERVAL
            look_at_empty(self._producer, self._queue)

    def _collect(self, demand: int, end: float) -> None:
        """Wait for messages until ``end``, or until those are there that go together.

        A run that is told to stop waits for nothing: what is in flight is for :meth:`stop`.
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
                self._ready += [(answer.at, raw) for raw in answer.messages]
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
            return self._sorted(self._still_held(taken, self._producer.visibility))
        except BaseException:  # it goes back at the end
            self._ready[:0] = taken
            raise

    def _sorted(self, taken: list[tuple[float, Any]]) -> list[Message]:
        """The messages of what was taken that are new to this run."""
        now = self._clock.now()
        receipts, spare = self._receipts, self._spare
        fresh: dict[str, Any] = {}
        newer: dict[str, str] = {}
        oldest = now.timestamp()
        for at, raw in taken:
            key = raw["MessageId"]
            if key in receipts.now or key in spare:
                # This run gave it back: kept out of everybody's way until the run has ended.
                spare[key] = raw["ReceiptHandle"]
            elif receipts.knows(key) and key not in fresh:
                newer[key] = raw["ReceiptHandle"]
                oldest = min(oldest, at)
            else:
                fresh[key] = raw  # of two receipts in hand, the newer
                oldest = min(oldest, at)
        # Handed out before, it is being handled, and settled by its newest receipt.
        self._hold(newer, {}, oldest)
        made = self._made(fresh, now)
        if not made:
            return []
        handles = {each.message_id: fresh[each.message_id]["ReceiptHandle"] for each in made}
        self._unsecured = handles, self._groups(fresh), oldest
        return made

    def _hold(self, handles: dict[str, str], groups: dict[str, str], since: float) -> None:
        """Write receipts down, and hold their messages from now on.

        :raises StagingError: If they cannot be written: then they are not held.
        """
        if handles:
            until = since + self._producer.visibility
            self._receipts.write(handles, groups, since, until)
            self._receipts.add(handles, groups, since, until)

    def _still_held(self, taken: list[tuple[float, Any]], lease: int) -> list[tuple[float, Any]]:
        """``taken`` with what has waited here for long held anew, if it still can be."""
        now = self._clock.now().timestamp()
        if now - taken[0][0] <= _STALE_PART * lease:
            return taken
        receipts = {
            raw["ReceiptHandle"]: raw for at, raw in taken if now - at > _STALE_PART * lease
        }
        refused = self._requests.send(
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
        groups = {key: group_of(raw) for key, raw in fresh.items()}
        if "" in groups.values() and not self._warned_of_groups:
            self._warned_of_groups = True
            log.warning(
                "messages of the FIFO queue %r carry no message group: they count as one group, in"
                " order of arrival; send them with a MessageGroupId",
                self._queue.name,
            )
        return groups

    def _made(self, fresh: dict[str, Any], now: datetime) -> list[Message]:
        counts = {key: receives_of(raw) for key, raw in fresh.items()}
        again = [key for key, count in counts.items() if count > 1]
        failures = self._folder.failures.of(again, now) if again else {}
        # Without notes of failures the receives must stand for them, releases and lapses included.
        durable = self._folder.durable
        made = []
        for key, raw in fresh.items():
            count = counts[key]
            attempt = 1 if count == 1 else failures.get(key, 0) + 1 if durable else count
            try:
                made.append(
                    self._reader.message(
                        raw, attempt=attempt, redelivered=count > 1, at=now, position=self._position
                    )
                )
                self._position += 1
            except Exception as error:  # one that cannot be read fails alone
                self._spare[key] = raw["ReceiptHandle"]
                log.error(
                    "message %r of the SQS queue %r cannot be read (%s: %s): it is left to the"
                    " queue's redrive policy, and given back when the run ends",
                    key,
                    self._queue.name,
                    type(error).__name__,
                    error,
                )
        return made

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        portion = self._unsecured
        if portion is None or not messages:
            return messages
        if self._receipts.ended():
            # A newer execution of this task, or a sweep, has ended the generation meanwhile.
            raise self._lapsed()
        self._hold(*portion)
        self._unsecured = None
        self._secured += len(portion[0])
        return messages

    def _take_back_unsecured(self) -> None:
        """What was handed out and never secured is not this run's: it goes back at the end."""
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
            self._ready += [(answer.at, raw) for raw in answer.messages]
        if not self._env.stopping():  # it may take as long as a long poll
            self._ready += self._receives.lost()
        self._take_back_unsecured()
        ready, self._ready = self._ready, []
        newer: dict[str, str] = {}
        for _, raw in ready:
            key = raw["MessageId"]
            held = self._receipts.knows(key) and key not in self._receipts.now
            (newer if held else self._spare)[key] = raw["ReceiptHandle"]
        self._release_spare()
        # Received again, and settled by their newest receipts.
        self._hold(newer, {}, min((at for at, _ in ready), default=0.0))
        return []

    def _release_spare(self) -> None:
        """Show everybody at once what was received and is not held."""
        if not self._spare:
            return
        spare = dict(self._spare)
        try:
            refused = self._requests.send(self._queue.change, _shown(spare.items()))
        except BroadwayError as error:  # tried once more at the very end
            log.warning("Could not give back %s unused: %s", many(len(spare), "message"), error)
            return
        self._spare.clear()
        log.info("Gave back %s unused.", many(len(spare) - len(refused), "message"))

    def _release_late(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Give back what a receive found that nobody waited for any more; in its own thread."""
        entries = _shown((str(place), raw["ReceiptHandle"]) for place, raw in enumerate(found))
        try:
            self._queue.change([{"Id": key, **entry} for key, entry in entries])
        except BroadwayError as error:
            log.warning("Could not give back %s unused: %s", many(len(found), "message"), error)

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
                self._queue.close()
            self._folder.close(self._env.generation)


def _check_visibility(producer: SqsOptions) -> None:
    """Refuse what makes no lease, though SQS takes it.

    :raises ProducerError: If the visibility timeout is 0.
    """
    if producer.visibility_timeout == 0:
        raise ProducerError(
            "visibility_timeout=0 hides a message from nobody, so no run can hold it: leave it"
            " out, or give the seconds of a lease"
        )


def _shown(receipts: Iterable[tuple[str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Entries that make messages visible at once."""
    for key, receipt in receipts:
        yield key, {"ReceiptHandle": receipt, "VisibilityTimeout": 0}


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)
