"""The processors of a pipeline: ``concurrency`` of them at work, results in order of arrival.

It is fed with *dispatches*: what one receive returned, of any length.  The pool transforms the
messages of each, parts them by ``partition_by``, and cuts the parts into chunks of ``max_demand -
min_demand``.  Chunks are smaller where that gives every processor a share, so that no message waits
behind a busy processor while another is free.  Each chunk is handled by a :class:`ProcessorStage`,
in this thread, in threads or in processes.

*Suspects*, which may have ended an earlier process, are handled apart: by one more processor in a
child process of its own.  Where order counts, all of their dispatch is, after what is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Protocol

from airflow_broadway.core.model.acks import ack_messages
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
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
from airflow_broadway.core.stages.worker_pool import WorkerPool

__all__ = ["ProcessorPool", "Suspects"]

#: What stands for "nothing has come"; see :meth:`ProcessorPool.map`.
TICK: Final[tuple[list[Message], ChunkResult]] = ([], ChunkResult([], []))

#: In place of a lane: the processor for suspects.
_APART: Final = -1

Handle = Callable[[list[Message]], ChunkResult]


class Suspects(Protocol):
    """Says which messages may have ended an earlier process, and notes which are in hand."""

    def is_suspect(self, message: Message) -> bool:
        """Return whether the message is to be handled apart."""
        ...

    def reason_to_blame(self, message: Message) -> str:
        """Return why the message is dead-lettered at once; empty if it is handled."""
        ...

    def portions(self, messages: Sequence[Message]) -> Iterable[list[Message]]:
        """Part messages, in order, into portions that may be in hand together."""
        ...

    def in_hand(self, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """Note, while this lasts, that the child process handles these messages."""
        ...


class ProcessorPool:
    """Runs chunks through the processors of ``pipeline``.

    With ``concurrency=1`` and threads everything happens in the calling thread.

    :param ack: Settles a chunk's result; called in the thread of its processor.
    :param convert: As for :class:`ProcessorStage`; made once per processor.
    :param stop: When no further message is begun; those handed out by then are in :meth:`left`, or
        in neither list of their chunk's result.
    :param inline: Do without threads whatever the concurrency, for tests: processors take turns.
    :param traces: As for :class:`ProcessorStage`.
    :param transformer: Called with each message first; the producer's, where messages come from it.
    :param suspects: Which messages are handled apart; ``None``: none is.
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
    ) -> None:
        options = pipeline.processors
        self._size: int = options.chunk_size
        self._count: int = options.concurrency
        self._entry = MessageEntry(pipeline, transformer)
        self._suspects = suspects
        self._keeps_order = self._entry.has_lanes or pipeline.producer.keeps_order
        self._held = HeldGroups(pipeline.producer)
        self._apart: IsolatingProcessor | None = None
        self._make_apart = partial(
            IsolatingProcessor,
            pipeline,
            index=self._count,
            ack=ack,
            convert=convert,
            stop=stop,
            traces=traces,
            enters=True,
            held=self._held,
        )
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
        kind: type[IsolatingProcessor | ProcessorStage]
        kind = IsolatingProcessor if remote else ProcessorStage
        processors = [
            kind(
                pipeline,
                index=i,
                ack=ack,
                convert=convert,
                stop=stop,
                traces=traces,
                held=self._held,
            )
            for i in range(self._count)
        ]
        self._closers = [each.close for each in processors if isinstance(each, IsolatingProcessor)]
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
        :raises BaseException: What no callback may swallow, such as ``KeyboardInterrupt``.
        """
        if self._pool is None:
            yield from self._map_inline(dispatches)
            return
        pool, waiting = self._pool, self._waiting
        for dispatch in dispatches:
            self._part(dispatch)
            while waiting:
                lane, chunk = waiting[0]
                if lane == _APART:
                    if self._keeps_order and pool.under_way:
                        taken = pool.take()
                        yield from taken
                        if not taken and not pool.wait(wait()):
                            yield TICK
                        continue
                    yield from self._handle_apart(chunk)
                    waiting.popleft()
                    continue
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
                if lane == _APART:
                    yield from self._handle_apart(chunk)
                    waiting.popleft()
                    continue
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
        """Have the chunks of a dispatch wait; however a callback ends, :meth:`left` names each of
        its messages once.
        """
        self._undivided = dispatch
        suspects, others = self._sorted(dispatch)
        chunks = list(self._chunks(others))
        if suspects and self._suspects is not None:
            chunks += ((_APART, each) for each in self._suspects.portions(suspects))
        self._waiting.extend(chunks)
        self._undivided = []

    def _sorted(self, dispatch: list[Message]) -> tuple[list[Message], list[Message]]:
        """The messages to be handled apart, and the others."""
        if self._suspects is None:
            return [], dispatch
        is_suspect = self._suspects.is_suspect
        suspects = [message for message in dispatch if is_suspect(message)]
        if not suspects:
            return [], dispatch
        if self._keeps_order:
            return dispatch, []
        return suspects, [message for message in dispatch if not is_suspect(message)]

    def _handle_apart(self, portion: list[Message]) -> Iterator[tuple[list[Message], ChunkResult]]:
        """Handle suspects in a child process.

        :param portion: What is handled leaves it, so that :meth:`left` does not name it.
        """
        suspects = self._suspects
        assert suspects is not None
        if self._apart is None:
            self._apart = self._make_apart()
            self._closers.append(self._apart.close)
        if len(portion) == 1:
            reason = suspects.reason_to_blame(portion[0])
            if reason:
                yield [portion[0]], self._apart.blame(portion.pop(), reason)
                return
        with suspects.in_hand(portion):
            while portion:
                chunk = portion[: self._size]
                result = self._apart.handle(chunk)
                del portion[: len(chunk)]
                yield chunk, result

    def _chunks(self, dispatch: list[Message]) -> Iterator[tuple[int | None, list[Message]]]:
        dispatch = self._entry.transform(dispatch)
        if not self._entry.has_lanes:
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
            lane, entered = self._entry.lane(message)
            lanes.setdefault(lane or 0, []).append(entered)
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
