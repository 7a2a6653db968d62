"""Work for which a process of its own is needed: the one that forks the tasks must hold no
connection, and no thread, that a fork could not share.
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
    """What was to be done failed, or its process died."""


def forked(do: Callable[[], Any], folder: Path, log: Path, what: str) -> Any:
    """Do it in a fork of this process; returns what it returned, by JSON.

    :param folder: Its current one.
    :param log: Where what it prints goes.
    :param what: Its name in the log, and in errors.
    :raises ForkError: If it raises, or dies.
    """
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _be(do, folder, log, what, writes)
    os.close(writes)
    with open(reads, encoding="utf-8") as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    if not told:
        raise ForkError(f"the process of {what} died")
    returned, error = json.loads(told)
    if error:
        raise ForkError(error)
    return returned


def _be(do: Callable[[], Any], folder: Path, log: Path, what: str, writes: int) -> None:
    try:
        printed = open(log, "a", buffering=1)  # noqa: SIM115 - until this process ends
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        sys.stdout = sys.stderr = printed
        printed.write(f"-- {what}\n")
        os.chdir(folder)
        os.environ[FOLDER] = str(folder)
        try:
            told = [do(), ""]
        except BaseException as error:  # nothing may return into the campaign
            traceback.print_exc()
            told = [None, f"{type(error).__name__}: {error}"]
        with open(writes, "w", encoding="utf-8") as answer:
            json.dump(told, answer)
        printed.flush()
    finally:
        os._exit(0)
