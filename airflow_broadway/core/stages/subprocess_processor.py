"""A processor in a process of its own: for callbacks that compute.

The child is started by its module's name, with nothing of the parent's memory: it loads the
pipeline by its reference, once.  Chunks and results go through a pair of pipes, pickled: between
two processes of one task, never stored.  While the child works on a chunk it may call back: for
``ack_immediately`` (the acknowledger stays in the parent, so it is as immediate as anywhere), for
``configure_ack``, and with telemetry.

User code that prints goes to the task's log: the child's standard output is its error output.
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
from airflow_broadway.core.model.acks import NO_ACK, Scope, ack_messages, is_settled
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
from airflow_broadway.core.text import many

#: Seconds within which a child that has closed its pipe is expected to end.
_END_TIMEOUT: Final = 2.0


class ProcessDied(PipelineError):
    """A processor's child process ended while it handled a chunk, and its parent lives.

    :param ending: How it ended, for people: an exit code or a signal.
    :param settled: Ids of the messages of the chunk that callbacks had settled by then.
    """

    def __init__(self, text: str, *, ending: str, settled: frozenset[str]) -> None:
        super().__init__(text)
        self.ending = ending
        self.settled = settled


class SubprocessProcessor:
    """One processor in a process of its own; the parent's end.

    :param ack: Settles a chunk's result; called in the thread that calls :meth:`handle`.
    :param convert: As for ``ProcessorStage``; a class or function of a module, made in the child.
    :param stop: When no further message is begun, in the child too.
    :param traces: As for ``ProcessorStage``.
    :param enters: Whether the child transforms messages and asks ``partition_by`` too.
    :param host: What callbacks in the child may ask.
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
        #: Ids of the messages that callbacks settled while the chunk at hand was handled.
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
        """Let the child begin nothing after its time; it has this signal from Airflow as well."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

    def start(self) -> bool:
        """Start the child, unless there is one; whether there is one then: not after a stop.

        :raises PipelineError: If it ends before it has loaded the pipeline and its context: no
            message is to blame then.
        """
        if self._channel is not None:
            return True
        try:
            self._start()
        except (EOFError, BrokenPipeError):
            ending = self._ending()
        except BaseException:  # also on KeyboardInterrupt and a time-out; re-raised
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
        # With this process's path: -P leaves out the working folder, which -m would put before it.
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        with self._lock:
            if self._closed:
                raise EOFError
            self._process = process = self._spawn(path)
        if process.stdin is None or process.stdout is None:  # pragma: no cover - we asked for both
            raise PipelineError("a processor's process has no pipes")
        self._channel = PipeChannel(process.stdout, process.stdin)
        shutdown = None if self.stop is None else self.stop.shutdown
        about = (self._ref, self.pipeline.run, self._index, self._convert, shutdown, self._traces)
        connect_host = "" if self._host is None else self._host.connect
        self._channel.send((*about, self._enters, connect_host, ids_now()))
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
        """Have the child handle one chunk.

        :raises ProcessDied: If the child ends meanwhile; the next chunk gets another one.
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
        except BaseException:  # also on KeyboardInterrupt and a time-out; re-raised
            self._end_child()  # the pipe may be in the middle of a value
            raise
        if self._is_stopped():
            return ChunkResult([], [])  # what it was at goes back
        raise ProcessDied(
            f"{self.name} ended with {ending} while it handled {many(len(chunk), 'message')}",
            ending=ending,
            settled=frozenset(self._settled),
        )

    def _exchange(self, channel: PipeChannel, chunk: list[Message]) -> ChunkResult:
        """Send a chunk, and serve the child until its result is there."""
        left = None if self.stop is None else self.stop.left()
        until = None if left is None else time.monotonic() + left  # the machine's, in both
        channel.send((telemetry.wanted(), until, chunk))
        while True:
            kind, *rest = channel.receive()
            if kind == "result":
                successful, failed, terminated = rest
                result = self.settle(_sealed(successful), _sealed(failed))
                if terminated and not self._is_stopped():
                    self._end_child()  # it begins no message any more, and the run goes on
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
        """Wait for the child, which has closed its pipe; how it ended."""
        process, code = self._process, None
        with suppress(subprocess.TimeoutExpired):  # a callback closed the pipe, and lives
            code = None if process is None else process.wait(_END_TIMEOUT)
        self._end_child()
        if code is None:
            return "a closed pipe"
        if code < 0:
            with suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit code {code}"

    def settle(self, successful: list[Message], failed: list[Message]) -> ChunkResult:
        """Settle a result as the stage in a thread would."""
        with Scope("process"):
            if not self.pipeline.batchers:
                self._ack(successful, failed)
            elif failed:
                self._ack([], failed)
        return ChunkResult(successful, failed)

    def _answer(self, number: int, method: str, *arguments: Any) -> tuple[str, Any]:
        with Scope("process"):
            try:
                answer = getattr(acknowledger_of(number), method)(*arguments)
            except Exception as error:  # the callback's to handle; a kill ends this process
                return "raise", portable_error(error)
        if method in ("ack", "ack_now"):
            _, successful, failed = arguments
            self._settled.update(message.message_id for message in (*successful, *failed))
        return "ok", answer

    def _answer_for_host(self, request: Any) -> tuple[str, Any]:
        assert self._host is not None
        try:
            return "ok", self._host.answer(request)
        except Exception as error:  # the callback's to handle
            return "raise", portable_error(error)

    def _emit(self, event: str, measurements: Any, metadata: dict[str, Any]) -> None:
        telemetry.emit(event, measurements, {**metadata, "producer": self.pipeline.producer})

    def close(self) -> None:
        """End the child; it finishes no chunk, and no other follows it."""
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


def _sealed(messages: list[Message]) -> list[Message]:
    # What was settled at once comes back with an equal NO_ACK; give it the one that all share.
    return [
        message.with_acknowledger(NO_ACK) if is_settled(message) else message
        for message in messages
    ]
