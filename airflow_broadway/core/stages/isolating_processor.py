"""A processor that survives its messages: isolates the message that kills its child process.

If the child dies while it handles a chunk, and this process survives, the chunk is halved, and each
half is handled by a child of its own, down to a single message.  A message that killed
``max_crashes`` children which handled nothing else fails with the status ``crashed``, and is
dead-lettered.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.core.stages.failure_log import name_messages
from airflow_broadway.core.stages.processor import ChunkResult, HeldGroups
from airflow_broadway.core.stages.subprocess_processor import ProcessDied, SubprocessProcessor

log = logging.getLogger(__name__)

#: The kind of status, and the prefix of the reason, of a message that killed its processes.
CRASHED: Final = "crashed"
#: Messages that may be blamed before any other has been handled: on a host on which every process
#: dies, no message is to blame.
_MOST_UNPROVEN: Final = 2


class IsolatingProcessor:
    """One processor in a child process, which a message may kill.

    :param processor: The processor that owns the child.
    :param held: As for :class:`.ProcessorStage`.
    """

    def __init__(self, processor: SubprocessProcessor, held: HeldGroups | None = None) -> None:
        producer = processor.pipeline.producer
        self._processor = processor
        self._held = held or HeldGroups(producer)
        self._max_crashes: int = producer.max_crashes
        self._stop = processor.stop
        #: Whether a child has handled a message, so that the environment works.
        self._proven = False
        self._blamed = 0
        self._closed = False

    def start(self) -> None:
        """Starts the child, unless it is running; it loads the pipeline.

        :raises PipelineError: If the child dies while loading it.
        """
        self._processor.start()

    def handle(self, chunk: list[Message]) -> ChunkResult:
        """Handles a chunk, with as many children as that takes.

        :returns: The results of its messages.  Neither list has messages that callbacks settled
            before their process died, nor messages that a stop kept from being handled.
        :raises PipelineError: If the pipeline cannot be loaded, or every process dies, whatever it
            handles.
        """
        successful: list[Message] = []
        failed: list[Message] = []
        parts: deque[list[Message]] = deque([chunk])
        deaths = 0  # of the current single message
        while parts and not self._closed and not (self._stop is not None and self._stop.late()):
            part = parts.popleft()
            # A new child does not know the held groups.
            part = [message for message in part if not self._held.has(message)]
            try:
                result = self._processor.handle(part)
            except ProcessDied as error:
                # It may have been handled, and a callback may have settled it.
                part = [
                    message.replace(redelivered=True)
                    for message in part
                    if message.message_id not in error.settled
                ]
                deaths = deaths + 1 if len(part) == 1 else 0
                if deaths >= self._max_crashes:
                    reason = (
                        f"it ended {deaths} processes that handled nothing else, the last with"
                        f" {error.ending}"
                    )
                    failed += self.blame(part[0], reason).failed
                    deaths = 0
                    continue
                self._log_death(part, deaths, error)
                middle = (len(part) + 1) // 2
                parts.extendleft(half for half in (part[middle:], part[:middle]) if half)
            else:
                deaths = 0
                self._proven = self._proven or bool(result.successful or result.failed)
                successful += result.successful
                failed += result.failed
                self._held.add(result.failed)
        return ChunkResult(successful, failed)

    def blame(self, message: Message, reason: str) -> ChunkResult:
        """Settles a message as one that killed its processes; no callback is called.

        :raises PipelineError: If several were blamed and no message has been handled.
        """
        if not self._proven and self._blamed >= _MOST_UNPROVEN:
            raise PipelineError(
                f"{self._processor.name} ends at every message that it handles, the last time at"
                f" message {message.message_id!r}: no further message is blamed, and all held"
                " messages are released; check this host's memory, and what the pipeline does to"
                " every message"
            )
        self._blamed += 1
        log.error("Message %r is dead-lettered, %s: %s.", message.message_id, CRASHED, reason)
        status = Status(CRASHED, f"{CRASHED}: {reason}")
        return self._processor.settle([], [message.replace(status=status)])

    def _log_death(self, part: list[Message], deaths: int, error: ProcessDied) -> None:
        if not part:
            log.warning("%s; callbacks had settled all of them.", error)
        elif len(part) == 1:
            log.warning(
                "%s, %r, the %s process of %d that may end at it.",
                error,
                part[0].message_id,
                _format_ordinal(deaths),
                self._max_crashes,
            )
        else:
            ids = name_messages([message.message_id for message in part])
            log.warning("%s: %s; it is handled again in halves.", error, ids)

    def close(self) -> None:
        """Ends the child; it finishes no chunk, and is not replaced."""
        self._closed = True
        self._processor.close()


def _format_ordinal(number: int) -> str:
    last = number % 10 if number % 100 // 10 != 1 else 0
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"
