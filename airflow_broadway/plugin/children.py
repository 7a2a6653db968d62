"""Child processes that query brokers, if ``[broadway] ask_brokers`` is on.

Brokers may be slow or unresponsive, so each question is answered by a child process with limits on
its time and output.  Few run concurrently, and answers are cached for some seconds::

    answer = await CHILDREN.ask({"ask": "depth", ...})
    answer.value  # JSON

The question goes to the child's standard input, so no option appears on a command line.  The child
imports this package and Airflow from the API server's own import path, never from the working
folder, and no pipeline module: see :mod:`airflow_broadway.cli.questions`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final

from airflow.providers.common.compat.sdk import conf

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.plugin.fair_semaphore import USER, FairSemaphore

#: Seconds in which a question must be answered, including its wait for a slot.
TIMEOUT: Final = 30.0
#: Concurrent children per API server process, and per user.
MOST: Final = 3
MOST_OF_USER: Final = 1
#: Bytes that a child may print.
MOST_BYTES: Final = 4 * 1024 * 1024
#: Seconds for which answers are cached, and how many.
KEEP: Final = 15.0
MOST_KEPT: Final = 256
#: Seconds that an interrupted child has to release its messages.
GRACE: Final = 2.0
#: If the API server dies, an unhandled alarm ends the child.
_PROGRAM: Final = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    " signal.alarm(int(sys.argv.pop(1)));"
    " from airflow_broadway.cli.questions import main; sys.exit(main())"
)
#: The error while broker queries are off.
OFF: Final = "the API server asks no broker: `[broadway] ask_brokers` is off"
#: The API server's signing keys; no child needs them.
_SIGNING: Final = ("API__SECRET_KEY", "API_AUTH__JWT_SECRET", "WEBSERVER__SECRET_KEY")


class ChildError(BroadwayError):
    """A question has no answer; the text is one sentence without secrets."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as JSON, and its timestamp."""

    value: Any
    at: datetime


def asks_brokers() -> bool:
    """Returns whether the API server may query brokers."""
    return bool(conf.getboolean("broadway", "ask_brokers", fallback=False))


@dataclass(kw_only=True, eq=False)
class Children:
    """Runs child processes that answer questions; used from one event loop.

    :param program: The command of a child; its maximum run time in seconds is appended.
    :param allowed: Returns whether children may run; if not, each question fails with :data:`OFF`.
    """

    program: Sequence[str] = (sys.executable, "-I", "-c", _PROGRAM)
    timeout: float = TIMEOUT
    most: int = MOST
    most_of_user: int = MOST_OF_USER
    most_bytes: int = MOST_BYTES
    keep: float = KEEP
    grace: float = GRACE
    clock: Clock = field(default_factory=SystemClock)
    allowed: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self._slots = FairSemaphore(self.most, self.most_of_user)
        #: Questions in progress and cached answers by the question's text, oldest first.
        self._known: dict[str, _Question] = {}

    async def ask(self, question: Mapping[str, Any]) -> Answer:
        """Returns the answer to a question, possibly cached.

        A repeated question of the same user shares the pending answer.

        :raises ChildError: If there is no answer in time; errors are cached, too.
        """
        text = json.dumps(question, sort_keys=True)
        self._evict()
        known = self._known.get(text)
        # A pending question of another user is queued behind that user's requests: ask separately.
        if known is None or not (known.task.done() or known.user == USER.get()):
            task = asyncio.ensure_future(self._run(text))
            known = self._known[text] = _Question(USER.get(), task)
            known.task.add_done_callback(partial(self._ended, known))
        # One caller's cancellation must not cancel the others.
        return await asyncio.shield(known.task)

    def _ended(self, known: _Question, _: Any) -> None:
        known.until = self.clock.monotonic() + self.keep

    def _evict(self) -> None:
        now = self.clock.monotonic()
        for text, known in list(self._known.items()):
            if now >= known.until or len(self._known) >= MOST_KEPT:
                del self._known[text]

    async def _run(self, question: str) -> Answer:
        if not self.allowed():
            raise ChildError(OFF)
        try:
            async with asyncio.timeout(self.timeout):
                release = await self._slots.acquire()
                try:
                    code, out = await self._spawn(question)
                finally:
                    release()
        except TimeoutError:
            raise ChildError(f"the broker did not answer within {self.timeout:g} s") from None
        try:
            value = await asyncio.to_thread(json.loads, out)
            if "error" in value:
                raise ChildError(str(value["error"]))
            return Answer(value["answer"], self.clock.now())
        except (ValueError, KeyError, TypeError):
            ending = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise ChildError(
                f"the process that queries the broker {ending} without an answer: use"
                " `airflow-broadway` on a worker"
            ) from None

    async def _spawn(self, question: str) -> tuple[int, bytes]:
        """Runs a child; returns its exit code and output.

        The child's process group is killed on cancellation, or if the output is too large.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *self.program,
                str(int(self.timeout + self.grace) + 1),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise ChildError(f"no process could be started: {error.strerror}") from None
        ended = False
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(ConnectionError):  # it has ended: see its exit code
                process.stdin.write(question.encode())
                await process.stdin.drain()
                process.stdin.close()
            try:
                await process.stdout.readexactly(self.most_bytes + 1)
            except asyncio.IncompleteReadError as whole:
                code, ended = await process.wait(), True
                return code, whole.partial
            raise ChildError(
                f"the answer has more than {self.most_bytes:,} bytes: narrow the filter"
            )
        finally:
            if not ended:
                await asyncio.shield(_end(process, self.grace))


@dataclass(slots=True, eq=False)
class _Question:
    """A question's user, its pending answer, and the expiry of the cached answer."""

    user: str
    task: asyncio.Task[Answer]
    until: float = math.inf


def _environment() -> dict[str, str]:
    """Returns the API server's environment without its signing keys.

    Its configuration file may still contain them.  ``-I`` makes Python ignore ``PYTHON*`` variables
    and the working folder.
    """
    keys = {f"AIRFLOW__{name}{suffix}" for name in _SIGNING for suffix in ("", "_CMD", "_SECRET")}
    return {name: value for name, value in os.environ.items() if name not in keys}


async def _end(process: asyncio.subprocess.Process, grace: float) -> None:
    """Ends the process group; SIGINT first, so that the child can release its messages."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


#: The children of this API server process.
CHILDREN: Final = Children(allowed=asks_brokers)
