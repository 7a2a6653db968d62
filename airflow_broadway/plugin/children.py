"""Commands of ``airflow-broadway`` as child processes: no code of users runs in the API server.

A pipeline's class is the user's code, and may do anything: hang, end its process, print without
end.  So whatever needs it is asked of a child, which has a bound on its time and on its output;
only a few are at work at once; and an answer serves whoever asks the same within some seconds::

    answer = await CHILDREN.ask("depth", "--pipeline=shop.orders:Orders")
    answer.value  # what the command printed as JSON

An argument that may begin with ``-``, such as a message's id, is given as ``--name=value``, or
behind ``--``.  An administrator can keep all of it out by ``[broadway] ask_brokers``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from airflow.providers.common.compat.sdk import conf

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.text import cut, printable

__all__ = ["CHILDREN", "OFF", "Answer", "ChildError", "Children", "asks_brokers"]

#: Seconds in which a command must have answered, its wait for others' end included.
TIMEOUT: Final = 30.0
#: Commands at work at once, in each process of the API server.
MOST: Final = 3
#: Bytes that a command may print.
MOST_BYTES: Final = 16 * 1024 * 1024
#: Seconds for which an answer serves others who ask the same, and how many answers are kept.
KEEP: Final = 15.0
MOST_KEPT: Final = 256
#: Seconds that an interrupted command has to give back what it holds at a broker.
GRACE: Final = 2.0
#: Characters of an error's sentence, and bytes of what is read of standard error.
_SENTENCE: Final = 600
_ERROR_BYTES: Final = 64 * 1024

#: A child ends by itself should the API server die: an alarm that nobody handles ends a process.
_PROGRAM: Final = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    " signal.alarm(int(sys.argv.pop(1)));"
    " from airflow_broadway.cli import main; sys.exit(main())"
)
#: What is said where commands are switched off.
OFF: Final = "brokers are not asked: `[broadway] ask_brokers` is off on the API server"
#: Settings with which the API server signs what it hands out; no command needs them.
_SIGNING: Final = ("API__SECRET_KEY", "API_AUTH__JWT_SECRET", "WEBSERVER__SECRET_KEY")
#: How a command's one line of error begins.
_COMPLAINT: Final = "airflow-broadway: error: "


class ChildError(BroadwayError):
    """A command has no answer; the text says why, in one sentence without secrets."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said.

    :param value: What it printed as JSON.
    :param code: Its exit code: 0; 1 if there is something to look at.
    :param at: When it had ended.
    """

    value: Any
    code: int
    at: datetime


def asks_brokers() -> bool:
    """Whether commands may run here, and with them the code of pipelines."""
    return bool(conf.getboolean("broadway", "ask_brokers", fallback=True))


class Children:
    """Runs commands; used from one event loop.

    :param program: What starts the command line; the seconds after which it ends by itself, and the
        command's arguments, are put behind it.
    :param allowed: Whether any may run now; where not, each has the error :data:`OFF`.
    """

    def __init__(
        self,
        *,
        program: Sequence[str] = (sys.executable, "-c", _PROGRAM),
        timeout: float = TIMEOUT,
        most: int = MOST,
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
        self._slots = asyncio.Semaphore(most)
        #: What is under way, or was answered, by its arguments; the oldest question first.
        self._known: dict[tuple[str, ...], _Question] = {}

    async def ask(self, *arguments: str) -> Answer:
        """What a command that changes nothing says: now, or some seconds ago.

        Who asks what is being asked already gets the same answer.

        :raises ChildError: If it says nothing, or not in time; that is kept, too.
        """
        self._forget_old()
        known = self._known.get(arguments)
        if known is None:
            known = self._known[arguments] = _Question(self._run(arguments), self._keep)
            known.task.add_done_callback(lambda _: known.ended(self._clock.monotonic()))
        # One who asks may give up; the others wait on.
        return await asyncio.shield(known.task)

    def _forget_old(self) -> None:
        now = self._clock.monotonic()
        for arguments, known in list(self._known.items()):
            if known.is_old(now) or len(self._known) >= MOST_KEPT:
                del self._known[arguments]

    async def change(self, *arguments: str, timeout: float | None = None) -> Answer:
        """Run a command that changes something: each time anew; what was known is asked anew, too.

        :param timeout: Seconds in which it must be done; those of any command unless given.
        :raises ChildError: If it says nothing, or not in time; it may have done a part.
        """

        async def run() -> Answer:
            try:
                return await self._run(arguments, timeout)
            finally:
                self._known.clear()

        # One who gives up does not stop it in the middle.
        return await asyncio.shield(run())

    async def _run(self, arguments: tuple[str, ...], timeout: float | None = None) -> Answer:
        if not self._allowed():
            raise ChildError(OFF)
        command = f"airflow-broadway {arguments[0]}"
        # What stands behind `--` is no option.
        options = arguments.index("--") if "--" in arguments else len(arguments)
        arguments = (*arguments[:options], "--json", *arguments[options:])
        timeout = self._timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(timeout):
                async with self._slots:
                    code, out, err = await self._spawned(arguments, command, timeout)
        except TimeoutError:
            raise ChildError(
                f"`{command}` did not answer within {timeout:g} s: its broker, or the"
                " pipeline's module, keeps it waiting"
            ) from None
        if code not in (0, 1):
            raise ChildError(_why(command, code, err))
        try:
            return Answer(json.loads(out), code, self._clock.now())
        except ValueError:
            # A traceback ends a program with 1 as well.
            raise ChildError(_why(command, code, err)) from None

    async def _spawned(
        self, arguments: Sequence[str], command: str, timeout: float
    ) -> tuple[int, bytes, bytes]:
        """Its exit code, and what it printed.  It runs in a process group of its own, which is
        ended if this is cancelled, or too much printed.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *self._program,
                str(int(timeout + self._grace) + 1),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise ChildError(f"`{command}` could not be started: {error.strerror}") from None
        over = False
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            out, err = await asyncio.gather(
                _read(process.stdout, self._most_bytes), _read_end(process.stderr)
            )
            if out is None:
                raise ChildError(
                    f"`{command}` said more than {self._most_bytes:,} bytes: ask for less"
                )
            code, over = await process.wait(), True
            return code, out, err
        finally:
            if not over:
                await asyncio.shield(_end(process, self._grace))


class _Question:
    """What was asked, and until when its answer serves."""

    def __init__(self, answer: Coroutine[Any, Any, Answer], keep: float) -> None:
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
    that.
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


async def _read_end(stream: asyncio.StreamReader) -> bytes:
    """The end of what is said: the error is the last line."""
    end = b""
    while part := await stream.read(65_536):
        end = (end + part)[-_ERROR_BYTES:]
    return end


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


def _why(command: str, code: int, err: bytes) -> str:
    """Why a command failed: its own sentence, or else what ended it."""
    lines = err.decode("utf-8", "replace").strip().splitlines()
    said = [line for line in lines if line.startswith(_COMPLAINT)]
    if said:
        return cut(redacted(printable(said[-1].removeprefix(_COMPLAINT))), _SENTENCE)
    # The text of any other error may hold a secret.
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    last = lines[-1].partition(":")[0] if lines else ""
    kind = f" and {last}" if last.replace(".", "_").isidentifier() else ""
    return f"`{command}` {how}{kind}: run it where a worker runs to see why"


#: Those of this process of the API server.
CHILDREN: Final = Children(allowed=asks_brokers)
