"""A processor in a process of its own: for callbacks that compute.

The child is started by its module's name, with nothing of the parent's memory: it loads the
pipeline by its reference, once.  Chunks and results go through a pair of pipes, pickled: between
two processes of one task, never stored.  While the child works on a chunk it may call back: for
``ack_immediately`` (the acknowledger stays in the parent, so it is as immediate as anywhere), for
``configure_ack``, and with telemetry.

User code that prints goes to the task's log: the child's standard output is its error output.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import logging
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Final

from airflow_broadway.core import telemetry
from airflow_broadway.core.acknowledger import Scope, ack_messages, is_settled
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.message import NO_ACK, Message, NoopAcknowledger, Status

if TYPE_CHECKING:
    from airflow_broadway.core.broadway import Broadway
    from airflow_broadway.core.processor import ChunkResult, Convert

__all__ = ["ProcessProcessor"]

_LENGTH: Final = struct.Struct("!Q")
#: Set in the child; what :func:`_acknowledger` returns depends on it.
_channel: _Channel | None = None
#: In the parent: number → acknowledger, for the acknowledgers of messages that are away.
_away: dict[int, Any] = {}
_away_lock = threading.Lock()


class _Channel:
    """Sends and receives pickled values over a pair of pipes."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, value: Any) -> None:
        body = _pickled(value)
        self._writer.write(_LENGTH.pack(len(body)))
        self._writer.write(body)
        self._writer.flush()

    def receive(self) -> Any:
        head = self._reader.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            raise EOFError
        # Written by our own child or parent, over a pipe that nobody else holds.
        return pickle.loads(self._reader.read(_LENGTH.unpack(head)[0]))  # noqa: S301

    def close(self) -> None:
        for pipe in (self._writer, self._reader):
            try:
                pipe.close()
            except OSError:  # the other end is gone
                pass


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    for kind in _kinds(value):
        pickler.dispatch_table[kind] = _reduce
    pickler.dump(value)
    return buffer.getvalue()


def _kinds(value: Any) -> set[type]:
    """The types of the acknowledgers in a chunk or in a result."""
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
        return _away[number]
    known = RemoteAcknowledger.known
    if number not in known:
        known[number] = RemoteAcknowledger(number, can, _channel)
    return known[number]


class RemoteAcknowledger:
    """In the child: an acknowledger of the parent, by its number."""

    known: dict[int, RemoteAcknowledger] = {}  # noqa: RUF012 - one registry per child

    def __init__(self, number: int, can: tuple[str, ...], channel: _Channel) -> None:
        self.number = number
        self.can = can
        self._channel = channel

    def ack(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
        """Settle in the parent."""
        self._call("ack", ack_ref, _portable(successful), _portable(failed))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self.__dict__.get("can", ()):
            return lambda *arguments: self._call(name, *arguments)
        raise AttributeError(name)

    def _call(self, method: str, *arguments: Any) -> Any:
        self._channel.send(("call", self.number, method, *arguments))
        kind, value = self._channel.receive()
        if kind == "raise":
            raise value
        return value


def _portable(messages: list[Message]) -> list[Message]:
    """``messages`` such that they can be pickled: what cannot fails its message."""
    if _are_portable(messages):
        return messages
    return [each if _are_portable([each]) else _made_portable(each) for each in messages]


def _are_portable(messages: list[Message]) -> bool:
    try:
        pickle.loads(_pickled((messages,)))  # noqa: S301 - what was just pickled
    except Exception:
        return False
    return True


def _made_portable(message: Message) -> Message:
    status = message.status
    if status.kind == "ok":
        error = PipelineError(
            f"with executor='processes' a message must be picklable, got: {message.data!r:.200}"
        )
        return message.with_status(Status("error", error)).put_data(None)
    plain = message.with_status(Status(status.kind, status.text, status.stacktrace))
    return plain if _are_portable([plain]) else plain.put_data(None)


class ProcessProcessor:
    """One processor in a process of its own; the parent's end.

    :param ack: Settles a chunk's result; called in the thread that calls :meth:`handle`.
    :param convert: As for ``ProcessorStage``; a class or function of a module, made in the child.
    """

    def __init__(
        self,
        pipeline: Broadway,
        *,
        index: int = 0,
        ack: Callable[[list[Message], list[Message]], None] = ack_messages,
        convert: Convert | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._index = index
        self._ack = ack
        self._convert = convert
        self._ref = pipeline.ref()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: _Channel | None = None

    def _start(self) -> _Channel:
        process = subprocess.Popen(
            [sys.executable, "-m", "airflow_broadway.core.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if process.stdin is None or process.stdout is None:  # pragma: no cover - we asked for both
            raise PipelineError("a processor's process has no pipes")
        self._process = process
        self._channel = _Channel(process.stdout, process.stdin)
        self._channel.send((self._ref, self._pipeline.run, self._index, self._convert))
        return self._channel

    def handle(self, chunk: list[Message]) -> ChunkResult:
        """Have the child handle one chunk.

        :raises PipelineError: If the child dies or cannot load the pipeline.
        """
        channel = self._channel or self._start()
        try:
            channel.send((telemetry.wanted(), chunk))
            while True:
                kind, *rest = channel.receive()
                if kind == "result":
                    return self._result(*rest)
                if kind == "event":
                    self._tell(*rest)
                elif kind == "raise":
                    raise rest[0]
                else:
                    channel.send(self._answer(*rest))
        except (EOFError, BrokenPipeError):
            process = self._process
            code = None if process is None else process.wait(10.0)
            self.close()
            raise PipelineError(
                f"the process of processor {self._index} of {self._pipeline.name!r} died with exit"
                f" code {code} while it handled {len(chunk)} messages"
            ) from None

    def _result(self, successful: list[Message], failed: list[Message]) -> ChunkResult:
        from airflow_broadway.core.processor import ChunkResult

        result = ChunkResult(_sealed(successful), _sealed(failed))
        with Scope("process"):
            if not self._pipeline.batchers:
                self._ack(*result)
            elif result.failed:
                self._ack([], result.failed)
        return result

    def _answer(self, number: int, method: str, *arguments: Any) -> tuple[str, Any]:
        with Scope("process"):
            try:
                return "ok", getattr(_away[number], method)(*arguments)
            except Exception as error:
                return "raise", _portable_error(error)

    def _tell(self, event: str, measurements: Any, metadata: dict[str, Any]) -> None:
        telemetry.emit(event, measurements, {**metadata, "producer": self._pipeline.producer})

    def close(self) -> None:
        """End the child; it finishes no chunk."""
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if process is None or channel is None:
            return
        process.kill()
        channel.close()
        process.wait()


def _sealed(messages: list[Message]) -> list[Message]:
    # What was settled at once comes back with an equal NO_ACK; give it the one that all share.
    return [
        message.with_acknowledger(NO_ACK) if is_settled(message) else message
        for message in messages
    ]


def main() -> None:
    """Serve chunks until the parent closes the pipe."""
    from airflow_broadway.core.broadway import Broadway
    from airflow_broadway.core.processor import ProcessorStage

    global _channel  # noqa: PLW0603 - the child has one channel
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and ends this process
    logging.basicConfig(level=logging.INFO)
    own_output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _channel = channel = _Channel(sys.stdin.buffer, own_output)
    ref, run, index, convert = channel.receive()
    try:
        pipeline = Broadway.load(ref, run)
        stage = ProcessorStage(
            pipeline, index=index, ack=lambda successful, failed: None, convert=convert
        )
    except BaseException as error:
        channel.receive()
        channel.send(("raise", _portable_error(error)))
        return

    def tell(event: str, measurements: Any, metadata: Any) -> None:
        about = {**metadata}
        about.pop("producer", None)
        about["context"] = None if not _pickles(about.get("context")) else about["context"]
        for name, value in about.items():
            if name == "message":
                about[name] = _portable([value])[0]
            elif isinstance(value, list):
                about[name] = _portable(value)
            elif name == "reason" and not _pickles(value):
                about[name] = f"{type(value).__name__}: {value}"
        channel.send(("event", event, measurements, about))

    while True:
        try:
            wanted, chunk = channel.receive()
        except EOFError:
            return
        handler = telemetry.attach(tell, events=wanted) if wanted else None
        try:
            result = stage.handle(chunk)
        except BaseException as error:
            channel.send(("raise", _portable_error(error)))
        else:
            successful = _portable(result.successful)
            lost = [message for message in successful if not message.ok]
            if lost:
                successful = [message for message in successful if message.ok]
            channel.send(("result", successful, [*_portable(result.failed), *lost]))
        finally:
            if handler is not None:
                telemetry.detach(handler)


def _pickles(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - what was just pickled
    except Exception:
        return False
    return True


def _portable_error(error: BaseException) -> BaseException:
    return error if _pickles(error) else PipelineError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # The module runs under another name here; its names must be those that pickles carry.
    importlib.import_module("airflow_broadway.core.worker").main()
