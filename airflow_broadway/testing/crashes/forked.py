"""Runs functions in a forked process, because the process that forks the tasks must not have open
connections or threads.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.testing.crashes.subject import FOLDER


class ForkError(BroadwayError):
    """The function failed, or its process died."""


def forked(do: Callable[[], Any], folder: Path, log: Path, name: str) -> Any:
    """Calls a function in a fork of this process; returns its JSON result.

    :param folder: The working folder of the fork.
    :param log: The file of its output.
    :param name: Its name in the log and in errors.
    :raises ForkError: If the function raises, or the process dies.
    """
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _run_child(do, folder, log, name, writes)
    os.close(writes)
    with open(reads, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    if not text:
        raise ForkError(f"the process of {name} died")
    returned, error = json.loads(text)
    if error:
        raise ForkError(error)
    return returned


def _run_child(do: Callable[[], Any], folder: Path, log: Path, name: str, writes: int) -> None:
    try:
        output = open(log, "a", buffering=1)  # noqa: SIM115 - until this process ends
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        output.write(f"-- {name}\n")
        os.chdir(folder)
        os.environ[FOLDER] = str(folder)
        try:
            result = [do(), ""]
        except BaseException as error:  # never return into the campaign
            traceback.print_exc()
            result = [None, f"{type(error).__name__}: {error}"]
        with open(writes, "w", encoding="utf-8") as answer:
            json.dump(result, answer)
        output.flush()
    finally:
        os._exit(0)
