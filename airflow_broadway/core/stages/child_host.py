"""Lets a child process ask the program that hosts its parent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildHost:
    """What the child processes of processors may ask of the host, such as Airflow.

    :param connect: ``"module:function"``, called once in each child with a function that asks.
    :param answer: Called in the parent with each request; what it returns, or raises, the child
        gets.  Both are pickled.
    """

    connect: str
    answer: Callable[[Any], Any]
