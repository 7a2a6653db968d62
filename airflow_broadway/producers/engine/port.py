"""The port of the custody engine: the interface that an adapter implements for one broker.

Such a broker delivers each message with a receipt, and hides it from other consumers for a while.
A receipt removes its message permanently, or hides it for some seconds from now; 0 seconds make it
visible immediately.  The engine does the rest: it fetches by demand, records receipts, extends
leases, settles, counts attempts, and sends dead letters before their originals are removed.

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

    :param key: The message id; unique, and the same for every delivery.
    :param receipt: The token that settles this delivery.
    :param raw: The client's own message object.
    :param deliveries: The broker's delivery count, including this delivery, if it counts.
    :param group: The message group or ordering key; ``None``: unordered.
    """

    key: str
    receipt: str
    raw: Any
    deliveries: int = 1
    group: str | None = None


class Contents(NamedTuple):
    """The parsed contents of a message.

    :param properties: The properties that a dead letter of it keeps, as JSON text.
    :param requeued: Whether it is a requeued dead letter.
    """

    data: bytes
    metadata: dict[str, Any]
    properties: str | None = None
    requeued: bool = False


class Answer(NamedTuple):
    """The result of one receive.

    :param at: The latest timestamp at which its messages may have become hidden, e.g. that of the
        request.
    """

    at: float
    messages: Sequence[Received]


class Hidden(NamedTuple):
    """A receipt, and the seconds for which to hide its message; 0 makes it visible."""

    receipt: str
    seconds: int


class Refusal(NamedTuple):
    """The broker's refusal of one entry of a request.

    :param code: The broker's error code.
    :param invalid: Whether the receipt is invalid.
    :param again: Whether retrying the entry may help.
    :param unclear: Whether this or an earlier request may have carried out the entry all the same,
        e.g. because a response was lost.
    """

    code: str
    text: str
    invalid: bool = False
    again: bool = False
    unclear: bool = False

    def __str__(self) -> str:
        return f"{self.code}: {self.text}" if self.code else self.text


class Refused(ProducerError):
    """A request whose contents the broker rejects; other requests may succeed."""


class Denied(ProducerError):
    """A request that the credentials do not permit; other requests may be allowed."""


class Expired(ProducerUnavailable):
    """Expired credentials; another process with new credentials may succeed."""


#: The refusal of an entry that is not sent, because the lease is over.
LAPSED: Final = Refusal("LeaseLapsed", "the lease has lapsed", invalid=True)

#: Sends one request of entries; returns the refusals by index.
Call = Callable[[Sequence[Any]], Mapping[int, Refusal]]
#: An entry with the key under which its refusal is returned.
Keyed = tuple[str, Any]


class Publisher(NamedTuple):
    """A queue or topic that messages are sent to.

    :param send: Sends one request.
    :param action: The broker's name for that request.
    :param size_of: Returns the bytes of a message in a request.
    :param max_messages: The maximum number of messages in one request.
    :param max_bytes: The maximum bytes of one request, unless a single message is larger.
    """

    send: Call
    action: str
    size_of: Callable[[Any], int]
    max_messages: int
    max_bytes: int

    def requests(self, messages: Mapping[str, Any]) -> list[list[Keyed]]:
        """Divides messages, by key, into requests."""
        requests: list[list[Keyed]] = []
        remaining = 0
        for keyed in messages.items():
            size = self.size_of(keyed[1])
            if not requests or len(requests[-1]) == self.max_messages or size > remaining:
                requests.append([])
                remaining = self.max_bytes
            requests[-1].append(keyed)
            remaining -= size
        return requests


class DeadLetterTarget(NamedTuple):
    """The dead-letter queue or topic.

    :param make: Builds the dead letter of one message.
    """

    publisher: Publisher
    make: Callable[[Entry], Any]


class Client(Protocol):
    """A connection to one queue, with one request per call; usable from several threads."""

    @property
    def name(self) -> str:
        """The queue's name for messages and logs."""

    def remove(self, receipts: Sequence[str], /) -> Mapping[int, Refusal]:
        """Removes messages permanently; returns the refusals by index."""

    def hide(self, entries: Sequence[Hidden], /) -> Mapping[int, Refusal]:
        """Hides messages for some seconds from now; returns the refusals by index."""

    def close(self) -> None:
        """Releases the connection.  Safe to repeat."""


ClientT = TypeVar("ClientT", bound=Client)


class Broker(ABC, Generic[ClientT]):
    """One queue at its broker.

    :meth:`receive` may be called from several threads; all calls raise ``BroadwayError`` only.
    """

    #: The names of the broker and of its kind of queue, for messages and logs.
    service: ClassVar[str]
    queue_word: ClassVar[str]
    #: Whether the broker counts the deliveries of every message.
    native_attempts: ClassVar[bool] = True
    #: Whether the broker itself delivers each group in order: it accepts acknowledgements only in
    #: that order, and redelivers the messages that follow a redelivered one.
    ordered_groups: ClassVar[bool] = False
    #: Whether a second removal with the same receipt is refused.
    removes_once: ClassVar[bool] = False
    #: The maximum seconds for which one request hides a message.
    max_hide: ClassVar[int]
    #: The maximum total seconds for which a delivery can be held; ``None``: no limit.
    max_hold: ClassVar[int | None] = None
    #: The maximum number of entries in one request.
    max_batch: ClassVar[int] = 1000
    #: The broker's maximum retention in days.
    kept_days: ClassVar[int]
    #: Errors after which the source receives nothing more, but handles received messages.
    full: ClassVar[tuple[type[ProducerError], ...]] = ()
    #: Errors that are not retried in this process, though another process may succeed.
    ends: ClassVar[tuple[type[ProducerError], ...]] = (Expired,)
    #: The maximum number of messages in one receive, and of concurrent receives or other requests.
    max_fetch: int = 100
    concurrency: int = 1
    #: Seconds from an empty receive to the next one.
    interval: float = 0.5
    #: Seconds for which a request is retried while the broker is unreachable; 0: the client
    #: retries it.
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
        """Opens the connection.

        :raises BroadwayError: If that fails.
        """

    @property
    def client(self) -> ClientT:
        """The connection; opened on first use."""
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
        """The queue's name by the producer's options; opens no connection."""
        return str(self.producer.place)

    @property
    def name(self) -> str:
        """The queue's name for messages and logs."""
        return self.client.name

    def state_files(self) -> StateFiles | None:
        """Returns the files for receipts; ``None``: those in the shared staging folder."""
        return None

    # -- receiving -----------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        """Returns the findings with which a run is refused, or warns, before the first receive.

        :raises ProducerError: If the queue cannot be accessed.
        """
        return []

    @abstractmethod
    def receive(self, count: int) -> Answer:
        """Receives at most ``count`` messages, hidden for the producer's lease."""

    def receive_lost(self) -> list[tuple[float, Received]]:
        """Fetches the messages of lost responses, if the broker repeats a response."""
        return []

    def explain_empty(self) -> None:
        """Logs the reason why receives are empty though the queue is not."""

    @abstractmethod
    def read(self, received: Received) -> Contents:
        """Parses a message.

        :raises Exception: If the message is malformed.
        """

    # -- settling ------------------------------------------------------------------------------

    @abstractmethod
    def dead_letter_target(self) -> DeadLetterTarget:
        """Opens the dead-letter queue or topic.

        :raises BroadwayError: If there is none.
        """

    def requests(self, entries: Iterable[Keyed]) -> Iterator[list[Keyed]]:
        """Divides entries of the client's ``remove`` or ``hide`` into requests."""
        rest = iter(entries)
        while request := list(islice(rest, self.max_batch)):
            yield request

    # -- inspecting ----------------------------------------------------------------------------

    def depth(self) -> QueueDepth | None:
        """Returns the queue's depth; ``None`` if it is unknown."""
        return None

    def dead_letters(self, place: str | None) -> DeadLetters:
        """Opens the dead letters; closing them closes this broker too."""
        raise ProducerError(f"{self.service} has no dead letters that can be looked at")
