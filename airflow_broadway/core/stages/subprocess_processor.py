"""A processor in a child process, for CPU-bound callbacks.

The child is started by its module's name, without the parent's memory: it loads the pipeline by its
reference, once.  Chunks and results are sent over a pair of pipes, pickled: between two processes
of one task, never stored.  While the child handles a chunk it may send requests: for
``ack_immediately`` (the acknowledger stays in the parent, so it is as immediate as anywhere), for
``configure_ack``, and with telemetry.

Output of user code is in the task's log: the child's standard output is its standard error.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any, Final

from airflow_broadway.core import telemetry
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.log_context import ids_now
from airflow_broadway.core.model.acks import (
    NO_ACK,
    Scope,
    ack_messages,
    deferred_by,
    is_settled,
)
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import make_ref
from airflow_broadway.core.stages.child_host import ChildHost
from airflow_broadway.core.stages.processor import Ack, ChunkResult, Convert
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.stages.subprocess_channel import (
    PipeChannel,
    UnreadableValue,
    acknowledger_of,
    portable_error,
)
from airflow_broadway.core.text import pluralize

#: Seconds in which a child that has closed its pipe is expected to exit.
_END_TIMEOUT: Final = 2.0


class ProcessDied(PipelineError):
    """A processor's child process died while it handled a chunk, and its parent lives.

    :param ending: How it ended, for display: an exit code or a signal.
    :param settled: Ids of the chunk's messages that callbacks had settled by then.
    """

    def __init__(self, text: str, *, ending: str, settled: frozenset[str]) -> None:
        super().__init__(text)
        self.ending = ending
        self.settled = settled


class SubprocessProcessor:
    """One processor in a child process; the parent's end.

    :param ack: Settles a chunk's result; called in the thread that calls :meth:`handle`.
    :param convert: As for ``ProcessorStage``; a class or function of a module, called in the child.
    :param stop: Stops the processor: no further message is begun, in the child too.
    :param traces: As for ``ProcessorStage``.
    :param enters: Whether the child also runs ``transformer`` and ``partition_by``.
    :param host: Answers requests of callbacks in the child.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        index: int = 0,
        ack: Ack = ack_messages,
        convert: Convert | None = None,
        stop: Stop | None = None,
        traces: bool = True,
        enters: bool = False,
        host: ChildHost | None = None,
    ) -> None:
        self._host = host
        self.pipeline = pipeline
        self._index = index
        self.name = f"the process of processor {index} of {pipeline.name!r}"
        self._ack = ack
        self._convert = convert
        self._traces = traces
        self._enters = enters
        #: Ids of messages that callbacks settled while the current chunk was handled.
        self._settled: set[str] = set()
        self._ref = make_ref(pipeline)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: PipeChannel | None = None
        self._closed = False
        self._lock = threading.Lock()
        self.stop = stop
        if stop is not None:
            stop.on_request.append(self._signal_child)

    def _signal_child(self) -> None:
        """Signals the stop to the child; Airflow sends it this signal, too."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

    def start(self) -> bool:
        """Starts the child, unless it is running; returns whether it is: not after a stop.

        :raises PipelineError: If it dies before it has loaded the pipeline and its context: no
            message is to blame then.
        """
        if self._channel is not None:
            return True
        try:
            self._start()
        except (EOFError, BrokenPipeError):
            ending = self._ending()
        except BaseException:  # also on KeyboardInterrupt and a timeout; re-raised
            self._end_child()
            raise
        else:
            return True
        if self._is_stopped():
            return False
        raise PipelineError(
            f"{self.name} ended with {ending} while it loaded the pipeline and called setup(): it"
            " has handled no message"
        )

    def _is_stopped(self) -> bool:
        return self._closed or (self.stop is not None and bool(self.stop.reason()))

    def _start(self) -> None:
        # With this process's path: -P omits the working directory, which -m would prepend.
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with self._lock:
            if self._closed:
                raise EOFError
            self._process = process = self._spawn(path)
        if process.stdin is None or process.stdout is None:  # pragma: no cover - both are PIPE
            raise PipelineError("a processor's process has no pipes")
        self._channel = PipeChannel(process.stdout, process.stdin)
        shutdown = None if self.stop is None else self.stop.shutdown
        setup = (self._ref, self.pipeline.run, self._index, self._convert, shutdown, self._traces)
        connect_host = "" if self._host is None else self._host.connect
        self._channel.send((*setup, self._enters, connect_host, ids_now()))
        while True:
            kind, *rest = self._channel.receive()
            if kind == "ready":
                return
            if kind == "raise":
                raise rest[0]
            self._channel.send(self._answer_for_host(*rest))

    @staticmethod
    def _spawn(path: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "airflow_broadway.core.stages.subprocess_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )

    def handle(self, chunk: list[Message]) -> ChunkResult:
        """Handles one chunk in the child.

        :raises ProcessDied: If the child dies meanwhile; the next chunk gets a new one.
        :raises PipelineError: If the child cannot load the pipeline.
        """
        self._settled = set()
        if not self.start():
            return ChunkResult([], [])
        try:
            assert self._channel is not None
            return self._exchange(self._channel, chunk)
        except (EOFError, BrokenPipeError):
            ending = self._ending()
        except UnreadableValue as error:
            ending = str(error)
            self._end_child()
        except BaseException:  # also on KeyboardInterrupt and a timeout; re-raised
            self._end_child()  # the pipe may be in the middle of a value
            raise
        if self._is_stopped():
            return ChunkResult([], [])  # the messages in process are released
        raise ProcessDied(
            f"{self.name} ended with {ending} while it handled {pluralize(len(chunk), 'message')}",
            ending=ending,
            settled=frozenset(self._settled),
        )

    def _exchange(self, channel: PipeChannel, chunk: list[Message]) -> ChunkResult:
        """Sends a chunk, and answers the child until it sends the result."""
        left = None if self.stop is None else self.stop.left()
        until = None if left is None else time.monotonic() + left  # one clock for both processes
        channel.send((telemetry.wanted(), until, chunk))
        while True:
            kind, *rest = channel.receive()
            if kind == "result":
                successful, failed, terminated = rest
                result = self.settle(_share_no_ack(successful), _share_no_ack(failed))
                if terminated and not self._is_stopped():
                    self._end_child()  # it begins no further message, but the run continues
                return result
            if kind == "event":
                self._emit(*rest)
            elif kind == "raise":
                raise rest[0]
            elif kind == "host":
                channel.send(self._answer_for_host(*rest))
            else:
                channel.send(self._answer(*rest))

    def _ending(self) -> str:
        """Waits for the child, which has closed its pipe; returns how it ended."""
        process, code = self._process, None
        with suppress(subprocess.TimeoutExpired):  # a callback closed the pipe, but lives
            code = None if process is None else process.wait(_END_TIMEOUT)
        self._end_child()
        if code is None:
            return "a closed pipe"
        if code < 0:
            with suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit code {code}"

    def settle(self, successful: list[Message], failed: list[Message]) -> ChunkResult:
        """Settles a result as a stage in a thread would."""
        with Scope("process"):
            if not self.pipeline.batchers:
                self._ack(successful, failed)
            elif failed:
                self._ack([], failed)
        return ChunkResult(successful, failed)

    def _answer(self, number: int, method: str, *arguments: Any) -> tuple[str, Any]:
        with Scope("process"):
            try:
                result = getattr(acknowledger_of(number), method)(*arguments)
            except Exception as error:  # for the callback to handle
                return "raise", portable_error(error)
        if method in ("ack", "ack_now"):
            _, successful, failed = arguments
            ids = {message.message_id for message in (*successful, *failed)}
            self._settled |= ids - deferred_by(result)
        return "ok", result

    def _answer_for_host(self, request: Any) -> tuple[str, Any]:
        assert self._host is not None
        try:
            return "ok", self._host.answer(request)
        except Exception as error:  # for the callback to handle
            return "raise", portable_error(error)

    def _emit(self, event: str, measurements: Any, metadata: dict[str, Any]) -> None:
        telemetry.emit(event, measurements, {**metadata, "producer": self.pipeline.producer})

    def close(self) -> None:
        """Ends the child; it finishes no chunk, and is not replaced."""
        with self._lock:
            self._closed = True
        self._end_child()

    def _end_child(self) -> None:
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if process is None or channel is None:
            return
        process.kill()
        channel.close()
        process.wait()


def _share_no_ack(messages: list[Message]) -> list[Message]:
    # Messages settled immediately are received with an equal NO_ACK; replace it by the shared one.
    return [
        message.with_acknowledger(NO_ACK) if is_settled(message) else message
        for message in messages
    ]
