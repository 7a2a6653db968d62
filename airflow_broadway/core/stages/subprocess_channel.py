"""The pipe between a process task and the child processes of its processors.

Values are sent pickled: written by one end and read by the other, never stored (ADR 7).
Acknowledgers stay in the parent: a message's own is sent as a number, and calls of it are sent back
over the pipe.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Final

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.acks import NoopAcknowledger
from airflow_broadway.core.model.message import Message, Status

_LENGTH: Final = struct.Struct("!Q")
#: In the child: its end of the pipe.
_channel: PipeChannel | None = None
#: In the parent: number → acknowledger, for the acknowledgers of messages in the child.
_away: dict[int, Any] = {}
_away_lock = threading.Lock()


class UnreadableValue(PipelineError):
    """A value from the other process that cannot be unpickled."""


class PipeChannel:
    """Sends and receives pickled values over a pair of pipes."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader = reader
        self._writer = writer
        self._lock = threading.RLock()

    def send(self, value: Any) -> None:
        body = _pickle(value)
        with self._lock:
            self._writer.write(_LENGTH.pack(len(body)))
            self._writer.write(body)
            self._writer.flush()

    def call(self, value: Any) -> Any:
        """Sends a request, and returns the response; one thread at a time.

        :raises Exception: The exception of the other end.
        """
        with self._lock:
            self.send(value)
            kind, response = self.receive()
        if kind == "raise":
            raise response
        return response

    def receive(self) -> Any:
        """Receives the next value.

        :raises EOFError: If the other end has closed.
        :raises UnreadableValue: If it cannot be unpickled, such as an exception of a module that
            only the other process can import.
        """
        body = self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0])
        try:
            # Written by our own child or parent, over a private pipe: ADR 7.
            return pickle.loads(body)  # noqa: S301
        except Exception as error:  # of a user's class; not SystemExit
            raise UnreadableValue(
                f"a value that cannot be read here ({type(error).__name__}: {error})"
            ) from error

    def _read(self, size: int) -> bytes:
        body = self._reader.read(size)
        if len(body) < size:  # the other end died while writing
            raise EOFError
        return body

    def close(self) -> None:
        for pipe in (self._writer, self._reader):
            with suppress(OSError):  # the other end has closed
                pipe.close()


def connect(reader: IO[bytes], writer: IO[bytes]) -> PipeChannel:
    """Creates the child's end; acknowledgers received from now on are remote ones."""
    global _channel  # noqa: PLW0603 - the child has one channel
    _channel = PipeChannel(reader, writer)
    return _channel


def acknowledger_of(number: int) -> Any:
    """Returns, in the parent, the acknowledger that was sent as this number."""
    return _away[number]


def _pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    for kind in _acknowledger_types(value):
        pickler.dispatch_table[kind] = _reduce
    pickler.dump(value)
    return buffer.getvalue()


def _acknowledger_types(value: Any) -> set[type]:
    """Returns the types of the acknowledgers in a chunk or result, which are not pickled."""
    types: set[type] = {RemoteAcknowledger}
    for part in value if isinstance(value, tuple) else ():
        for item in part if isinstance(part, list) else ():
            if type(item) is Message:
                types.add(type(item.acknowledger.acknowledger))
    types.discard(NoopAcknowledger)
    return types


def _reduce(acknowledger: Any) -> tuple[Any, ...]:
    """Reduces an acknowledger to a number, and the names of its methods besides ``ack``."""
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
    """An acknowledger of the parent, in the child, by its number."""

    known: dict[int, RemoteAcknowledger] = {}  # noqa: RUF012 - one registry per child

    def __init__(self, number: int, can: tuple[str, ...], channel: PipeChannel) -> None:
        self.number = number
        self.can = can
        self._channel = channel

    def ack(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
        """Settles in the parent."""
        self._call("ack", ack_ref, portable(successful), portable(failed))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self.__dict__.get("can", ()):
            return lambda *arguments: self._call(name, *arguments)
        raise AttributeError(name)

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._channel.call(("call", self.number, method, *arguments))


def portable(messages: list[Message]) -> list[Message]:
    """Returns picklable messages: one that cannot be pickled fails, without its data."""
    if pickles((messages,)):
        return messages
    return [message if pickles(([message],)) else _make_portable(message) for message in messages]


def _make_portable(message: Message) -> Message:
    status = message.status
    if status.kind == "ok":
        error = PipelineError(
            f"with executor='processes' a message must be picklable, got: {message.data!r:.200}"
        )
        return message.replace(status=Status("error", error), data=None)
    text = status.text.removeprefix("SystemExit: ") if status.kind == "exit" else status.text
    plain = message.replace(status=Status(status.kind, text, status.stacktrace))
    return plain if pickles(([plain],)) else plain.put_data(None)


def pickles(value: Any) -> bool:
    """Returns whether a value can be pickled.

    It is unpickled as well: some values can be pickled, but not unpickled.
    """
    try:
        pickle.loads(_pickle(value))  # noqa: S301 - what was just pickled
    except Exception:  # of a user's class; not KeyboardInterrupt, SystemExit
        return False
    return True


def portable_error(error: BaseException) -> BaseException:
    """Returns the error, or one with its text if it cannot be pickled."""
    return error if pickles(error) else PipelineError(f"{type(error).__name__}: {error}")
