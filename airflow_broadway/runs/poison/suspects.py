"""Finds the messages of a live run that may have crashed an earlier process, by crash records.

Each redelivered message is a suspect while the pipeline has a crash on record; see
:mod:`airflow_broadway.staging.crash_records`.  A message that was in hand in one crash is handled
in a small group; one that was in hand in several crashes is handled alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.layout import VERSION
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.text import pluralize
from airflow_broadway.staging.crash_records import (
    CrashHistory,
    forget_crashes,
    load_crash_history,
    portion_size,
)
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)


def suspects_of(run: StagedRun, pipeline: Pipeline, env: ProducerEnv) -> StagedSuspects | None:
    """Returns the suspects of a run; ``None`` if no broker redelivers its messages."""
    return StagedSuspects(run, pipeline, env) if pipeline.run.source.asks_broker else None


@dataclass
class StagedSuspects:
    """The suspects among the messages that one generation receives."""

    staged: StagedRun
    pipeline: Pipeline
    env: ProducerEnv

    @cached_property
    def _history(self) -> CrashHistory:
        """The crashes on record; read at the first redelivered message."""
        history = load_crash_history(self.staged.store, self.staged.pipeline, self.env.clock.now())
        if not history.crashes:
            return history
        log.info(
            "%s of this pipeline died in the last days: redelivered messages are handled in a"
            " child process.",
            pluralize(history.crashes, "task"),
        )
        return history

    def is_suspect(self, message: Message) -> bool:
        """Returns whether the message is redelivered and a crash is on record."""
        return message.redelivered and self._history.crashes > 0

    def reason_to_blame(self, message: Message) -> str:
        """Returns the reason for dead-lettering the message immediately; empty if it is handled.

        The crash records of a dead-lettered message are cleared: once requeued, it starts afresh.

        :raises StagingError: If the records cannot be written.
        """
        key = message.message_id
        deaths = self._history.alone.get(key, 0)
        if deaths <= self.pipeline.producer.max_crashes:
            return ""
        name = f"{self.env.generation}.{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        run = self.staged
        forget_crashes(run.store, run.pipeline, name, [key], self.env.clock.now())
        return f"it was the only message in hand when {deaths} tasks died"

    def portions(self, messages: Sequence[Message]) -> Iterator[list[Message]]:
        """Splits messages, in order, into portions by their number of crashes."""
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
        """Records the messages that the child process handles, in case the task dies.

        :raises StagingError: If the record cannot be written.
        """
        ids = [message.message_id for message in messages]
        text = json.dumps({"version": VERSION, "ids": ids})
        self.staged.files.note(paths.in_hand(self.env.generation), text)
