"""Injects faults in this process, for unit tests."""

from __future__ import annotations

from airflow_broadway.testing.crashes.interceptor import Interceptor
from airflow_broadway.testing.crashes.points import Injection

#: The name of the execution with the fault.
NAME = "one/process/1"


class Died(BaseException):
    """Simulates the death of the process."""


def inject(text: str = "") -> Interceptor:
    """Creates an interceptor that injects a fault: ``CALL #N: FAULT``."""
    injections = {NAME: Injection.parse(f"{NAME} {text}")} if text else {}
    return Interceptor(NAME, injections)


def observed_calls(interceptor: Interceptor) -> list[str]:
    """Returns the observed calls, in order."""
    return [f"{point.call} #{point.nth}" for point in interceptor.points]
