"""The processors of a pipeline: ``concurrency`` of them, with results in order of arrival.

Its input are *dispatches*: the messages of one receive, of any number.  The pool transforms the
messages of each, divides them by ``partition_by``, and cuts them into chunks of ``max_demand -
min_demand``.  Chunks are smaller if that gives every processor a share, so that no message waits
for a busy processor while another is idle.  Each chunk is handled by a :class:`ProcessorStage`, in
this thread, in threads or in processes.

*Suspects*, which may have killed an earlier process, are handled apart, in a
:class:`.suspect_lane.SuspectLane`.  If order matters, their whole dispatch is, after everything in
process and before what follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle
from typing import Any, Final

from airflow_broadway.core.model.acks import ack_messages
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.child_host import ChildHost
from airflow_broadway.core.stages.entry import MessageEntry
from airflow_broadway.core.stages.failure_log import log_stuck
from airflow_broadway.core.stages.isolating_processor import IsolatingProcessor
from airflow_broadway.core.stages.processor import (
    Ack,
    ChunkResult,
    Convert,
    HeldGroups,
    ProcessorStage,
)
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.stages.subprocess_processor import SubprocessProcessor
from airflow_broadway.core.stages.suspect_lane import SuspectLane, Suspects
from airflow_broadway.core.stages.worker_pool import WorkerPool

#: The result that stands for a pause; see :meth:`ProcessorPool.map`.
TICK: Final[tuple[list[Message], ChunkResult]] = ([], ChunkResult([], []))

Handle = Callable[[list[Message]], ChunkResult]


class ProcessorPool:
    """Runs chunks through the processors of ``pipeline``.

    With ``concurrency=1`` and threads everything happens in the calling thread.

    :param ack: Settles a chunk's result; called in the thread of its processor.
    :param convert: As for :class:`ProcessorStage`; created once per processor.
    :param stop: Stops the pool: no further message is begun; those handed out by then are in
        :meth:`left`, or in neither list of their chunk's result.
    :param inline: Use no threads whatever the concurrency, for tests: processors take turns.
    :param traces: As for :class:`ProcessorStage`.
    :param transformer: Called with each message first; the producer's ``transformer``, unless the
        messages come from elsewhere.
    :param suspects: Selects the messages that are handled apart; ``None``: none.
    :param host: Answers requests of callbacks in child processes.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        ack: Ack = ack_messages,
        convert: Convert | None = None,
        stop: Stop | None = None,
        inline: bool = False,
        traces: bool = True,
        transformer: Callable[[Any], Message] | None = None,
        suspects: Suspects | None = None,
        host: ChildHost | None = None,
    ) -> None:
        options = pipeline.processors
        self._size: int = options.chunk_size
        self._count: int = options.concurrency
        self._entry = MessageEntry(pipeline, transformer)
        self._keeps_order = self._entry.has_lanes or pipeline.producer.keeps_order
        self._held = HeldGroups(pipeline.producer)
        stage: dict[str, Any] = {"ack": ack, "convert": convert, "stop": stop, "traces": traces}

        def isolating(index: int, *, enters: bool) -> IsolatingProcessor:
            child = SubprocessProcessor(pipeline, index=index, enters=enters, host=host, **stage)
            return IsolatingProcessor(child, self._held)

        make = partial(isolating, self._count, enters=True)
        self._apart = SuspectLane(suspects, make, size=options.chunk_size)
        self._closers: list[Callable[[], None]] = []
        self._undivided: list[Message] = []  # a dispatch that is being divided
        self._waiting: deque[tuple[int | None, list[Message]]] = deque()  # its chunks
        handles: list[Handle]
        if options.executor == "processes" and not inline:
            children = [isolating(index, enters=False) for index in range(self._count)]
            self._closers = [child.close for child in children]
            handles = [child.handle for child in children]
        else:
            handles = [
                ProcessorStage(pipeline, index=index, held=self._held, **stage).handle
                for index in range(self._count)
            ]
        self._handles = handles
        self._turns = cycle(range(self._count))
        self._pool: WorkerPool[list[Message], ChunkResult] | None = None
        if not inline and self._count > 1:
            self._pool = WorkerPool(handles, name=f"{pipeline.name}-processor")

    def map(
        self,
        dispatches: Iterable[list[Message]],
        *,
        wait: Callable[[], float | None] = lambda: None,
    ) -> Iterator[tuple[list[Message], ChunkResult]]:
        """Handles the messages of ``dispatches``; yields (chunk, result) in order of arrival.

        A new dispatch is taken only when a processor is free for it.

        :param dispatches: An empty one is a pause: finished chunks are yielded, and then
            :data:`TICK`, so that the caller can check its clock.
        :param wait: Called before every wait for a processor: returns after how many seconds to
            yield :data:`TICK` in between; ``None``: never.
        :raises BaseException: An exception that is not a callback's, such as ``KeyboardInterrupt``.
        """
        for dispatch in dispatches:
            suspects = self._divide(dispatch)
            if suspects and self._keeps_order:  # after everything in process, and before the rest
                yield from self._drained(self._pool, wait)
            self._apart.add(suspects)
            self._undivided = []
            if suspects and self._keeps_order:
                yield from self._drained(self._apart, wait)
            yield from self._handle_waiting(wait)
            yield from self._apart.take()
            yield from self._drained(self._apart, wait, until=lambda lane: not lane.full)
            yield from self._handle_returned(wait)
            if not dispatch:
                yield TICK
        yield from self._drained(self._apart, wait)
        yield from self._handle_returned(wait)
        yield from self._drained(self._pool, wait)

    def _handle_returned(
        self, wait: Callable[[], float | None]
    ) -> Iterator[tuple[list[Message], ChunkResult]]:
        """Handles suspects here for which no child process could be started."""
        returned = self._apart.take_back()
        if returned:
            undivided = self._undivided  # of a dispatch whose division was interrupted
            self._undivided = [*undivided, *returned]
            self._waiting.extend(list(self._chunks(returned)))
            self._undivided = undivided
            yield from self._handle_waiting(wait)

    def _handle_waiting(
        self, wait: Callable[[], float | None]
    ) -> Iterator[tuple[list[Message], ChunkResult]]:
        """Handles the chunks of a dispatch, or hands them over; yields finished results."""
        pool, waiting = self._pool, self._waiting
        while waiting:
            lane, chunk = waiting[0]
            if pool is None:
                result = self._handles[next(self._turns) if lane is None else lane](chunk)
                waiting.popleft()
                yield chunk, result
                continue
            if pool.put(chunk, lane, timeout=0.0):
                waiting.popleft()
                continue
            taken = pool.take()
            yield from taken
            if not taken and not pool.wait_for(lane, wait()):
                yield TICK
        if pool is not None:
            yield from pool.take()

    @staticmethod
    def _drained(
        work: WorkerPool[list[Message], ChunkResult] | SuspectLane | None,
        wait: Callable[[], float | None],
        until: Callable[[Any], bool] = lambda work: not work.under_way,
    ) -> Iterator[tuple[list[Message], ChunkResult]]:
        """Yields results until nothing is in process."""
        while work is not None and not until(work):
            taken = work.take()
            yield from taken
            if not taken and not work.wait(wait()):
                yield TICK

    def left(self) -> tuple[list[tuple[list[Message], ChunkResult]], list[Message]]:
        """Returns what was handed out and not yielded, once :meth:`map` is abandoned.

        :returns: The chunks with their results, such as those behind one that is stuck; and the
            messages without a result, which get none any more.
        """
        done, chunks = ([], []) if self._pool is None else self._pool.left()
        done_apart, apart = self._apart.left()
        done, chunks = [*done, *done_apart], [*chunks, *apart]
        log_stuck("the process stage", chunks)
        chunks += [chunk for _, chunk in self._waiting]
        chunks.append(self._undivided)
        return done, [message for chunk in chunks for message in chunk]

    def _divide(self, dispatch: list[Message]) -> list[Message]:
        """Queues the chunks of a dispatch.  Whatever a callback raises, :meth:`left` returns each
        of its messages once.

        :returns: The messages to be handled apart.
        """
        self._undivided = dispatch
        suspects, others = self._apart.split(dispatch)
        if suspects and self._keeps_order:
            suspects, others = dispatch, []
        self._waiting.extend(list(self._chunks(others)))
        self._undivided = suspects
        return suspects

    def _chunks(self, dispatch: list[Message]) -> Iterator[tuple[int | None, list[Message]]]:
        lanes: dict[int | None, list[Message]] = {}
        if self._entry.has_callbacks:
            for message in dispatch:
                lane, entered = self._entry.enter(message)
                lanes.setdefault(lane, []).append(entered)
        else:
            lanes[None] = dispatch
        size = self._size
        if not self._entry.has_lanes:
            sharers = 1 if self._pool is None else self._count
            size = max(1, min(size, -(-len(dispatch) // sharers)))
        longest = max(map(len, lanes.values()), default=0)
        for start in range(0, longest, size):
            for lane in sorted(lanes, key=lambda lane: lane or 0):
                messages = lanes[lane]
                if start < len(messages):
                    yield lane, messages[start : start + size]

    def close(self) -> None:
        """Ends the threads or processes, without waiting for what they are handling."""
        if self._pool is not None:
            self._pool.close()
        self._apart.close()
        for close in self._closers:
            close()
