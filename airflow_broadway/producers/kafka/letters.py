"""Lists, requeues and deletes the dead letters of a Kafka producer.

A dead-letter topic is a log: a dead letter stays in it until retention removes it.  So the offsets
of requeued and deleted dead letters are recorded next to the group's claims in staging, as a
:class:`~airflow_broadway.producers.kafka.claims.Claim` without a generation for each partition.  A
requeued dead letter is recorded once the broker has confirmed its message.  A kill between the two
publishes it twice, and requeued messages are received as redelivered.  See
``docs/adr/0013-dead-letters-of-a-log.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import islice
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.dead_letters import (
    EVERY,
    Choice,
    DeadLetter,
    Moved,
    Moving,
    destination_of,
)
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.claims import Claims, Place, group_files, places_of
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.options import KafkaOptions
from airflow_broadway.producers.kafka.records import REQUEUED, as_text, is_ours
from airflow_broadway.producers.kafka.settling import (
    Claim,
    Ranges,
    clip,
    count,
    minus,
    normal,
    of_offsets,
)

#: The number of dead letters that are requeued or deleted at a time.
_WAVE: Final = 200


class _Record(NamedTuple):
    """A dead letter with its record in the log."""

    place: Place
    offset: int
    record: Any
    letter: DeadLetter


#: Requeues dead letters; returns the error text of each that stays.
_Send = Callable[[Sequence[_Record]], Mapping[tuple[Place, int], str]]


class KafkaDeadLetters:
    """A group's :class:`~airflow_broadway.core.custody.dead_letters.DeadLetters`.

    :param place: The topic to read, instead of the producer's.
    :raises ProducerError: If there is no such topic, or the cluster rejects a request.
    """

    def __init__(self, producer: KafkaOptions, env: ProducerEnv, place: str | None) -> None:
        self._producer = producer
        self._cluster = Cluster(producer, env)
        try:
            topics = [place] if place else producer.dead_letter_topics
            self._topics = {t: numbers for t in topics if (numbers := self._cluster.partitions(t))}
            if not self._topics:
                raise ProducerError(
                    f"there is no topic {' or '.join(map(repr, topics))} for dead letters"
                    f" {self._cluster.where}: create it, or name another"
                )
            self._partitions = self._cluster.topics()
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            self._cluster.close()
            raise
        files = group_files(env.staging, self._cluster.id, producer.group_id)
        self._claims = Claims(files, "letters")

    @property
    def place(self) -> str:
        return ", ".join(f"topic {topic!r}" for topic in self._topics)

    def count(self) -> int:
        """Counts offsets; compacted ones are included until dead letters behind them are moved."""
        return sum(map(count, self._unread().values()))

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        for entry in self._read(self._unread()):
            if choice.takes(entry.letter):
                yield entry.letter

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        return self._move(choice, lambda wave: self._send(wave, to))

    def delete(self, choice: Choice = EVERY) -> Moved:
        return self._move(choice, lambda _: {})

    def close(self) -> None:
        self._cluster.close()

    # -- reading -------------------------------------------------------------------------------

    def _unread(self) -> dict[Place, Ranges]:
        """Returns the offset ranges of each partition that may contain open dead letters."""
        unread: dict[Place, Ranges] = {}
        for place in places_of(self._topics):
            low, end = self._cluster.ends(place)
            claim = self._claims.read(place)
            if claim is not None and max(low, claim.start) > end:  # the topic was created again
                claim = self._claims.change(place, lambda _, low=low: Claim(start=low))  # type: ignore[misc]
            base, done = (low, ()) if claim is None else (max(low, claim.start), claim.done)
            if base < end:
                unread[place] = minus(((base, end),), done)
        return unread

    def _read(self, unread: Mapping[Place, Ranges]) -> Iterator[_Record]:
        for place, record in self._cluster.read(unread, "dead letters cannot be read"):
            yield _Record(place, record.offset(), record, self._letter(place, record))

    def _letter(self, place: Place, record: Any) -> DeadLetter:
        headers = record.headers() or []
        fields = {name: as_text(value) or "" for name, value in headers if is_ours(name)}

        def error(name: str) -> str:
            return fields.get(f"__connect.errors.{name}", "")

        topic, partition, offset = error("topic"), error("partition"), error("offset")
        has_origin = bool(topic and partition.isdecimal() and offset.isdecimal())
        kind, text = error("exception.class.name"), error("exception.message")
        attempt = fields.get("broadway.attempt", "")
        clock, timestamp = record.timestamp()
        original = [[name, as_text(value)] for name, value in headers if not is_ours(name)]
        key, sources = f"{place[0]}-{place[1]}-{record.offset()}", self._sources(place[0])
        return DeadLetter(
            message_id=key,
            body=record.value() or b"",
            properties={
                "key": as_text(record.key()),
                "headers": original,
                "partition": int(partition) if has_origin else None,
                **({"body": fields["broadway.body"]} if "broadway.body" in fields else {}),
                **({"again": True} if fields.get("broadway.again") == "1" else {}),
            },
            reason=f"{kind}: {text}" if kind else text,
            stage=error("stage"),
            attempt=int(attempt) if attempt.isdecimal() and len(attempt) < 10 else 1,
            enqueued_at=_datetime(fields.get("broadway.timestamp")),
            died_at=_datetime(timestamp) if clock else None,
            generation=fields.get("broadway.generation", ""),
            origin=topic or (sources[0] if len(sources) == 1 else ""),
            original_id=f"{topic}-{partition}-{offset}" if has_origin else key,
        )

    # -- moving --------------------------------------------------------------------------------

    def _move(self, choice: Choice, send: _Send) -> Moved:
        """Moves the selected dead letters, and records their offsets as finished.

        :raises ProducerError: If there is no staging folder to record them in.
        """
        if not self._claims.durable:
            raise ProducerError(
                "the finished dead letters of a topic are recorded in the pipeline's staging"
                " folder, and there is none: name it, or they are listed again afterwards"
            )
        moving, unread = Moving(choice), self._unread()
        entries = self._read(unread)
        #: By partition: offsets of dead letters that stay, and the next offset to read.
        stay: dict[Place, list[int]] = {place: [] for place in unread}
        position: dict[Place, int] = {}
        while wave := list(islice(entries, _WAVE)):
            chosen = [entry for entry in wave if moving.takes(entry.letter)]
            refused = send(chosen)
            moved = {(entry.place, entry.offset) for entry in chosen} - refused.keys()
            moving.count += len(moved)
            for entry in wave:
                place, offset = entry.place, entry.offset
                position[place] = offset + 1
                if (place, offset) not in moved:
                    stay[place].append(offset)
                if (place, offset) in refused:
                    moving.refused[entry.letter.message_id] = refused[place, offset]
            for place in {place for place, _ in moved}:
                # Other offsets in the range were compacted, or are transaction markers.
                done = minus(clip(unread[place], 0, position[place]), of_offsets(stay[place]))
                self._finish(place, unread[place][0][0], done)
        return moving.result()

    def _finish(self, place: Place, start: int, finished: Ranges) -> None:
        """Records finished offsets of a partition, and all offsets before ``start``."""

        def mark_finished(claim: Claim | None) -> Claim:
            known = claim or Claim(start=start)
            (_, base), *done = normal([(-1, max(start, known.start)), *known.done, *finished])
            return Claim(start=base, done=tuple(done))

        self._claims.change(place, mark_finished)

    def _send(self, wave: Sequence[_Record], to: str | None) -> Mapping[tuple[Place, int], str]:
        """Requeues dead letters, and waits for confirmation; returns the errors of rejected ones.

        :raises ProducerUnavailable: If the cluster does not answer.
        """
        refused: dict[tuple[Place, int], str] = {}
        for entry in wave:
            key = entry.place, entry.offset

            def refuse(error: Any, key: tuple[Place, int] = key) -> None:
                refused[key] = str(self._cluster.error(error, "it cannot be sent back"))

            try:
                topic = self._destination(entry, to)
            except ProducerError as error:
                refused[key] = str(error)
                continue
            letter, record = entry.letter, entry.record
            headers = [(name, value) for name, value in record.headers() or [] if not is_ours(name)]
            message: dict[str, Any] = {"value": record.value(), "key": record.key()}
            partition = letter.properties["partition"]
            if partition in self._partitions.get(topic, ()):  # otherwise partitioned by key
                message["partition"] = partition
            headers.append((REQUEUED, letter.original_id.encode()))
            self._cluster.send(topic, refuse, headers=headers, **message)
        self._cluster.confirm()
        return refused

    def _destination(self, entry: _Record, to: str | None) -> str:
        """Returns the topic that a dead letter is requeued to.

        :raises ProducerError: If it cannot be requeued.
        """
        topic = destination_of(entry.letter, self._sources(entry.place[0]), to)
        if not self._partitions.get(topic) and not self._cluster.partitions(topic):
            raise ProducerError(f"there is no topic {topic!r}")
        if "body" in entry.letter.properties:
            raise ProducerError(f"its body is not in it ({entry.letter.properties['body']})")
        return topic

    def _sources(self, topic: str) -> list[str]:
        """Returns the topics whose dead letters are in a topic."""
        own = self._producer.topics
        return [name for name in own if self._producer.dead_letter_of(name) == topic] or list(own)


def _datetime(milliseconds: Any) -> datetime | None:
    try:
        return datetime.fromtimestamp(int(milliseconds) / 1000, timezone.utc)
    except (ValueError, TypeError, OverflowError, OSError):
        return None
