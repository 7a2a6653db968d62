"""Runs a crash test in a separate process, for callers with threads, such as a pytest session.

A crash test forks a process for each task.  A fork has only the forking thread, so locks held by
other threads would stay locked in it: a process with threads must not fork.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.reference import class_path
from airflow_broadway.testing.crashes.campaign import Sums, UnsoundPipeline
from airflow_broadway.testing.crashes.users import (
    CrashTest,
    CrashTestError,
    function_of,
    pipeline_of,
)


def crash_test_apart(
    pipeline: type[Pipeline] | str,
    messages: Sequence[bytes],
    *,
    sink: Callable[..., Any] | str | None = None,
    prepare: Callable[..., Any] | str | None = None,
    **options: Any,
) -> Sums:
    """Runs a :class:`CrashTest` in another process, which imports the pipeline and its functions.

    :param options: Other options of :class:`CrashTest`.
    :raises CrashTestError: If it cannot be run.
    """
    kwargs = {
        **options,
        "pipeline": pipeline if isinstance(pipeline, str) else class_path(pipeline),
        "messages": list(messages),
        "sink": _name(sink),
        "prepare": _name(prepare),
    }
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_run, args=(kwargs, sender))
    process.start()
    sender.close()
    try:
        sums, error = receiver.recv()
    except EOFError:
        process.join()
        sums, error = None, f"the process of the crash test ended with {process.exitcode}"
    finally:
        receiver.close()
        process.join()
    if error:
        raise CrashTestError(error)
    typed: Sums = sums
    return typed


def _name(function: Callable[..., Any] | str | None) -> str | None:
    if function is None or isinstance(function, str):
        return function
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name:
        raise CrashTestError(
            f"{name} cannot be imported by another process: define it at the top of its module"
        )
    return name


def _run(kwargs: dict[str, Any], sender: Connection) -> None:
    result: tuple[Sums | None, str]
    try:
        for name in ("sink", "prepare"):
            if kwargs[name]:
                kwargs[name] = function_of(kwargs[name])
        result = CrashTest(**{**kwargs, "pipeline": pipeline_of(kwargs["pipeline"])}).run(), ""
    except UnsoundPipeline as error:
        result = None, "\n".join([str(error), *error.tail])
    except BroadwayError as error:
        result = None, str(error)
    sender.send(result)
