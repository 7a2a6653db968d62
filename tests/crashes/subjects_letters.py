"""Any broker once more, but what is sent at first are dead letters when the first run begins.

A live run, in a process that nobody strikes, lets each of these messages fail.  The runs that are
struck, and those that recover, send all letters back before they receive.  So do those that drain
the queue, as long as a letter of then is there, or was not handled since: whoever finds one does it
again.
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
from airflow_broadway.testing.crashes.sink import forked
from airflow_broadway.testing.crashes.subject import Letter, Subject
from airflow_broadway.testing.crashes.tasks import Attempt, execute
from tests.crashes.before import SETTLING, live_run
from tests.crashes.subjects import SUBJECTS, MakeSubject

#: Why the messages died at first.
_WHY = "before the case"
_BEFORE = "before"


@contextmanager
def over_letters(broker: str) -> Iterator[MakeSubject]:
    """Creates subjects of a broker whose runs have the dead letters as their source."""
    with SUBJECTS[broker]() as make:

        def made(pipeline: type[Broadway], folder: Path) -> Subject:
            # Each case has its own class, since its first run fails every message.
            subject = make(type(pipeline.__name__, (pipeline,), {}), folder)
            subject.__class__ = _over(type(subject))
            return subject

        yield made


@cache
def _over(kind: type[Subject]) -> type[Subject]:
    return type(f"Letters{kind.__name__}", (_Letters, kind), {})


class _Letters(Subject):
    """A mixin before a broker's own subject, which is ``super``.

    A message is known by its body, for most brokers have another id for what is sent back.
    """

    #: The messages that were dead letters.
    _were: Sequence[str] = ()
    #: Whether the run that is next is to send letters back.
    _again = True

    def boundaries(self) -> list[Boundary]:
        return [*super().boundaries(), _Counts(self._counted, type(self.overrides()["producer"]))]

    @property
    def _counted(self) -> Path:
        """The file of the reported counts of requeued letters."""
        return self.folder / "counted.jsonl"

    def id_of(self, message: Message) -> str:
        return _id(message.data)

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        super().send(bodies)  # type: ignore[safe-super]
        ids = [_id(body) for body in bodies]
        if not self._were:
            self._were = ids
            boundaries = [_Fails(self.pipeline), *self.boundaries()]
            live_run(self, _BEFORE, self._once, boundaries)
        return ids

    def _once(self) -> Mapping[str, Any]:
        """The options with which a message that fails is a dead letter at once."""
        result = self.overrides()
        retry = replace(result["producer"].retry, max_attempts=1)
        return {**result, "producer": replace(result["producer"], retry=retry)}

    def execute(self, attempt: Attempt) -> Any:
        pipeline = self.pipeline(**self.overrides())
        again = self._again and not attempt.run_id.startswith(SETTLING)
        source = RunSource(kind=DEAD_LETTERS) if again else RunSource()
        return execute(pipeline, self.staging, attempt, hold_failed=self.hold_failed, source=source)

    def waiting(self) -> int:
        left = self._left()
        self._again = bool(left)  # it is asked before each run that drains
        return super().waiting() + len(left)  # type: ignore[safe-super]

    def _left(self) -> set[str]:
        """The messages that were not handled since, and those that still have a letter of then."""
        handled = {
            key
            for call in recorded_calls(self.calls_file)
            if not call.execution.startswith(_BEFORE)
            for key, _, _ in call.messages
        }
        log = self.folder / "log.txt"
        return ({*self._were} - handled) | {*forked(self._listed, self.work, log, "the letters")}

    def _listed(self) -> list[str]:
        """Returns the dead letters as listed."""
        pipeline = self.pipeline(**self.overrides())
        store = Store.open(self.staging)
        env = producer_env(pipeline, Ports(), generation="looks", owner={}, store=store)
        with closing(pipeline.producer.dead_letters(env)) as letters:
            return [_id(letter.body) for letter in letters.letters() if _WHY in letter.reason]

    def letters(self) -> list[Letter]:
        found = super().letters()  # type: ignore[safe-super]
        return [letter._replace(message_id=_id(letter.body)) for letter in found]

    def left(self) -> list[str]:
        result = super().left()
        lines = [json.loads(line) for line in self._counted.read_text().splitlines()]
        if [execution for execution, _ in lines] == ["one/process/1"]:  # no other has requeued any
            [[_, count]] = lines
            if count != len(self._were):
                result.append(f"{len(self._were)} letters, of which {count} are told")
        return result


class _Counts:
    """Records how many letters were requeued or refused, as reported to the caller."""

    def __init__(self, file: Path, producer: type[Producer]) -> None:
        self._file = file
        self._producer = producer

    def install(self, interceptor: Interceptor) -> None:
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

        def opened(do: Any) -> Any:
            def dead_letters(producer: Any, env: Any, **given: Any) -> Any:
                letters = do(producer, env, **given)
                requeue = letters.requeue

                def requeue_and_tell(choice: Any) -> Moved:
                    moved: Moved = requeue(choice)
                    count = moved.count + len(moved.refused)
                    os.write(handle, json.dumps([interceptor.execution, count]).encode() + b"\n")
                    return moved

                letters.requeue = requeue_and_tell
                return letters

            return dead_letters

        replace_method(self._producer, "dead_letters", opened)


class _Fails:
    """Lets each message fail, in the process in which it is installed."""

    def __init__(self, pipeline: type[Pipeline]) -> None:
        self._pipeline = pipeline

    def install(self, interceptor: Interceptor) -> None:
        def handle_message(self: Any, processor: str, message: Message, context: Any) -> Message:
            return message.failed(_WHY)

        self._pipeline.handle_message = handle_message  # type: ignore[method-assign]


def _id(data: Any) -> str:
    return f"m-{int(data)}"
