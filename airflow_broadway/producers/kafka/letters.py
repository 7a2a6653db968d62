"""The dead letters of a Kafka producer, for people.

A topic of dead letters is a log: nobody takes anything out of it.  So which letters are finished,
because they were sent back or deleted, is kept next to the group's claims in staging, as a
:class:`~airflow_broadway.producers.kafka.claims.Claim` of nobody for each partition.  A letter is
finished once the topic that it came from has its message, confirmed: a process that is killed
between the two sends it twice, and what was sent back is received as redelivered.  See
``docs/adr/0013-dead-letters-of-a-log.md``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_broadway.core.custody.dead_letters import (
    EVERY,
    Choice,
    DeadLetter,
    Moved,
    Moving,
    destination_of,
)
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.claims import Claim, Claims, Place, group_files
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.offsets import (
    FOREVER,
    Range,
    clip,
    contains,
    count,
    normal,
)
from airflow_broadway.producers.kafka.outbox import produce
from airflow_broadway.producers.kafka.records import REQUEUED, as_text, is_ours

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

#: Letters that are sent back, or deleted, at a time.
_WAVE: Final = 200
#: Seconds without a word from the cluster, after which it is out of reach; and for confirms.
_SILENCE_TIMEOUT, _CONFIRM_TIMEOUT = 20.0, 60.0


class _Found(NamedTuple):
    """A letter as it lies in the log."""

    place: Place
    offset: int
    record: Any
    letter: DeadLetter


#: Sends a wave back; the letters that stay, and why.
_Send = Callable[[Sequence[_Found]], Mapping[tuple[Place, int], str]]


class KafkaDeadLetters:
    """Those of a group; a :class:`~airflow_broadway.core.custody.dead_letters.DeadLetters`.

    :param place: The topic to look into, instead of the producer's.
    :raises ProducerError: If there is no such topic, or the cluster refuses.
    """

    def __init__(self, producer: KafkaOptions, env: ProducerEnv, place: str | None) -> None:
        self._producer = producer
        self._cluster = Cluster(producer, env)
        try:
            wanted = {place or producer.dead_letter_of(topic) for topic in producer.topics}
            self._topics = [each for each in sorted(wanted) if self._cluster.has_topic(each)]
            if not self._topics:
                raise ProducerError(
                    f"there is no topic {' or '.join(map(repr, sorted(wanted)))} for dead letters"
                    f" {self._cluster.where}: create it, or name another"
                )
            cluster_id, self._partitions = self._cluster.metadata()
        except BaseException:  # a kill too; raised again
            self._cluster.close()
            raise
        files = group_files(env.staging, cluster_id, producer.group_id)
        self._claims = Claims(files, env.clock, "letters")

    @property
    def place(self) -> str:
        return ", ".join(f"topic {each!r}" for each in self._topics)

    def count(self) -> int:
        """By their offsets: what was compacted away is counted too, until something is moved."""
        total = 0
        for place, (start, end) in self._unread().items():
            claim = self._claims.read(place)
            done = () if claim is None else clip(claim.done, start, end)
            total += end - start - count(done)
        return total

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        for found in self._read(self._unread()):
            if choice.takes(found.letter):
                yield found.letter

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        return self._moved(choice, lambda wave: self._send(wave, to))

    def delete(self, choice: Choice = EVERY) -> Moved:
        return self._moved(choice, lambda _: {})

    def close(self) -> None:
        self._cluster.close()

    # -- reading -------------------------------------------------------------------------------

    def _unread(self) -> dict[Place, Range]:
        """From where to where there may be letters, for each partition that has any."""
        found: dict[Place, Range] = {}
        for topic in self._topics:
            for number in self._cluster.partitions(topic):
                place = topic, number
                low, end = self._cluster.ends(place)
                claim = self._claims.read(place)
                base = low if claim is None else max(low, claim.start)
                if base > end:  # the topic was made anew: nothing of it is finished
                    self._claims.change(place, lambda _, low=low: Claim(start=low))  # type: ignore[misc]
                    base = low
                if base < end:
                    found[place] = base, end
        return found

    def _read(self, unread: dict[Place, Range]) -> Iterator[_Found]:
        """The letters that are not finished; what is set aside meanwhile is left out."""
        cluster, left = self._cluster, dict(unread)
        if not left:
            return
        cluster.assign({place: start for place, (start, _) in left.items()})
        heard = time.monotonic()
        while left:
            records = cluster.consume(500, 0.1)
            if records:
                heard = time.monotonic()
            elif time.monotonic() - heard > _SILENCE_TIMEOUT:
                raise cluster.unavailable("dead letters cannot be read")
            for record in records:
                place = record.topic(), record.partition()
                if place not in left:
                    continue
                if self._is_end(record, left[place]):
                    del left[place]
                    cluster.leave([place])
                elif record.error() is None:
                    claim = self._claims.known(place)
                    if claim is None or not contains(claim.done, record.offset()):
                        yield _Found(place, record.offset(), record, self._letter(place, record))

    def _is_end(self, record: Any, wanted: Range) -> bool:
        """Whether what came says that a partition has no more.

        :raises ProducerError: If it says that it cannot be read.
        """
        error = record.error()
        if error is None:
            return bool(record.offset() >= wanted[1])
        if error.code() == self._cluster.eof:
            return True
        if not error.retriable() and error.name() != "_TRANSPORT":
            raise self._cluster.error(error, "dead letters cannot be read")
        return False

    def _letter(self, place: Place, record: Any) -> DeadLetter:
        headers = record.headers() or []
        said = {name: as_text(value) or "" for name, value in headers if is_ours(name)}

        def of(name: str) -> str:
            return said.get(f"__connect.errors.{name}", "")

        topic, partition, offset = of("topic"), of("partition"), of("offset")
        whole = bool(topic and partition.isdecimal() and offset.isdecimal())
        kind, text = of("exception.class.name"), of("exception.message")
        attempt = said.get("broadway.attempt", "")
        clock, instant = record.timestamp()
        own = [[name, as_text(value)] for name, value in headers if not is_ours(name)]
        key, sources = f"{place[0]}-{place[1]}-{record.offset()}", self._sources(place[0])
        return DeadLetter(
            message_id=key,
            body=record.value() or b"",
            properties={
                "key": as_text(record.key()),
                "headers": own,
                "partition": int(partition) if whole else None,
                **({"body": said["broadway.body"]} if "broadway.body" in said else {}),
                **({"again": True} if said.get("broadway.again") == "1" else {}),
            },
            reason=f"{kind}: {text}" if kind else text,
            stage=of("stage"),
            attempt=int(attempt) if attempt.isdecimal() and len(attempt) < 10 else 1,
            enqueued_at=_instant(said.get("broadway.timestamp")),
            died_at=_instant(instant) if clock else None,
            generation=said.get("broadway.generation", ""),
            origin=topic or (sources[0] if len(sources) == 1 else ""),
            original_id=f"{topic}-{partition}-{offset}" if whole else key,
        )

    # -- moving --------------------------------------------------------------------------------

    def _moved(self, choice: Choice, send: _Send) -> Moved:
        """Move what is chosen, and finish it.

        :raises ProducerError: If nobody would know of it afterwards.
        """
        if not self._claims.durable:
            raise ProducerError(
                "which letters of a topic are finished is kept in the pipeline's staging folder,"
                " and there is none: name it, or nobody would know of it afterwards"
            )
        moving, wave = Moving(choice), list[_Found]()
        unread = self._unread()
        gaps = _Gaps(unread)
        for found in self._read(unread):
            gaps.saw(found)
            if moving.takes(found.letter):
                wave.append(found)
            if len(wave) >= _WAVE:
                self._finish(wave, gaps, moving, send)
        self._finish(wave, gaps, moving, send)
        return moving.result()

    def _finish(self, wave: list[_Found], gaps: _Gaps, moving: Moving, send: _Send) -> None:
        refused = send(wave)
        done: dict[Place, list[Range]] = {}
        for place, offset, _, letter in wave:
            why = refused.get((place, offset))
            if why is None:
                done.setdefault(place, []).append((offset, offset + 1))
                moving.count += 1
            else:
                moving.refused[letter.message_id] = why
        wave.clear()
        for place, ranges in done.items():
            finished = [*ranges, *gaps.of(place)]

            def without(claim: Claim | None) -> Claim:
                known = claim or Claim(start=gaps.start(place))  # noqa: B023
                every = normal([(0, known.start), *known.done, *finished])  # noqa: B023
                start = every[0][1] if every and every[0][0] <= 0 else known.start
                return Claim(start=start, done=clip(every, start, FOREVER))

            self._claims.change(place, without)

    def _send(self, wave: Sequence[_Found], to: str | None) -> Mapping[tuple[Place, int], str]:
        """Send them back, and wait until each is confirmed; those that were not, and why.

        :raises ProducerUnavailable: If the cluster does not say.
        """
        sender, refused = self._cluster.sender(), dict[tuple[Place, int], str]()
        for found in wave:
            key = found.place, found.offset
            try:
                topic = self._destination(found, to)
            except ProducerError as error:
                refused[key] = str(error)
                continue

            def told(error: Any, _: Any, key: tuple[Place, int] = key) -> None:
                if error is not None:
                    refused[key] = str(self._cluster.error(error, "it cannot be sent back"))

            self._produce(sender, found, topic, told)
        if sender.flush(_CONFIRM_TIMEOUT):
            raise self._cluster.unavailable("what is sent back is not confirmed")
        return refused

    def _destination(self, found: _Found, to: str | None) -> str:
        """The topic that a letter is sent back to.

        :raises ProducerError: If it cannot be sent back.
        """
        topic = destination_of(found.letter, self._sources(found.place[0]), to)
        if not self._partitions.get(topic) and not self._cluster.has_topic(topic):
            raise ProducerError(f"there is no topic {topic!r}")
        if "body" in found.letter.properties:
            raise ProducerError(f"its body is not in it ({found.letter.properties['body']})")
        return topic

    def _sources(self, topic: str) -> list[str]:
        """The topics whose dead letters a topic has."""
        own = self._producer.topics
        return [each for each in own if self._producer.dead_letter_of(each) == topic] or list(own)

    def _produce(self, sender: Any, found: _Found, topic: str, told: Any) -> None:
        letter, record = found.letter, found.record
        own = [(name, value) for name, value in record.headers() or [] if not is_ours(name)]
        about: dict[str, Any] = {"headers": [*own, (REQUEUED, letter.original_id.encode())]}
        partition = letter.properties["partition"]
        if partition in self._partitions.get(topic, ()):  # else by its key
            about["partition"] = partition
        produce(sender, topic, value=record.value(), key=record.key(), on_delivery=told, **about)


class _Gaps:
    """What lies between letters and is none: marks of transactions, what was compacted away."""

    def __init__(self, unread: dict[Place, Range]) -> None:
        self._starts = {place: start for place, (start, _) in unread.items()}
        self._next = dict(self._starts)
        self._found: dict[Place, list[Range]] = {}

    def saw(self, found: _Found) -> None:
        """A letter came, in order of its partition."""
        before = self._next[found.place]
        if before < found.offset:
            self._found.setdefault(found.place, []).append((before, found.offset))
        self._next[found.place] = found.offset + 1

    def of(self, place: Place) -> list[Range]:
        """The gaps of a partition so far."""
        return self._found.get(place, [])

    def start(self, place: Place) -> int:
        """Where the reading of a partition began."""
        return self._starts[place]


def _instant(milliseconds: Any) -> datetime | None:
    try:
        return datetime.fromtimestamp(int(milliseconds) / 1000, timezone.utc)
    except (ValueError, TypeError, OverflowError, OSError):
        return None
