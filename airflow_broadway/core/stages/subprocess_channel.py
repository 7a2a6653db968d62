"""The pipe between a process task and the processes of its processors.

Values go over it pickled: written by the one end and read by the other, never stored (ADR 7).
Acknowledgers stay in the parent: a message's own crosses as a number, and calls of it come back
over the pipe.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import threading
from collections.abc import Callable
from typing import IO, Any, Final

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.acks import NoopAcknowledger
from airflow_broadway.core.model.message import Message, Status

_LENGTH: Final = struct.Struct("!Q")
#: In the child: its end of the pipe.
_channel: PipeChannel | None = None
#: In the parent: number → acknowledger, for the acknowledgers of messages that are away.
_away: dict[int, Any] = {}
_away_lock = threading.Lock()


class UnreadableValue(PipelineError):
    """Raised where a value from the other process cannot be unpickled."""


class PipeChannel:
    """Sends and receives pickled values over a pair of pipes."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader = reader
        self._writer = writer
        self._lock = threading.RLock()

    def send(self, value: Any) -> None:
        body = _pickled(value)
        with self._lock:
            self._writer.write(_LENGTH.pack(len(body)))
            self._writer.write(body)
            self._writer.flush()

    def call(self, value: Any) -> Any:
        """Send a request, and return its answer; of several threads one at a time.

        :raises Exception: What the other end raised.
        """
        with self._lock:
            self.send(value)
            kind, answer = self.receive()
        if kind == "raise":
            raise answer
        return answer

    def receive(self) -> Any:
        """Receive the next value.

        :raises EOFError: If the other end is gone.
        :raises UnreadableValue: If it cannot be unpickled, such as an exception of a module that
            only the other process can import.
        """
        body = self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0])
        try:
            # Written by our own child or parent, over a pipe that nobody else holds: ADR 7.
            return pickle.loads(body)  # noqa: S301
        except Exception as error:  # of a user's class; not SystemExit
            raise UnreadableValue(
                f"a value that cannot be read here ({type(error).__name__}: {error})"
            ) from error

    def _read(self, size: int) -> bytes:
        body = self._reader.read(size)
        if len(body) < size:  # it ended while it wrote
            raise EOFError
        return body

    def close(self) -> None:
        for pipe in (self._writer, self._reader):
            try:
                pipe.close()
            except OSError:  # the other end is gone
                pass


def connect(reader: IO[bytes], writer: IO[bytes]) -> PipeChannel:
    """Make the child's end; from now on acknowledgers that come over it are remote ones."""
    global _channel  # noqa: PLW0603 - the child has one channel
    _channel = PipeChannel(reader, writer)
    return _channel


def acknowledger_of(number: int) -> Any:
    """In the parent: the acknowledger that crossed as this number."""
    return _away[number]


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    for kind in _kinds(value):
        pickler.dispatch_table[kind] = _reduce
    pickler.dump(value)
    return buffer.getvalue()


def _kinds(value: Any) -> set[type]:
    """The types of the acknowledgers in a chunk or in a result: those that are not pickled."""
    found: set[type] = {RemoteAcknowledger}
    for part in value if isinstance(value, tuple) else ():
        for each in part if isinstance(part, list) else ():
            if type(each) is Message:
                found.add(type(each.acknowledger.acknowledger))
    found.discard(NoopAcknowledger)
    return found


def _reduce(acknowledger: Any) -> tuple[Any, ...]:
    """An acknowledger crosses as a number, and as the names of what it can do beyond ``ack``."""
    if isinstance(acknowledger, RemoteAcknowledger):
        return _acknowledger, (acknowledger.number, acknowledger.can)
    number = id(acknowledger)
    with _away_lock:
        _away[number] = acknowledger
    can = tuple(name for name in ("configure", "ack_now") if hasattr(acknowledger, name))
    return _acknowledger, (number, can)


def _acknowledger(number: int, can: tuple[str, ...]) -> Any:
    if _channel is None:
        return acknowledger_of(number)
    known = RemoteAcknowledger.known
    if number not in known:
        known[number] = RemoteAcknowledger(number, can, _channel)
    return known[number]


class RemoteAcknowledger:
    """In the child: an acknowledger of the parent, by its number."""

    known: dict[int, RemoteAcknowledger] = {}  # noqa: RUF012 - one registry per child

    def __init__(self, number: int, can: tuple[str, ...], channel: PipeChannel) -> None:
        self.number = number
        self.can = can
        self._channel = channel

    def ack(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
        """Settle in the parent."""
        self._call("ack", ack_ref, portable(successful), portable(failed))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self.__dict__.get("can", ()):
            return lambda *arguments: self._call(name, *arguments)
        raise AttributeError(name)

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._channel.call(("call", self.number, method, *arguments))


def portable(messages: list[Message]) -> list[Message]:
    """The messages, such that they can cross: one that cannot fails, without its data."""
    if pickles((messages,)):
        return messages
    return [each if pickles(([each],)) else _made_portable(each) for each in messages]


def _made_portable(message: Message) -> Message:
    status = message.status
    if status.kind == "ok":
        error = PipelineError(
            f"with executor='processes' a message must be picklable, got: {message.data!r:.200}"
        )
        return message.with_status(Status("error", error)).put_data(None)
    text = status.text.removeprefix("SystemExit: ") if status.kind == "exit" else status.text
    plain = message.with_status(Status(status.kind, text, status.stacktrace))
    return plain if pickles(([plain],)) else plain.put_data(None)


def pickles(value: Any) -> bool:
    """Whether a value can cross.

    It is read back as well: some values can be pickled, and their pickles not be read.
    """
    try:
        pickle.loads(_pickled(value))  # noqa: S301 - what was just pickled
    except Exception:  # of a user's class; not KeyboardInterrupt, SystemExit
        return False
    return True


def portable_error(error: BaseException) -> BaseException:
    """The error, or if it cannot cross one that has its text."""
    return error if pickles(error) else PipelineError(f"{type(error).__name__}: {error}")
