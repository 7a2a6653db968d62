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
import time
from contextlib import suppress
from typing import Any

from airflow_broadway.core import telemetry
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.log_context import ids_now
from airflow_broadway.core.model.acks import NO_ACK, Scope, ack_messages, is_settled
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import make_ref
from airflow_broadway.core.stages.processor import Ack, ChunkResult, Convert
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.stages.subprocess_channel import (
    PipeChannel,
    acknowledger_of,
    portable_error,
)
from airflow_broadway.core.text import many

__all__ = ["SubprocessProcessor"]


class SubprocessProcessor:
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
        ack: Ack = ack_messages,
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
        self._channel: PipeChannel | None = None
        self._stop = stop
        if stop is not None:
            stop.on_request.append(self._signal_child)

    def _signal_child(self) -> None:
        """Let the child begin nothing after its time; it has this signal from Airflow as well."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

    def _start(self) -> PipeChannel:
        # With this process's path: -P leaves out the working folder, which -m would put before it.
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "airflow_broadway.core.stages.subprocess_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        if process.stdin is None or process.stdout is None:  # pragma: no cover - we asked for both
            raise PipelineError("a processor's process has no pipes")
        self._process = process
        self._channel = PipeChannel(process.stdout, process.stdin)
        shutdown = None if self._stop is None else self._stop.shutdown
        about = (self._ref, self._pipeline.run, self._index, self._convert, shutdown, self._traces)
        self._channel.send((*about, ids_now()))
        return self._channel

    def handle(self, chunk: list[Message]) -> ChunkResult:
        """Have the child handle one chunk.

        :raises PipelineError: If the child dies or cannot load the pipeline.
        """
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
                    self._emit(*rest)
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
                return "ok", getattr(acknowledger_of(number), method)(*arguments)
            except Exception as error:  # the callback's to handle; a kill ends this process
                return "raise", portable_error(error)

    def _emit(self, event: str, measurements: Any, metadata: dict[str, Any]) -> None:
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
