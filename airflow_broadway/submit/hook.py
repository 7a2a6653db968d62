"""The Spark provider's spark-submit hook, extended for our application."""

from __future__ import annotations

import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

from airflow_broadway.core.masking import redacted
from airflow_broadway.spark.session import INCOMPLETE, REFUSED

#: The line of the driver's log with the application's id and the URL of its UI.
APPLICATION = re.compile(r"Spark application (\S+); its UI: (https?://[^\s,]+|)")
#: The timeout for a client of Spark Connect to end its jobs, in seconds.
CANCEL_TIMEOUT = 30.0
#: The meaning of the driver's exit codes; 3 is Java's code for out of memory.
_MEANINGS = {
    INCOMPLETE: "the driver ended before every batch had an outcome",
    REFUSED: "the driver refused to start",
    3: "the driver's memory had run out, if its log says OutOfMemoryError",
}


def last_error(lines: Sequence[str]) -> str:
    """Returns the last error in a driver's log, without secrets; empty without one."""
    errors = (line.partition(" ERROR ")[2] for line in reversed(lines))
    return redacted(next(filter(None, errors), ""))


def _ignore(application_id: str, ui: str) -> None:
    """Ignores the application."""


class ConnectHook(SparkSubmitHook):
    """The provider's hook for an application on a Spark Connect server; needs no connection."""

    def _resolve_connection(self) -> dict[str, Any]:
        names = ("keytab", "namespace", "principal", "queue", "spark_binary")
        return {**dict.fromkeys(names), "master": "sc:", "deploy_mode": "client"}


class SubmitHook(SparkSubmitHook):
    """The provider's hook, with the program's full path, variables, and late arguments."""

    _prepare: Callable[[], list[str]]
    _driver_env: dict[str, str]
    _on_application: Callable[[str, str], None]
    #: The last lines of Spark's log.
    lines: deque[str]

    @classmethod
    def of(
        cls,
        hook: SparkSubmitHook,
        *,
        binary: str,
        deploy_mode: str,
        env: Mapping[str, str],
        prepare: Callable[[], list[str]],
        on_application: Callable[[str, str], None] = _ignore,
    ) -> SubmitHook:
        """Extends a hook.

        :param binary: The program, with its path.
        :param deploy_mode: Always on the command line: a properties file may have another.
        :param env: Variables of the program's process.  Unlike ``env_vars`` they never become
            settings, which are visible on the command line.
        :param prepare: Called right before Spark is started; returns the application's arguments.
        :param on_application: Called with the application's id and the URL of its UI (empty if it
            has none), when they appear in the driver's log.
        """
        extended = cls.__new__(cls)
        extended.__dict__.update(hook.__dict__)
        own = {"spark_binary": binary, "deploy_mode": deploy_mode}
        extended._connection = {**extended._connection, **own}
        extended._driver_env = dict(env)
        extended._prepare = prepare
        extended._on_application = on_application
        extended.lines = deque(maxlen=1_000)
        return extended

    def submit(self, application: str = "", **kwargs: Any) -> str | None:
        self._application_args = self._prepare()
        try:
            return super().submit(application, **kwargs)
        finally:
            # The provider leaves closing the pipe to the garbage collector.
            process = self._submit_sp
            if process is not None and process.poll() is not None:
                process.stdout.close()

    def _process_spark_submit_log(self, itr: Iterator[Any]) -> None:
        super()._process_spark_submit_log(self._watch(itr))

    def _watch(self, lines: Iterator[Any]) -> Iterator[Any]:
        """Passes the lines on, and reports the application when its line appears."""
        for line in lines:
            self.lines.append(str(line).strip())
            match = APPLICATION.search(line)
            if match is not None:
                self._on_application(match[1], match[2])
            yield line

    def on_kill(self) -> None:
        process = self._submit_sp
        if process is not None and self._connection["master"].startswith("sc:"):
            # The server would go on for minutes: the driver ends its jobs.
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(CANCEL_TIMEOUT)
        super().on_kill()

    @property
    def ending(self) -> str:
        """How the driver ended, in words; empty if it is running, or not on this host."""
        code = None if self._submit_sp is None else self._submit_sp.poll()
        if code is None or self._connection["deploy_mode"] == "cluster":
            return ""
        # spark-submit is a shell script, and a shell adds 128 to the number of a signal.
        number = -code if code < 0 else code - 128 if code > 128 else 0
        with suppress(ValueError):
            return f"exit code {code}: killed by {signal.Signals(number).name}"
        meaning = _MEANINGS.get(code)
        reason = last_error(self.lines) if code == REFUSED else ""
        return f"exit code {code}" + "".join(f": {text}" for text in (meaning, reason) if text)

    def _build_spark_submit_command(self, application: str) -> list[str]:
        if self._connection["master"].startswith("sc:"):
            self._env = self._driver_env
            return [self._connection["spark_binary"], application, *(self._application_args or [])]
        command: list[str] = super()._build_spark_submit_command(application)
        self._env = {**self._driver_env, **(self._env or {})}
        return command
