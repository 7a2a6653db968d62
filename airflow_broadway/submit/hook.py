"""The Spark provider's hook of spark-submit, with what our application needs more."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

from airflow_broadway.spark.application import INCOMPLETE, REFUSED

#: The line of the driver's log that names its application and the address of its UI.
APPLICATION = re.compile(r"Spark application (\S+); its UI: (https?://[^\s,]+|)")
#: What exit codes of the driver mean; 3 is Java's when its memory has run out.
_MEANINGS = {
    INCOMPLETE: "the driver ended before every batch had an outcome",
    REFUSED: "the driver refused to start",
    3: "the driver's memory had run out, if its log says OutOfMemoryError",
}


def _forgotten(application_id: str, ui: str) -> None:
    """Nobody wants to know."""


class SubmitHook(SparkSubmitHook):
    """The provider's hook, with a program by its full path, variables, and arguments made late."""

    _prepare: Callable[[], list[str]]
    _driver_env: dict[str, str]
    _noted: Callable[[str, str], None]

    @classmethod
    def of(
        cls,
        hook: SparkSubmitHook,
        *,
        binary: str,
        env: Mapping[str, str],
        prepare: Callable[[], list[str]],
        noted: Callable[[str, str], None] = _forgotten,
    ) -> SubmitHook:
        """The same hook, with more.

        :param binary: The program, with its path.
        :param env: Variables of the program's process.  Unlike ``env_vars`` they never become
            settings, which would show on the command line.
        :param prepare: Called right before Spark is started; returns the application's arguments.
        :param noted: Called with the application's id and the address of its UI, empty if it has
            none, once its driver's log says so.
        """
        made = cls.__new__(cls)
        made.__dict__.update(hook.__dict__)
        made._connection = {**made._connection, "spark_binary": binary}
        made._driver_env = dict(env)
        made._prepare = prepare
        made._noted = noted
        return made

    def submit(self, application: str = "", **kwargs: Any) -> str | None:
        self._application_args = self._prepare()
        try:
            return super().submit(application, **kwargs)
        finally:
            # The provider leaves the pipe of a process that has ended to the garbage collector.
            process = self._submit_sp
            if process is not None and process.poll() is not None:
                process.stdout.close()

    def _process_spark_submit_log(self, itr: Iterator[Any]) -> None:
        super()._process_spark_submit_log(self._listening(itr))

    def _listening(self, lines: Iterator[Any]) -> Iterator[Any]:
        """The same lines; of the first that tells of the application others hear."""
        for line in lines:
            found = APPLICATION.search(line)
            if found is not None:
                self._noted(found[1], found[2])
            yield line

    @property
    def ending(self) -> str:
        """How the program ended, in words; empty if it has not, or was not started."""
        code = None if self._submit_sp is None else self._submit_sp.poll()
        if code is None:
            return ""
        # spark-submit is a shell script, and a shell adds 128 to the number of a signal.
        number = -code if code < 0 else code - 128 if code > 128 else 0
        with suppress(ValueError):
            return f"exit code {code}: killed by {signal.Signals(number).name}"
        meaning = _MEANINGS.get(code)
        return f"exit code {code}{f': {meaning}' if meaning else ''}"

    def _build_spark_submit_command(self, application: str) -> list[str]:
        command: list[str] = super()._build_spark_submit_command(application)
        self._env = {**self._driver_env, **(self._env or {})}
        return command
