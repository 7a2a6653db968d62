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
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Final

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.acknowledger import Scope, ack_messages, is_settled
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.message import NO_ACK, Message, NoopAcknowledger, Status
from airflow_broadway.core.model.reference import load_ref, make_ref
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.text import many

if TYPE_CHECKING:
    from airflow_broadway.core.model.pipeline import Pipeline
    from airflow_broadway.core.stages.processor import ChunkResult, Convert

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
        # Written by our own child or parent, over a pipe that nobody else holds: ADR 7.
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
    if _pickles((messages,)):
        return messages
    return [each if _pickles(([each],)) else _made_portable(each) for each in messages]


def _made_portable(message: Message) -> Message:
    status = message.status
    if status.kind == "ok":
        error = PipelineError(
            f"with executor='processes' a message must be picklable, got: {message.data!r:.200}"
        )
        return message.with_status(Status("error", error)).put_data(None)
    text = status.text.removeprefix("SystemExit: ") if status.kind == "exit" else status.text
    plain = message.with_status(Status(status.kind, text, status.stacktrace))
    return plain if _pickles(([plain],)) else plain.put_data(None)


class ProcessProcessor:
    """One processor in a process of its own; the parent's end.

    :param ack: Settles a chunk's result; called in the thread that calls :meth:`handle`.
    :param convert: As for ``ProcessorStage``; a class or function of a module, made in the child.
    :param stop: When no further message is begun, in the child too.
    :param traces: As for ``ProcessorStage``.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        index: int = 0,
        ack: Callable[[list[Message], list[Message]], None] = ack_messages,
        convert: Convert | None = None,
        stop: Stop | None = None,
        traces: bool = True,
    ) -> None:
        self._pipeline = pipeline
        self._index = index
        self._ack = ack
        self._convert = convert
        self._traces = traces
        self._ref = make_ref(pipeline)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: _Channel | None = None
        self._stop = stop
        if stop is not None:
            stop.on_told.append(self._tell_child)

    def _tell_child(self) -> None:
        """Let the child begin nothing after its time; it has this signal from Airflow as well."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

    def _start(self) -> _Channel:
        # With this process's path: -P leaves out the working folder, which -m would put before it.
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "airflow_broadway.core.stages.subprocess_processor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        if process.stdin is None or process.stdout is None:  # pragma: no cover - we asked for both
            raise PipelineError("a processor's process has no pipes")
        self._process = process
        self._channel = _Channel(process.stdout, process.stdin)
        shutdown = None if self._stop is None else self._stop.shutdown
        about = (self._ref, self._pipeline.run, self._index, self._convert, shutdown, self._traces)
        self._channel.send(about)
        return self._channel

    def handle(self, chunk: list[Message]) -> ChunkResult:
        """Have the child handle one chunk.

        :raises PipelineError: If the child dies or cannot load the pipeline.
        """
        from airflow_broadway.core.stages.processor import ChunkResult

        channel = self._channel or self._start()
        try:
            left = None if self._stop is None else self._stop.left()
            until = None if left is None else time.monotonic() + left  # the machine's, in both
            channel.send((telemetry.wanted(), until, chunk))
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
            if code == -signal.SIGTERM and self._stop is not None and self._stop.reason():
                return ChunkResult([], [])  # told to stop before it could listen: it began nothing
            raise PipelineError(
                f"the process of processor {self._index} of {self._pipeline.name!r} died with exit"
                f" code {code} while it handled {many(len(chunk), 'message')}"
            ) from None

    def _result(self, successful: list[Message], failed: list[Message]) -> ChunkResult:
        from airflow_broadway.core.stages.processor import ChunkResult

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
            except Exception as error:  # the callback's to handle; a kill ends this process
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
    from airflow_broadway.core.stages.processor import ProcessorStage

    global _channel  # noqa: PLW0603 - the child has one channel
    stop: Stop | None = None

    def told(number: int, frame: object) -> None:
        if stop is not None:
            stop.tell("signal")

    # The parent decides, and ends this process; a signal to the group reaches it too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, told)
    logging.basicConfig(level=logging.INFO)
    # The pipes are this module's: callbacks, and what they start, read nothing, and print to
    # where the log goes.
    own_input, own_output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    _channel = channel = _Channel(own_input, own_output)
    ref, run, index, convert, shutdown, traces = channel.receive()
    if shutdown is not None:
        stop = Stop(SystemClock(), shutdown)
    try:
        pipeline = load_ref(ref, run)
        stage = ProcessorStage(
            pipeline,
            index=index,
            ack=lambda successful, failed: None,
            convert=convert,
            stop=stop,
            traces=traces,
        )
    except BaseException as error:  # raised again in the parent, whatever it is
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
            wanted, until, chunk = channel.receive()
        except EOFError:
            return
        if stop is not None and until is not None:
            stop.bound(until - time.monotonic())
        handler = telemetry.attach(tell, events=wanted) if wanted else None
        try:
            result = stage.handle(chunk)
        except BaseException as error:  # raised again in the parent, whatever it is
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
    """Whether the other end can read it: what goes in may be refused only as it comes out."""
    try:
        pickle.loads(_pickled(value))  # noqa: S301 - what was just pickled
    except Exception:  # whatever a user's __reduce__ or constructor raises; no kill is one
        return False
    return True


def _portable_error(error: BaseException) -> BaseException:
    return error if _pickles(error) else PipelineError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # The module runs under another name here; its names must be those that pickles carry.
    importlib.import_module("airflow_broadway.core.stages.subprocess_processor").main()
