"""The child process of a processor: the other end of :mod:`.subprocess_processor`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import IO, Any

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.log_context import log_ids, log_plainly
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.reference import load_ref
from airflow_broadway.core.stages.callbacks import context_of
from airflow_broadway.core.stages.child_safety import tie_to_parent
from airflow_broadway.core.stages.entry import MessageEntry
from airflow_broadway.core.stages.processor import Convert, ProcessorStage
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.stages.subprocess_channel import (
    PipeChannel,
    connect,
    pickles,
    portable,
    portable_error,
)


class _Child:
    """Handles chunks until the parent closes the pipe."""

    def __init__(self) -> None:
        self._stop: Stop | None = None
        self._terminated = False
        tie_to_parent()  # a parent that has died already has closed the pipe
        # The parent decides, and ends this process; a signal to the process group reaches it, too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._request_stop)
        self._channel = _own_channel()

    def _request_stop(self, number: int, frame: object) -> None:
        self._terminated = True
        if self._stop is not None:
            self._stop.request("signal")

    def serve(self) -> None:
        """Loads the pipeline, then handles chunks; exceptions are raised in the parent."""
        *setup, ids = self._channel.receive()
        with log_ids(**ids):
            self._serve(setup)

    def _serve(self, setup: Sequence[Any]) -> None:
        *setup, enters, connect_host = setup
        try:
            if connect_host:
                resolve_name(connect_host)(lambda request: self._channel.call(("host", request)))
            stage = self._make_stage(*setup)
            context_of(stage.pipeline)
        except BaseException as error:
            self._channel.send(("raise", portable_error(error)))
            return
        pipeline = stage.pipeline
        entry = MessageEntry(pipeline, pipeline.producer.transformer) if enters else None
        self._channel.send(("ready",))
        while True:
            try:
                events, until, chunk = self._channel.receive()
            except EOFError:
                return
            if self._stop is not None and until is not None:
                self._stop.bound(until - time.monotonic())
            self._handle(stage, chunk, events, entry)

    def _make_stage(
        self,
        ref: Mapping[str, Any],
        run: RunInfo,
        index: int,
        convert: Convert | None,
        shutdown: float | None,
        traces: bool,
    ) -> ProcessorStage:
        if shutdown is not None:
            self._stop = Stop(SystemClock(), shutdown)
        return ProcessorStage(
            load_ref(ref, run),
            index=index,
            ack=lambda successful, failed: None,  # the parent acknowledges
            convert=convert,
            stop=self._stop,
            traces=traces,
        )

    def _handle(
        self,
        stage: ProcessorStage,
        chunk: list[Message],
        events: list[str],
        entry: MessageEntry | None,
    ) -> None:
        """Handles a chunk, and sends its result.

        :param events: The events for which the parent has a handler.
        :param entry: Transforms the messages, unless the parent has done so.
        """
        handler = telemetry.attach(self._send_event, events=events) if events else None
        try:
            if entry is not None:
                chunk = [entry.enter(message)[1] for message in chunk]
            result = stage.handle(chunk)
        except BaseException as error:
            self._channel.send(("raise", portable_error(error)))
        else:
            successful = result.successful
            if entry is not None and not stage.pipeline.batchers:
                # The parent does not use the data of such results, so it need not be sent.
                successful = [message.put_data(None) for message in successful]
            successful = portable(successful)
            lost = [message for message in successful if not message.ok]
            if lost:
                successful = [message for message in successful if message.ok]
            failed = [*portable(result.failed), *lost]
            self._channel.send(("result", successful, failed, self._terminated))
        finally:
            if handler is not None:
                telemetry.detach(handler)

    def _send_event(
        self, event: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]
    ) -> None:
        portable_metadata = {name: _portable_value(name, value) for name, value in metadata.items()}
        portable_metadata.pop("producer", None)  # the parent has it
        self._channel.send(("event", event, measurements, portable_metadata))


def _portable_value(name: str, value: Any) -> Any:
    """Returns a picklable value of an event's metadata."""
    if name == "message":
        return portable([value])[0]
    if name == "context":
        return value if pickles(value) else None
    if isinstance(value, list):
        return portable(value)
    if name == "reason" and not pickles(value):
        return f"{type(value).__name__}: {value}"
    return value


def _own_channel() -> PipeChannel:
    """Hides the pipes from callbacks, and from processes that they start.

    Their standard input is empty, and their standard output is the log.
    """
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as devnull:
        os.dup2(devnull.fileno(), 0)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=lambda: _disconnect(reader, writer))
    return connect(reader, writer)


def _disconnect(*pipes: IO[bytes]) -> None:
    """Detaches a fork of this process from the pipes: the parent would wait for its end, too."""
    with open(os.devnull, "r+b", buffering=0) as devnull:
        for pipe in pipes:
            os.dup2(devnull.fileno(), pipe.fileno(), inheritable=False)


def main() -> None:
    """Runs the child."""
    log_plainly()
    _Child().serve()


if __name__ == "__main__":
    main()
