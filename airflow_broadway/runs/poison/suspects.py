"""Says which messages of a live run may have ended an earlier process, by the crashes on record.

Each redelivered message is a suspect while the pipeline has a crash on record; see
:mod:`airflow_broadway.staging.crash_records`.  A message that was in hand in one crash is handled
among few others, and one that was in hand in several is handled alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.formats.layout import VERSION, paths
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import many
from airflow_broadway.staging.crash_records import (
    CrashHistory,
    forget_crashes,
    load_crash_history,
    portion_size,
)
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)


def suspects_of(run: StagedRun, pipeline: Pipeline, env: ProducerEnv) -> StagedSuspects | None:
    """Return the suspects of a run; ``None`` where no broker delivers its messages again."""
    return StagedSuspects(run, pipeline, env) if pipeline.run.source.asks_broker else None


class StagedSuspects:
    """The suspects among the messages that one generation receives."""

    def __init__(self, run: StagedRun, pipeline: Pipeline, env: ProducerEnv) -> None:
        self._run = run
        self._pipeline = pipeline
        self._env = env

    @cached_property
    def _history(self) -> CrashHistory:
        """The crashes on record; read when the first redelivered message is met."""
        history = load_crash_history(self._run.store, self._run.pipeline, self._env.clock.now())
        if not history.crashes:
            return history
        log.info(
            "%s of this pipeline died in the last days: redelivered messages are handled in a"
            " child process.",
            many(history.crashes, "task"),
        )
        return history

    def is_suspect(self, message: Message) -> bool:
        """Return whether the message is redelivered, and a crash is on record."""
        return message.redelivered and self._history.crashes > 0

    def reason_to_blame(self, message: Message) -> str:
        """Return why the message is dead-lettered at once; empty if it is handled.

        Its crashes are forgotten then: a dead letter that is sent back begins anew.

        :raises StagingError: If that cannot be written.
        """
        key = message.message_id
        deaths = self._history.alone.get(key, 0)
        if deaths <= self._pipeline.producer.max_crashes:
            return ""
        name = f"{self._env.generation}.{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        run = self._run
        forget_crashes(run.store, run.pipeline, name, [key], self._env.clock.now())
        return f"it was the only message in hand when {deaths} tasks died"

    def portions(self, messages: Sequence[Message]) -> Iterator[list[Message]]:
        """Part messages, in order, by how often each was in hand in a crash."""
        in_hand = self._history.in_hand
        portion: list[Message] = []
        bound: int | None = None
        for message in messages:
            size = portion_size(in_hand.get(message.message_id, 0))
            if portion and (size != bound or (bound is not None and len(portion) >= bound)):
                yield portion
                portion = []
            bound = size
            portion.append(message)
        if portion:
            yield portion

    def note_in_hand(self, messages: Sequence[Message]) -> None:
        """Write down which messages the child process handles; it is for the death of the task.

        :raises StagingError: If that cannot be written.
        """
        ids = [message.message_id for message in messages]
        text = json.dumps({"version": VERSION, "ids": ids})
        self._run.files.note(paths.in_hand(self._env.generation), text)
