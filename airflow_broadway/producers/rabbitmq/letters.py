"""Browses, requeues and deletes the dead letters of a RabbitMQ producer.

Dead letters are fetched by ``basic.get``, one at a time, and are invisible to other clients
meanwhile.  Those that remain are requeued at the end, or when the connection is lost.  A dead
letter is acknowledged after its message is confirmed in the destination queue: a kill leaves it in
both queues at most.  A requeued message carries its mark: it is received as redelivered, under its
original id and on its first attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timezone
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
from airflow_broadway.producers.kit.looks import LookCount
from airflow_broadway.producers.rabbitmq import marks
from airflow_broadway.producers.rabbitmq.amqp import properties as codec
from airflow_broadway.producers.rabbitmq.amqp.address import Address, address_for
from airflow_broadway.producers.rabbitmq.amqp.channels import ACKS_AT_ONCE, Getter, Publisher
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered, join_route, split_route
from airflow_broadway.producers.rabbitmq.broker.checks import delivery_limit
from airflow_broadway.producers.rabbitmq.broker.holding_queues import QueueNames
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

#: The header in which a quorum queue counts a message's earlier deliveries.
_COUNT: Final = b"x-delivery-count"
#: The ``released_by`` of a dead letter without a mark.
_NO_GENERATION: Final = "dead-letters"


class _Place(NamedTuple):
    """A dead-letter queue.

    :param sources: The pipeline's queues whose dead letters it receives.
    """

    address: Address
    queue: str
    sources: tuple[str, ...]

    @property
    def is_ours(self) -> bool:
        """Whether the queue was declared by this package, without a delivery limit."""
        return self.queue in {QueueNames(source).dead for source in self.sources}


class RabbitDeadLetters:
    """The dead letters of all queues that a producer consumes.

    A :class:`~airflow_broadway.core.custody.dead_letters.DeadLetters`.

    :param all_options: The options of each consumed queue.
    :param place: The queue to read, instead of the options' dead-letter target.
    :raises ProducerError: If the options name an exchange, and ``place`` is not given.
    """

    def __init__(
        self, all_options: Sequence[RabbitMQOptions], env: ProducerEnv, place: str | None
    ) -> None:
        places: dict[tuple[str, str], _Place] = {}
        for options in all_options:
            address, queue = address_for(options, env), place or _dead_letter_queue(options)
            before = places.get((address.netloc, queue))
            sources = (*(before.sources if before else ()), options.queue)
            places[address.netloc, queue] = _Place(address, queue, sources)
        self._places = list(places.values())
        self._staging = env.staging

    @property
    def place(self) -> str:
        return ", ".join(f"queue {place.queue!r}" for place in self._places)

    def count(self) -> int:
        total = 0
        for place in self._places:
            with closing(ConnectionThread.to(place.address)) as connection:
                total += connection.depth(place.queue) or 0
        return total

    def letters(self, choice: Choice = EVERY) -> Iterator[DeadLetter]:
        for place in self._places:
            with self._open_walk(place, None) as walk:
                for _, letter in walk.letters():
                    if choice.takes(letter):
                        yield letter

    def requeue(self, choice: Choice = EVERY, *, to: str | None = None) -> Moved:
        return self._move(choice, send=True, to=to)

    def delete(self, choice: Choice = EVERY) -> Moved:
        return self._move(choice, send=False)

    def _move(self, choice: Choice, *, send: bool, to: str | None = None) -> Moved:
        moving = Moving(choice)
        for place in self._places:
            with self._open_walk(place, choice) as walk:
                _Move(walk, moving, send=send, to=to).run()
        return moving.result()

    @contextmanager
    def _open_walk(self, place: _Place, moved: Choice | None) -> Iterator[_Walk]:
        """Opens a walk, and requeues its unacknowledged dead letters at the end.

        :param moved: The dead letters that are moved, not returned; ``None``: all are returned.
        :raises ProducerError: If the queue's delivery limit is used up or unknown.
        """
        with closing(ConnectionThread.to(place.address)) as connection:
            looks = None
            if moved != EVERY and not place.is_ours:
                limit = delivery_limit(place.address, place.queue, connection.version)
                named = f"the queue {place.queue!r}"
                looks = LookCount(self._staging, named, limit, "the queue's delivery-limit")
                looks.begin(empty=not connection.depth(place.queue))
            walk = _Walk(connection, place, looks)
            try:
                yield walk
            finally:
                walk.getter.requeue_and_close()

    def close(self) -> None:
        """Does nothing: no connection is open between two calls."""


def _dead_letter_queue(options: RabbitMQOptions) -> str:
    """Returns a producer's dead-letter queue.

    :raises ProducerError: If dead letters go to an exchange: its queues are unknown.
    """
    target: Any = options.dead_letter
    if target is None:
        return QueueNames(options.queue).dead
    if isinstance(target, Mapping):
        raise ProducerError(
            f"the dead letters of {options.queue!r} go to the exchange {target.get('exchange')!r},"
            " whose queues are not known: name the queue as the place"
        )
    return str(target)


class _Walk:
    """A walk through a dead-letter queue.

    :param looks: Counts returns against the queue's delivery limit; ``None`` without a limit.
    """

    def __init__(
        self, connection: ConnectionThread, place: _Place, looks: LookCount | None
    ) -> None:
        self.connection = connection
        self.place = place
        self.looks = looks
        self.getter = Getter(connection, place.queue)

    def letters(self) -> Iterator[tuple[Delivered, DeadLetter]]:
        """Yields the dead letters that are in the queue now.

        :raises ProducerError: If other clients have used up the queue's delivery limit.
        """
        for _ in range(self.connection.depth(self.place.queue) or 0):
            delivered = self.getter.get()
            if delivered is None:  # another client has consumed it
                break
            if self.looks is not None:
                self._count_return(delivered, self.looks)
            yield delivered, _to_dead_letter(delivered, self.place)
        else:
            if self.looks is not None:
                self.looks.end()

    def _count_return(self, delivered: Delivered, looks: LookCount) -> None:
        """Records how often a dead letter was returned, this walk included.

        A dead letter without a remaining return is replaced by a copy, whose count starts at 0.

        :raises ProducerError: If another return might remove it.
        """
        returned = _count_returns(delivered) + 1
        if looks.limit is not None and returned > looks.limit:
            self.renew(delivered)
        looks.note(returned)

    def renew(self, delivered: Delivered) -> None:
        """Republishes a dead letter to its own queue, and acknowledges it after the confirm."""
        fields = codec.fields_of(_without_delivery_count(delivered.properties))
        fields.pop("user_id", None)  # the broker refuses another user's id
        publisher = Publisher(self.connection, lambda properties: "")
        publisher.publish("", self.place.queue, codec.join_fields(fields), delivered.body, key="")
        if not publisher.flush():
            self.getter.mark_for_ack(delivered.tag)
            self.getter.ack()


def _count_returns(delivered: Delivered) -> int:
    """Returns how often a dead letter was returned to its quorum queue."""
    value = _decode_headers(delivered).get(_COUNT.decode())
    return value if isinstance(value, int) else 0


class _Move:
    """Requeues or deletes the dead letters of one queue.

    They are acknowledged in small portions, each after its confirms: see :class:`Getter`.
    """

    def __init__(self, walk: _Walk, moving: Moving, *, send: bool, to: str | None) -> None:
        self._walk = walk
        self._moving = moving
        self._to = to
        self._publisher = Publisher(walk.connection, marks.publication_key) if send else None
        #: Published and unconfirmed: message id → ids and delivery tags of its dead letters.
        self._sent: dict[str, list[tuple[str, int]]] = {}

    def run(self) -> None:
        for delivered, letter in self._walk.letters():
            if self._moving.takes(letter) and self._send(delivered, letter):
                item = letter.message_id, delivered.tag
                self._sent.setdefault(letter.original_id, []).append(item)
                if sum(map(len, self._sent.values())) >= ACKS_AT_ONCE:
                    self._confirm()
        self._confirm()

    def _send(self, delivered: Delivered, letter: DeadLetter) -> bool:
        """Publishes a dead letter, unless it is to be deleted; ``False`` if it stays."""
        if self._publisher is None:
            return True
        walk, key = self._walk, letter.original_id
        try:
            queue = destination_of(letter, walk.place.sources, self._to)
            properties = _requeue_properties(delivered, key, walk.connection.max_properties)
        except ProducerError as error:
            self._moving.refused[letter.message_id] = str(error)
            if walk.looks is None and not walk.place.is_ours and _count_returns(delivered):
                # It stays in a queue with a delivery limit, and this return was not counted.
                walk.renew(delivered)
            return False
        self._publisher.publish("", queue, properties, delivered.body, key=key)
        return True

    def _confirm(self) -> None:
        refused = {} if self._publisher is None else self._publisher.flush()
        for key, letters in self._sent.items():
            for message_id, tag in letters:
                if key in refused:
                    self._moving.refused[message_id] = f"RabbitMQ refused: {refused[key]}"
                else:
                    self._walk.getter.mark_for_ack(tag)
                    self._moving.count += 1
        self._sent.clear()
        self._walk.getter.ack()


# -- one dead letter -------------------------------------------------------------------------------


def _to_dead_letter(delivered: Delivered, place: _Place) -> DeadLetter:
    mark = marks.mark_of(delivered.properties)
    properties = _decode_properties(delivered.properties)
    headers = _decode_headers(delivered)
    death = _latest_foreign_death(headers)
    attempt = headers.get("x-broadway-attempt")
    key, source = _dead_letter_id(delivered), place.sources[0] if len(place.sources) == 1 else ""
    return DeadLetter(
        message_id=key,
        body=delivered.body,
        properties=_describe_properties(delivered),
        reason=str(headers.get("x-broadway-reason") or death.get("reason") or ""),
        stage=str(headers.get("x-broadway-stage") or ""),
        attempt=attempt if isinstance(attempt, int) else 1,
        enqueued_at=_parse_timestamp(properties.get("timestamp")),
        died_at=_parse_timestamp(headers.get("x-broadway-dead-at") or death.get("time")),
        generation=mark.released_by if mark else "",
        origin=str(headers.get("x-broadway-queue") or death.get("queue") or source),
        original_id=mark.message_id if mark else key,
    )


def _dead_letter_id(delivered: Delivered) -> str:
    """Returns a dead letter's id, a hash of its content: RabbitMQ assigns no stable id."""
    digest = hashlib.blake2b(_without_delivery_count(delivered.properties), digest_size=12)
    digest.update(delivered.body)
    return f"letter-{digest.hexdigest()}"


def _without_delivery_count(properties: bytes) -> bytes:
    """Returns the properties without the quorum queue's delivery count."""
    try:
        fields = codec.fields_of(properties)
        headers = codec.entries_of(fields.get("headers"))
    except ProducerError:
        return properties
    remaining = [header for header in headers if header[0] != _COUNT]
    if len(remaining) == len(headers):
        return properties
    fields["headers"] = codec.join_entries(remaining)
    return codec.join_fields({n: raw for n, raw in fields.items() if n != "headers" or remaining})


def _decode_properties(properties: bytes) -> dict[str, Any]:
    try:
        return codec.decode(properties)
    except ProducerError:
        return {}


def _decode_headers(delivered: Delivered) -> Mapping[str, Any]:
    return _decode_properties(delivered.properties).get("headers") or {}


def _latest_foreign_death(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the latest ``x-death`` entry of a queue that is not ours; empty if there is none."""
    deaths = headers.get("x-death")
    for death in deaths if isinstance(deaths, list) else ():
        if isinstance(death, Mapping) and marks.is_foreign(death):
            return death
    return {}


def _parse_timestamp(value: object) -> datetime | None:
    if isinstance(value, datetime):
        return value
    try:
        if isinstance(value, int):
            return datetime.fromtimestamp(value, timezone.utc)
        timestamp = datetime.fromisoformat(str(value))
    except (ValueError, OverflowError, OSError):
        return None
    return timestamp if timestamp.tzinfo else None


def _restore_original(delivered: Delivered) -> tuple[bytes, bytes]:
    """Returns the route and properties of the message at its first receipt."""
    uncounted = _without_delivery_count(delivered.properties)
    route, properties = marks.restored(delivered.route, uncounted, trusted=True)
    if marks.mark_of(delivered.properties) is None:  # the broker itself dead-lettered it
        death = _latest_foreign_death(_decode_headers(delivered))
        keys = death.get("routing-keys")
        if death.get("exchange") is not None and isinstance(keys, list) and keys:
            route = join_route(str(death["exchange"]), str(keys[0]))
    return route, properties


def _describe_properties(delivered: Delivered) -> dict[str, Any]:
    """Returns the original route and properties as JSON values, for display."""
    try:
        route, properties = _restore_original(delivered)
        described: dict[str, Any] = codec.json_value(codec.decode(properties))
    except ProducerError as error:
        return {"unreadable": str(error)}
    exchange, key = split_route(route)
    return {"exchange": exchange, "routing_key": key, **described}


def _requeue_properties(delivered: Delivered, message_id: str, limit: int) -> bytes:
    """Returns the properties with which a dead letter is requeued.

    :raises ProducerError: If there is no room for the mark, which identifies a possible duplicate.
    """
    route, properties = _restore_original(delivered)
    mark = marks.mark_of(delivered.properties) or marks.Mark(message_id, _NO_GENERATION, 1)
    message = Held(message_id, 1, True, route, properties, delivered.body)
    return marks.republished(message, mark._replace(attempt=1), limit=limit)
