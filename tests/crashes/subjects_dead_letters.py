"""Subjects whose first messages are dead letters, over any broker.

A live run without faults fails these messages.  The runs with faults, and their recoveries, requeue
all dead letters before they receive.  So do the draining runs until each of these messages has been
requeued and handled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from airflow_broadway import Broadway, Message
from airflow_broadway.core.custody.dead_letters import Moved
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.model.run_source import DEAD_LETTERS, RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.runs.ports import Ports, producer_env
from airflow_broadway.staging.store import Store
from airflow_broadway.testing.crashes.callbacks import recorded_calls
from airflow_broadway.testing.crashes.interceptor import Boundary, Interceptor
from airflow_broadway.testing.crashes.interceptor import replace as replace_method
from airflow_broadway.testing.crashes.sink import call_in_fork
from airflow_broadway.testing.crashes.subject import DeadLetter, Subject
from airflow_broadway.testing.crashes.tasks import Attempt, execute
from tests.crashes.live_runs import SETTLING, live_run
from tests.crashes.subjects import SUBJECTS, MakeSubject

#: The reason of the first dead letters.
_FIRST_REASON = "before the case"
_BEFORE = "before"


@contextmanager
def open_subjects(broker: str) -> Iterator[MakeSubject]:
    """Yields a function that creates subjects whose runs requeue dead letters."""
    with SUBJECTS[broker]() as make:

        def configure_subject(pipeline: type[Broadway], folder: Path) -> Subject:
            # Each case has its own class, since its first run fails every message.
            subject = make(type(pipeline.__name__, (pipeline,), {}), folder)
            subject.__class__ = _with_dead_letters(type(subject))
            return subject

        yield configure_subject


@cache
def _with_dead_letters(kind: type[Subject]) -> type[Subject]:
    return type(f"Letters{kind.__name__}", (_DeadLetterSubject, kind), {})


class _DeadLetterSubject(Subject):
    """A mixin for a broker's subject.

    Identifies messages by their bodies, because most brokers give requeued messages new ids.
    """

    #: The ids of the first dead letters.
    _first_ids: Sequence[str] = ()
    #: Whether the next run requeues dead letters.
    _requeues = True

    def boundaries(self) -> list[Boundary]:
        return [
            *super().boundaries(),
            _RequeueCounts(self._counts_file, type(self.overrides()["producer"])),
        ]

    @property
    def _counts_file(self) -> Path:
        """The file of the reported numbers of requeued letters."""
        return self.folder / "counted.jsonl"

    def id_of(self, message: Message) -> str:
        return _id(message.data)

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        super().send(bodies)  # type: ignore[safe-super]
        ids = [_id(body) for body in bodies]
        if not self._first_ids:
            self._first_ids = ids
            boundaries = [_FailingPipeline(self.pipeline), *self.boundaries()]
            live_run(self, _BEFORE, self._single_attempt_options, boundaries)
        return ids

    def _single_attempt_options(self) -> Mapping[str, Any]:
        """Returns the options with which a failed message is dead-lettered immediately."""
        result = self.overrides()
        retry = replace(result["producer"].retry, max_attempts=1)
        return {**result, "producer": replace(result["producer"], retry=retry)}

    def execute(self, attempt: Attempt) -> Any:
        pipeline = self.pipeline(**self.overrides())
        requeues = self._requeues and not attempt.run_id.startswith(SETTLING)
        source = RunSource(kind=DEAD_LETTERS) if requeues else RunSource()
        return execute(pipeline, self.staging, attempt, hold_failed=self.hold_failed, source=source)

    def waiting(self) -> int:
        unhandled = self._unhandled()
        self._requeues = bool(unhandled)  # called before each draining run
        return super().waiting() + len(unhandled)  # type: ignore[safe-super]

    def _unhandled(self) -> set[str]:
        """Returns the messages that are not handled again, or still have their dead letter."""
        handled = {
            key
            for call in recorded_calls(self.calls_file)
            if not call.execution.startswith(_BEFORE)
            for key, _, _ in call.messages
        }
        log = self.folder / "log.txt"
        return ({*self._first_ids} - handled) | {
            *call_in_fork(self._list_first, self.work, log, "the letters")
        }

    def _list_first(self) -> list[str]:
        """Lists the ids of the first dead letters."""
        pipeline = self.pipeline(**self.overrides())
        store = Store.open(self.staging)
        env = producer_env(pipeline, Ports(), generation="looks", owner={}, store=store)
        with closing(pipeline.producer.dead_letters(env)) as letters:
            return [
                _id(letter.body) for letter in letters.letters() if _FIRST_REASON in letter.reason
            ]

    def letters(self) -> list[DeadLetter]:
        dead_letters = super().letters()  # type: ignore[safe-super]
        return [letter._replace(message_id=_id(letter.body)) for letter in dead_letters]

    def leftovers(self) -> list[str]:
        result = super().leftovers()
        lines = [json.loads(line) for line in self._counts_file.read_text().splitlines()]
        if [execution for execution, _ in lines] == ["one/process/1"]:  # one task requeued all
            [[_, count]] = lines
            if count != len(self._first_ids):
                result.append(f"{len(self._first_ids)} dead letters, {count} reported as requeued")
        return result


class _RequeueCounts:
    """Records the reported numbers of requeued and rejected dead letters."""

    def __init__(self, file: Path, producer: type[Producer]) -> None:
        self._file = file
        self._producer = producer

    def install(self, interceptor: Interceptor) -> None:
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

        def wrap(do: Any) -> Any:
            def dead_letters(producer: Any, env: Any, **kwargs: Any) -> Any:
                letters = do(producer, env, **kwargs)
                requeue = letters.requeue

                def requeue_and_record(selection: Any) -> Moved:
                    moved: Moved = requeue(selection)
                    count = moved.count + len(moved.refused)
                    os.write(handle, json.dumps([interceptor.execution, count]).encode() + b"\n")
                    return moved

                letters.requeue = requeue_and_record
                return letters

            return dead_letters

        replace_method(self._producer, "dead_letters", wrap)


class _FailingPipeline:
    """Fails every message in the process in which it is installed."""

    def __init__(self, pipeline: type[Pipeline]) -> None:
        self._pipeline = pipeline

    def install(self, interceptor: Interceptor) -> None:
        def handle_message(self: Any, processor: str, message: Message, context: Any) -> Message:
            return message.failed(_FIRST_REASON)

        self._pipeline.handle_message = handle_message  # type: ignore[method-assign]


def _id(data: Any) -> str:
    return f"m-{int(data)}"
