"""Lets a child process send requests to the program that hosts its parent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildHost:
    """The requests of processors' child processes to the host, such as Airflow.

    :param connect: ``"module:function"``, called once in each child with a function that sends a
        request.
    :param answer: Called in the parent with each request; its result or exception is passed to the
        child.  Both are pickled.
    """

    connect: str
    answer: Callable[[Any], Any]
