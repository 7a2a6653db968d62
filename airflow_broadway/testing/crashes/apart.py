"""A crash test in a process of its own, for whoever has threads, as a session of pytest may have.

A crash test forks a process for each task.  A fork has only the thread that forked it, so a lock
that another thread held stays locked in it for ever: who has threads must not fork.
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
    """Run a :class:`CrashTest` in another process, which imports the pipeline and its functions.

    :param options: Its others.
    :raises CrashTestError: If it cannot be run.
    """
    asked = {
        **options,
        "pipeline": pipeline if isinstance(pipeline, str) else class_path(pipeline),
        "messages": list(messages),
        "sink": _name(sink),
        "prepare": _name(prepare),
    }
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_run, args=(asked, there))
    process.start()
    there.close()
    try:
        sums, error = here.recv()
    except EOFError:
        process.join()
        sums, error = None, f"the process of the crash test ended with {process.exitcode}"
    finally:
        here.close()
        process.join()
    if error:
        raise CrashTestError(error)
    found: Sums = sums
    return found


def _name(function: Callable[..., Any] | str | None) -> str | None:
    if function is None or isinstance(function, str):
        return function
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name:
        raise CrashTestError(
            f"{name} cannot be imported by another process: define it at the top of its module"
        )
    return name


def _run(asked: dict[str, Any], there: Connection) -> None:
    told: tuple[Sums | None, str]
    try:
        for name in ("sink", "prepare"):
            if asked[name]:
                asked[name] = function_of(asked[name])
        told = CrashTest(**{**asked, "pipeline": pipeline_of(asked["pipeline"])}).run(), ""
    except UnsoundPipeline as error:
        told = None, "\n".join([str(error), *error.tail])
    except BroadwayError as error:
        told = None, str(error)
    there.send(told)
