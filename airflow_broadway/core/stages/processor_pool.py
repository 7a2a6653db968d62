"""The processors of a pipeline: ``concurrency`` of them at work, results in order of arrival.

It is fed with *dispatches*: what one receive returned, of any length.  The pool parts each by
``partition_by``, and cuts the parts into chunks of ``max_demand - min_demand``.  Chunks are smaller
where that gives every processor a share, so that no message waits behind a busy processor while
another is free.  Each chunk is handled by a :class:`ProcessorStage`, in this thread, in threads or
in processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from airflow_broadway.core.model.acks import ack_messages
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.batcher import partition_of
from airflow_broadway.core.stages.failure_log import log_stuck
from airflow_broadway.core.stages.processor import Ack, ChunkResult, Convert, ProcessorStage
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.stages.subprocess_processor import SubprocessProcessor
from airflow_broadway.core.stages.worker_pool import WorkerPool

__all__ = ["ProcessorPool"]

#: What stands for "nothing has come"; see :meth:`ProcessorPool.map`.
TICK: Final[tuple[list[Message], ChunkResult]] = ([], ChunkResult([], []))

Handle = Callable[[list[Message]], ChunkResult]


class ProcessorPool:
    """Runs chunks through the processors of ``pipeline``.

    With ``concurrency=1`` and threads everything happens in the calling thread.

    :param ack: Settles a chunk's result; called in the thread of its processor.
    :param convert: As for :class:`ProcessorStage`; made once per processor.
    :param stop: When no further message is begun; those handed out by then are in :meth:`left`, or
        in neither list of their chunk's result.
    :param inline: Do without threads whatever the concurrency, for tests: processors take turns.
    :param traces: As for :class:`ProcessorStage`.
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
    ) -> None:
        options = pipeline.processors
        self._size: int = options.chunk_size
        self._count: int = options.concurrency
        self._partition = partition_of(options.partition_by, self._count)
        self._closers: list[Callable[[], None]] = []
        self._undivided: list[Message] = []  # a dispatch that is being parted
        self._waiting: deque[tuple[int | None, list[Message]]] = deque()  # its chunks
        handles = self._handles(pipeline, ack, convert, stop, inline, traces)
        self._inline = handles if inline or len(handles) == 1 else None
        self._turn = 0
        self._pool: WorkerPool[list[Message], ChunkResult] | None = None
        if self._inline is None:
            self._pool = WorkerPool(handles, name=f"{pipeline.name}-processor")

    def _handles(
        self,
        pipeline: Pipeline,
        ack: Ack,
        convert: Convert | None,
        stop: Stop | None,
        inline: bool,
        traces: bool,
    ) -> list[Handle]:
        remote = pipeline.processors.executor == "processes" and not inline
        kind: type[SubprocessProcessor | ProcessorStage]
        kind = SubprocessProcessor if remote else ProcessorStage
        processors = [
            kind(pipeline, index=i, ack=ack, convert=convert, stop=stop, traces=traces)
            for i in range(self._count)
        ]
        self._closers = [each.close for each in processors if isinstance(each, SubprocessProcessor)]
        return [each.handle for each in processors]

    def map(
        self,
        dispatches: Iterable[list[Message]],
        *,
        wait: Callable[[], float | None] = lambda: None,
    ) -> Iterator[tuple[list[Message], ChunkResult]]:
        """Handle the messages of ``dispatches``; yields (chunk, result) in order of arrival.

        A new dispatch is taken only when a processor is free for it.

        :param dispatches: An empty one says that nothing has come: what is finished is yielded, and
            then :data:`TICK`, so that the caller can look at its clock.
        :param wait: Asked before every wait for a processor: after how many seconds to yield
            :data:`TICK` in between; ``None``: never.
        :raises BaseException: What no callback may swallow, such as ``KeyboardInterrupt``; and what
            ``partition_by`` raises.
        """
        if self._pool is None:
            yield from self._map_inline(dispatches)
            return
        pool, waiting = self._pool, self._waiting
        for dispatch in dispatches:
            self._part(dispatch)
            while waiting:
                lane, chunk = waiting[0]
                if pool.put(chunk, lane, timeout=0.0):
                    waiting.popleft()
                    continue
                taken = pool.take()
                yield from taken
                if not taken and not pool.wait_for(lane, wait()):
                    yield TICK
            yield from pool.take()
            if not dispatch:
                yield TICK
        while pool.under_way:
            taken = pool.take()
            yield from taken
            if not taken and not pool.wait(wait()):
                yield TICK

    def _map_inline(
        self, dispatches: Iterable[list[Message]]
    ) -> Iterator[tuple[list[Message], ChunkResult]]:
        handles, waiting = self._inline or [], self._waiting
        for dispatch in dispatches:
            self._part(dispatch)
            while waiting:
                lane, chunk = waiting[0]
                if lane is None:
                    lane, self._turn = self._turn, (self._turn + 1) % self._count
                result = handles[lane](chunk)
                waiting.popleft()
                yield chunk, result
            if not dispatch:
                yield TICK

    def left(self) -> tuple[list[tuple[list[Message], ChunkResult]], list[Message]]:
        """What was handed out, once :meth:`map` is left before its end, and was not yielded.

        :returns: The chunks with their results, such as those behind one that is stuck; and the
            messages that have no result, and get none any more.
        """
        done, chunks = ([], []) if self._pool is None else self._pool.left()
        log_stuck("the process stage", chunks)
        chunks += [chunk for _, chunk in self._waiting]
        chunks.append(self._undivided)
        return done, [message for chunk in chunks for message in chunk]

    def _part(self, dispatch: list[Message]) -> None:
        """Have the chunks of a dispatch wait; however ``partition_by`` ends, :meth:`left` names
        each of its messages once.
        """
        self._undivided = dispatch
        chunks = list(self._chunks(dispatch))
        self._waiting.extend(chunks)
        self._undivided = []

    def _chunks(self, dispatch: list[Message]) -> Iterator[tuple[int | None, list[Message]]]:
        if self._partition is None:
            sharers = 1 if self._pool is None else self._count
            share = -(-len(dispatch) // sharers)
            size = max(1, min(self._size, share))
            if len(dispatch) <= size:
                if dispatch:
                    yield None, dispatch
                return
            for start in range(0, len(dispatch), size):
                yield None, dispatch[start : start + size]
            return
        lanes: dict[int, list[Message]] = {}
        for message in dispatch:
            lanes.setdefault(self._partition(message), []).append(message)
        longest = max(map(len, lanes.values()), default=0)
        for start in range(0, longest, self._size):
            for lane in sorted(lanes):
                messages = lanes[lane]
                if start < len(messages):
                    yield lane, messages[start : start + self._size]

    def close(self) -> None:
        """End the threads or processes; what they are at is not waited for."""
        if self._pool is not None:
            self._pool.close()
        for close in self._closers:
            close()
