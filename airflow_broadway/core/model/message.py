"""The message: an immutable value that passes through the pipeline.

A producer creates a :class:`Message`, callbacks derive new ones through its ``put_…`` methods, and
it is settled through its :class:`AckRef` at the end.  It is used on the worker and in the Spark
driver alike, so this module needs Python 3.10 and nothing else.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.model.acks import NO_ACK, AckRef, ack_immediately

DEFAULT: Final = "default"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NO_METADATA: Final[Mapping[str, Any]] = MappingProxyType({})
Metadata: TypeAlias = "Mapping[str, Any] | Callable[[], Mapping[str, Any]]"


class BatchMode(str, Enum):
    """Whether a message waits for its batch to fill, or flushes it immediately."""

    BULK = "bulk"
    FLUSH = "flush"


class Status(NamedTuple):
    """The status of a message.

    :param kind: ``"ok"``; ``"failed"`` by the user; ``"error"`` by an exception; ``"exit"`` by
        ``SystemExit``; ``"crashed"`` if the processes that handled it died.
    :param reason: The user's reason, the exception, or the code of ``SystemExit``.
    :param trace: An exception's traceback as text, after serialization.
    """

    kind: str
    reason: Any = None
    trace: str = ""

    @property
    def stacktrace(self) -> str:
        """The exception's traceback as text; formatted on access, since that costs more than
        handling a message.
        """
        if self.trace or not isinstance(self.reason, BaseException):
            return self.trace
        return "".join(traceback.format_exception(self.reason))

    def __reduce__(self) -> tuple[type[Status], tuple[str, Any, str]]:
        return Status, (self.kind, self.reason, self.stacktrace)

    @property
    def exception(self) -> str:
        """The name of the exception's type; empty if the user failed the message."""
        kind, reason, _ = self
        if kind == "exit":
            return "SystemExit"
        if isinstance(reason, BaseException):
            return type(reason).__name__
        # Of another process, with an exception that could not be pickled.
        return str(reason).partition(":")[0] if kind == "error" else ""

    @property
    def text(self) -> str:
        """The reason as text: an exception with its type, an exit with its code.  Never raises, and
        is valid UTF-8: a lone surrogate is written as its escape.  Secrets in addresses are masked.
        """
        kind, reason, _ = self
        if kind == "exit":
            reason = SystemExit(0 if reason is None else reason)
        if reason is None:
            return ""
        name = type(reason).__name__
        try:
            text = redacted(str(reason))
        except (Exception, SystemExit, GeneratorExit):  # any exception of a user's __str__
            # A verdict needs a text: a failure without one is a failure all the same.
            return f"{name}: (its text cannot be had)"
        if not text.isascii():
            text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        return f"{name}: {text}" if isinstance(reason, BaseException) else text


OK: Final = Status("ok")


@dataclass(slots=True, init=False, repr=False, eq=False)
class _Draft:
    """A message under construction: the layout of :class:`Message`, but mutable.

    Building a draft and then changing its class costs half of ``object.__setattr__`` per field; a
    message is rebuilt up to five times.
    """

    acknowledger: AckRef
    attempt: int
    batch_key: Any
    batch_mode: BatchMode
    batcher: str
    data: Any
    message_id: str
    metadata: Metadata
    position: int
    received_at: datetime
    redelivered: bool
    size: int
    status: Status


#: The slot below the property :attr:`Message.metadata`.
_STORED: Final = _Draft.__dict__["metadata"]


class Message(_Draft):
    """One message: its data, its route and its status.

    :param data: The payload; ``bytes`` as received, or a callback's value.
    :param metadata: The producer's metadata, or a function that loads it when it is first read.
    :param acknowledger: The acknowledger that settles it.
    :param message_id: Unique per message: the broker's id where that is stable and unique.
    :param batcher: The batcher it is routed to.
    :param batch_key: Messages of one key share batches.
    :param batch_mode: Whether it waits for its batch to fill.
    :param status: ``OK``, or its failure.
    :param attempt: From 1; incremented by every recorded failure of a callback.
    :param redelivered: Whether it may have been handled before.
    :param received_at: When this run received it; aware UTC.
    :param position: Its position in the order of arrival at its producer.
    :param size: Bytes of the payload as received.
    """

    __slots__ = ()

    def __init__(
        self,
        data: Any,
        *,
        metadata: Metadata = _NO_METADATA,
        acknowledger: AckRef = NO_ACK,
        message_id: str = "",
        batcher: str = DEFAULT,
        batch_key: Any = DEFAULT,
        batch_mode: BatchMode | str = BatchMode.BULK,
        status: Status = OK,
        attempt: int = 1,
        redelivered: bool = False,
        received_at: datetime = _EPOCH,
        position: int = 0,
        size: int = 0,
    ) -> None:
        # Mutable while it is built: plain assignment is three times faster than
        # object.__setattr__.
        object.__setattr__(self, "__class__", _Draft)
        self.data = data
        self.metadata = metadata  # type: ignore[assignment, misc]
        self.acknowledger = acknowledger
        self.message_id = message_id
        self.batcher = batcher
        self.batch_key = batch_key
        self.batch_mode = batch_mode if type(batch_mode) is BatchMode else BatchMode(batch_mode)
        self.status = status
        self.attempt = attempt
        self.redelivered = redelivered
        self.received_at = received_at
        self.position = position
        self.size = size
        self.__class__ = Message

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a Message is immutable: {name!r} cannot be set; the put_… functions return a new one"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Message is immutable: {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if type(other) is not Message:
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _Draft.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        status = self.status.kind
        return f"Message({self.data!r:.80}, message_id={self.message_id!r}, status={status!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        values = {name: getattr(self, name) for name in _Draft.__slots__}
        values["metadata"] = dict(self.metadata)  # a mappingproxy cannot be pickled
        return _restore, tuple(values.values())

    @property
    def metadata(self) -> Mapping[str, Any]:  # type: ignore[override]
        """The producer's metadata."""
        metadata: Metadata = _STORED.__get__(self)
        if callable(metadata):
            metadata = metadata()
            _STORED.__set__(self, metadata)
        return metadata

    @property
    def ok(self) -> bool:
        """Whether it has not failed."""
        return self.status.kind == "ok"

    def put_data(self, data: Any) -> Message:
        """Replaces the data.  The status stays: a failed message stays failed."""
        return self.replace(data=data)

    def update_data(self, function: Callable[[Any], Any]) -> Message:
        """Replaces the data by ``function(data)``."""
        return self.put_data(function(self.data))

    def put_batcher(self, batcher: str) -> Message:
        """Routes it to another batcher; the name is checked when ``handle_message`` returns.

        :raises TypeError: If ``batcher`` is not a string.
        """
        if not isinstance(batcher, str):
            raise TypeError(f"expected a batcher's name as a string, got: {batcher!r}")
        return self.replace(batcher=batcher)

    def put_batch_key(self, batch_key: Any) -> Message:
        """Batches it with messages of this key only; the key may be any hashable value.

        :raises TypeError: If it is not hashable.
        """
        hash(batch_key)
        return self.replace(batch_key=batch_key)

    def put_batch_mode(self, batch_mode: BatchMode | str) -> Message:
        """Sets the batch mode: ``"bulk"`` waits for a full batch, ``"flush"`` flushes its key's.

        :raises ValueError: If it is neither.
        """
        if batch_mode not in ("bulk", "flush"):
            raise ValueError(f"expected a batch mode of 'bulk' or 'flush', got: {batch_mode!r}")
        return self.replace(batch_mode=BatchMode(batch_mode))

    def failed(self, reason: Any) -> Message:
        """Fails it; the last reason counts, and a failure cannot be reverted."""
        return self.replace(status=Status("failed", reason))

    def configure_ack(self, **options: Any) -> Message:
        """Changes how this message is settled, e.g. ``configure_ack(on_failure="retry")``.

        :raises PipelineError: If its acknowledger is not configurable, as after
            :meth:`ack_immediately`.
        :raises OptionsError: If the option or its value is invalid.
        """
        acknowledger, ref, data = self.acknowledger
        configure = getattr(acknowledger, "configure", None)
        if configure is None:
            raise PipelineError(
                f"cannot configure the acknowledgement of message {self.message_id!r}: its"
                f" acknowledger {type(acknowledger).__name__} has no configure function",
                code="configure_not_supported",
            )
        return self.replace(acknowledger=AckRef(acknowledger, ref, configure(ref, data, options)))

    def ack_immediately(self) -> Message:
        """Settles it immediately by its current status; later stages do not settle it again.

        At most once from here on: if the run dies, the broker does not redeliver it.
        """
        return ack_immediately([self])[0]

    def with_acknowledger(self, acknowledger: AckRef) -> Message:
        """Sets its acknowledger; for producers and the pipeline itself."""
        return self.replace(acknowledger=acknowledger)

    def replace(self, **fields: Any) -> Message:
        """Replaces fields; for producers and the pipeline itself."""
        draft = _Draft()
        draft.data = self.data
        draft.metadata = _STORED.__get__(self)
        draft.acknowledger = self.acknowledger
        draft.message_id = self.message_id
        draft.batcher = self.batcher
        draft.batch_key = self.batch_key
        draft.batch_mode = self.batch_mode
        draft.status = self.status
        draft.attempt = self.attempt
        draft.redelivered = self.redelivered
        draft.received_at = self.received_at
        draft.position = self.position
        draft.size = self.size
        for name, value in fields.items():
            setattr(draft, name, value)
        draft.__class__ = Message
        return draft  # type: ignore[return-value]


def _restore(*values: Any) -> Message:
    return Message(**dict(zip(_Draft.__slots__, values, strict=True)))
