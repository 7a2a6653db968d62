"""The port of the custody engine: what an adapter implements for one broker.

A broker of this kind delivers each message with a receipt and hides it from others for a while.
A receipt removes its message for good, or hides it for some seconds from now on; 0 seconds make it
visible immediately.  The engine does all else: it fetches by demand, records receipts, extends
leases, settles, counts attempts and sends dead letters before their originals are removed.

Class attributes state the capabilities of a broker.  The engine reads them and nothing else about
the broker.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import Entry, QueueDepth
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable

if TYPE_CHECKING:
    from airflow_broadway.producers.kit.state_files import StateFiles


class Received(NamedTuple):
    """One delivery.

    :param key: The message id; unique, and the same at every delivery.
    :param receipt: Settles this delivery.
    :param raw: The client's own form of it.
    :param deliveries: How often the broker has delivered the message, this time included, as far
        as it counts.
    :param group: The group in which the message keeps its order; ``None``: in none.
    """

    key: str
    receipt: str
    raw: Any
    deliveries: int = 1
    group: str | None = None


class Contents(NamedTuple):
    """A message as it was read.

    :param properties: What a dead letter of it keeps, as JSON text.
    :param requeued: Whether it was a dead letter before.
    """

    data: bytes
    metadata: dict[str, Any]
    properties: str | None = None
    requeued: bool = False


class Answer(NamedTuple):
    """The result of one receive.

    :param at: The timestamp from which its messages are hidden, at the latest: e.g. that of the
        request.
    """

    at: float
    messages: Sequence[Received]


class Hidden(NamedTuple):
    """A receipt whose message is to be hidden for so many seconds; 0: it becomes visible."""

    receipt: str
    seconds: int


class Refusal(NamedTuple):
    """Explains why the broker did not carry out an entry.

    :param code: The broker's word for it.
    :param gone: Whether the receipt is void.
    :param again: Whether sending the entry again may help.
    :param unclear: Whether the entry may have been carried out all the same, this time or an
        earlier one: e.g. an answer was lost.
    """

    code: str
    text: str
    gone: bool = False
    again: bool = False
    unclear: bool = False

    def __str__(self) -> str:
        return f"{self.code}: {self.text}" if self.code else self.text


class Refused(ProducerError):
    """The broker rejects the contents of this request; another request may be accepted."""


class Denied(ProducerError):
    """The credentials may not do this; others of the requests may be allowed."""


class Expired(ProducerUnavailable):
    """The credentials have expired: another process, with new ones, may succeed."""


#: The refusal of an entry that is not sent, because the lease is over.
LAPSED: Final = Refusal("LeaseLapsed", "the lease has lapsed", gone=True)

#: One request: takes entries, returns the refused ones by their place among them.
Call = Callable[[Sequence[Any]], Mapping[int, Refusal]]
#: An entry, with the key that its refusal goes by.
Keyed = tuple[str, Any]


class Publisher(NamedTuple):
    """A queue or topic that messages are sent to.

    :param send: Sends one request.
    :param action: The broker's name of that request.
    :param size_of: Returns the bytes of a message in it.
    :param max_messages: Messages of one request, at most.
    :param max_bytes: Bytes of one request, unless one message alone is larger.
    """

    send: Call
    action: str
    size_of: Callable[[Any], int]
    max_messages: int
    max_bytes: int

    def requests(self, messages: Mapping[str, Any]) -> list[list[Keyed]]:
        """Divides messages, by key, into requests."""
        made: list[list[Keyed]] = []
        room = 0
        for keyed in messages.items():
            size = self.size_of(keyed[1])
            if not made or len(made[-1]) == self.max_messages or size > room:
                made.append([])
                room = self.max_bytes
            made[-1].append(keyed)
            room -= size
        return made


class DeadLetterTarget(NamedTuple):
    """The queue or topic for dead letters.

    :param make: Makes the dead letter of one message.
    """

    publisher: Publisher
    make: Callable[[Entry], Any]


class Client(Protocol):
    """One queue over a connection: one request a call; may be used from several threads."""

    @property
    def name(self) -> str:
        """Returns the queue's name, for people."""

    def remove(self, receipts: Sequence[str], /) -> Mapping[int, Refusal]:
        """Removes messages for good; returns the refused ones by their place."""

    def hide(self, entries: Sequence[Hidden], /) -> Mapping[int, Refusal]:
        """Hides messages from now on."""

    def close(self) -> None:
        """Releases the connection.  Safe to repeat."""


ClientT = TypeVar("ClientT", bound=Client)


class Broker(ABC, Generic[ClientT]):
    """One queue at its broker.

    :meth:`receive` may be called from several threads; all calls raise ``BroadwayError`` only.
    """

    #: The broker's and its queue's names, for people.
    service: ClassVar[str]
    queue_word: ClassVar[str]
    #: Whether the broker counts the deliveries of every message.
    native_attempts: ClassVar[bool] = True
    #: Whether the broker itself delivers each group in order: it takes acknowledgements in that
    #: order only, and redelivers what follows a redelivered message.
    ordered_groups: ClassVar[bool] = False
    #: Whether removing a message a second time is refused, its receipt being void.
    removes_once: ClassVar[bool] = False
    #: The longest time for which one request hides a message, in seconds.
    max_hide: ClassVar[int]
    #: The longest time for which a delivery can be held in all, in seconds; ``None``: no limit.
    max_hold: ClassVar[int | None] = None
    #: The most entries of one request.
    max_batch: ClassVar[int] = 1000
    #: Days for which the broker keeps a message at most.
    kept_days: ClassVar[int]
    #: Errors after which nothing more is received, though received messages are handled.
    full: ClassVar[tuple[type[ProducerError], ...]] = ()
    #: Errors that waiting cannot cure, though another process may succeed.
    ends: ClassVar[tuple[type[ProducerError], ...]] = (Expired,)
    #: The most messages of one receive, and the most receives, or other requests, at a time.
    max_fetch: int = 100
    concurrency: int = 1
    #: Seconds from an empty receive to the next one.
    interval: float = 0.5
    #: Seconds for which a request is repeated while the broker is out of reach; 0: the client
    #: repeats it.
    retry_seconds: float = 0.0

    def __init__(self, producer: Producer, env: ProducerEnv) -> None:
        self.producer: Any = producer
        self.env = env
        self.clock = env.clock
        self.kind, self.lease = producer.kind, producer.lease
        #: The lease in whole seconds.
        self.seconds = math.ceil(producer.lease)
        self._client: ClientT | None = None
        self._opening = threading.Lock()

    @abstractmethod
    def open(self) -> ClientT:
        """Connects.

        :raises BroadwayError: If that fails.
        """

    @property
    def client(self) -> ClientT:
        """Opens the connection when it is first used, and returns it."""
        with self._opening:
            if self._client is None:
                self._client = self.open()
            return self._client

    def close(self) -> None:
        """Releases the connection.  Safe to repeat."""
        with self._opening:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def place(self) -> str:
        """Names the queue by the producer's options; opens nothing."""
        return str(self.producer.place)

    @property
    def name(self) -> str:
        """Returns the queue's name, for people."""
        return self.client.name

    def state_files(self) -> StateFiles | None:
        """Returns where receipts are recorded; ``None``: in the shared staging folder."""
        return None

    # -- receiving -----------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        """Returns what a run would refuse or warn of, before the first receive.

        :raises ProducerError: If the queue cannot be checked, nor received from.
        """
        return []

    @abstractmethod
    def receive(self, count: int) -> Answer:
        """Receives at most ``count`` messages, hidden for the producer's lease."""

    def receive_lost(self) -> list[tuple[float, Received]]:
        """Fetches the messages of lost answers, where the broker repeats those."""
        return []

    def explain_empty(self) -> None:
        """Logs why receives are empty though the queue is not."""

    @abstractmethod
    def read(self, received: Received) -> Contents:
        """Reads a message.

        :raises Exception: Any, if it cannot be read.
        """

    # -- settling ------------------------------------------------------------------------------

    @abstractmethod
    def dead_letter_target(self) -> DeadLetterTarget:
        """Opens the target for dead letters.

        :raises BroadwayError: If there is none.
        """

    def requests(self, entries: Iterable[Keyed]) -> Iterator[list[Keyed]]:
        """Divides entries of the client's ``remove`` or ``hide`` into requests."""
        rest = iter(entries)
        while request := list(islice(rest, self.max_batch)):
            yield request

    # -- looking -------------------------------------------------------------------------------

    def depth(self) -> QueueDepth | None:
        """Reports how full the queue is; ``None`` where that is not known."""
        return None

    def dead_letters(self, place: str | None) -> DeadLetters:
        """Opens the place for dead letters, which closes this broker with itself."""
        raise ProducerError(f"{self.service} has no dead letters that can be looked at")
