"""Child processes that ask brokers, where ``[broadway] ask_brokers`` is switched on.

A broker may be slow or silent.  So a question is answered by a child process, which has a bound on
its time and on its output; only a few are at work at once, and an answer serves whoever asks the
same within some seconds::

    answer = await CHILDREN.ask({"ask": "depth", ...})
    answer.value  # JSON

The question goes to the child's standard input: its options are on no command line.  The child
imports this package and Airflow from where the API server's interpreter finds them, never from the
working folder, and no module of a pipeline: see :mod:`airflow_broadway.cli.questions`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from airflow.providers.common.compat.sdk import conf

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.plugin.fair_semaphore import USER, FairSemaphore

#: Seconds in which a question must be answered, its wait for others' end included.
TIMEOUT: Final = 30.0
#: Children at work at once in each process of the API server, and those of one user.
MOST: Final = 3
MOST_OF_USER: Final = 1
#: Bytes that a child may print.
MOST_BYTES: Final = 4 * 1024 * 1024
#: Seconds for which an answer serves others who ask the same, and how many answers are kept.
KEEP: Final = 15.0
MOST_KEPT: Final = 256
#: Seconds that an interrupted child has to give back what it holds at a broker.
GRACE: Final = 2.0
#: A child ends by itself should the API server die: an alarm that nobody handles ends a process.
_PROGRAM: Final = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    " signal.alarm(int(sys.argv.pop(1)));"
    " from airflow_broadway.cli.questions import main; sys.exit(main())"
)
#: Why no broker is asked.
OFF: Final = "the API server asks no broker: `[broadway] ask_brokers` is off"
#: Settings with which the API server signs what it hands out; no command needs them.
_SIGNING: Final = ("API__SECRET_KEY", "API_AUTH__JWT_SECRET", "WEBSERVER__SECRET_KEY")


class ChildError(BroadwayError):
    """A question has no answer; the text says why, in one sentence without secrets."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, as JSON, and when it was there."""

    value: Any
    at: datetime


def asks_brokers() -> bool:
    """Whether the API server may ask brokers."""
    return bool(conf.getboolean("broadway", "ask_brokers", fallback=False))


class Children:
    """Asks questions; used from one event loop.

    :param program: What starts a child; the seconds after which it ends by itself are put behind.
    :param allowed: Whether any may run now; where not, each question has the error :data:`OFF`.
    """

    def __init__(
        self,
        *,
        program: Sequence[str] = (sys.executable, "-I", "-c", _PROGRAM),
        timeout: float = TIMEOUT,
        most: int = MOST,
        most_of_user: int = MOST_OF_USER,
        most_bytes: int = MOST_BYTES,
        keep: float = KEEP,
        grace: float = GRACE,
        clock: Clock | None = None,
        allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._program = tuple(program)
        self._allowed = allowed
        self._timeout = timeout
        self._most_bytes = most_bytes
        self._keep = keep
        self._grace = grace
        self._clock = clock or SystemClock()
        self._slots = FairSemaphore(most, most_of_user)
        #: What is under way, or was answered, by its text; the oldest question first.
        self._known: dict[str, _Question] = {}

    async def ask(self, question: Mapping[str, Any]) -> Answer:
        """The answer to a question: of now, or of some seconds ago.

        A user who asks again meanwhile gets the same answer.

        :raises ChildError: If there is none, or not in time; that is kept, too.
        """
        text = json.dumps(question, sort_keys=True)
        self._forget_old()
        known = self._known.get(text)
        # What another user's requests still wait for would keep this one waiting behind them.
        if known is None or not (known.task.done() or known.user == USER.get()):
            known = self._known[text] = _Question(self._run(text), self._keep)
            known.task.add_done_callback(partial(self._ended, known))
        # One who asks may give up; the others wait on.
        return await asyncio.shield(known.task)

    def _ended(self, known: _Question, _: Any) -> None:
        known.ended(self._clock.monotonic())

    def _forget_old(self) -> None:
        now = self._clock.monotonic()
        for text, known in list(self._known.items()):
            if known.is_old(now) or len(self._known) >= MOST_KEPT:
                del self._known[text]

    async def _run(self, question: str) -> Answer:
        if not self._allowed():
            raise ChildError(OFF)
        try:
            async with asyncio.timeout(self._timeout), self._slots.slot():
                code, out = await self._spawned(question)
        except TimeoutError:
            raise ChildError(f"the broker did not answer within {self._timeout:g} s") from None
        try:
            value = await asyncio.to_thread(json.loads, out)
            if "error" in value:
                raise ChildError(str(value["error"]))
            return Answer(value["answer"], self._clock.now())
        except (ValueError, KeyError, TypeError):
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise ChildError(
                f"the process that asks the broker {how} and without an answer: look with"
                " `airflow-broadway` where a worker runs"
            ) from None

    async def _spawned(self, question: str) -> tuple[int, bytes]:
        """Its exit code, and what it printed.  It runs in a process group of its own, which is
        ended if this is cancelled, or too much printed.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *self._program,
                str(int(self._timeout + self._grace) + 1),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise ChildError(f"no process could be started: {error.strerror}") from None
        over = False
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(ConnectionError):  # it has ended; its exit code tells
                process.stdin.write(question.encode())
                await process.stdin.drain()
                process.stdin.close()
            out = await _read(process.stdout, self._most_bytes)
            if out is None:
                raise ChildError(
                    f"the answer has more than {self._most_bytes:,} bytes: ask for less"
                )
            code, over = await process.wait(), True
            return code, out
        finally:
            if not over:
                await asyncio.shield(_end(process, self._grace))


class _Question:
    """What was asked, and until when its answer serves."""

    def __init__(self, answer: Coroutine[Any, Any, Answer], keep: float) -> None:
        self.user = USER.get()
        self.task = asyncio.ensure_future(answer)
        self._keep = keep
        self._until = float("inf")

    def ended(self, now: float) -> None:
        self._until = now + self._keep
        if not self.task.cancelled():
            self.task.exception()  # whoever asked may be gone: it is no error of the loop's

    def is_old(self, now: float) -> bool:
        return now >= self._until


def _environment() -> dict[str, str]:
    """That of the API server, without what it signs with; its configuration file may still have
    that.  ``-I`` has Python ignore its own variables and the working folder.
    """
    ours = {f"AIRFLOW__{name}{suffix}" for name in _SIGNING for suffix in ("", "_CMD", "_SECRET")}
    return {name: value for name, value in os.environ.items() if name not in ours}


async def _read(stream: asyncio.StreamReader, most: int) -> bytes | None:
    """All that is said; ``None`` if it is too much."""
    parts: list[bytes] = []
    size = 0
    while part := await stream.read(65_536):
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)


async def _end(process: asyncio.subprocess.Process, grace: float) -> None:
    """End the process, and what it has started: interrupted first, so that it may give back what
    it holds at a broker.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


#: Those of this process of the API server.
CHILDREN: Final = Children(allowed=asks_brokers)
