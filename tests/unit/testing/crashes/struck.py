"""Strikes for the tests of the harness's pieces, in this process."""

from __future__ import annotations

from airflow_broadway.testing.crashes.interceptor import Interceptor
from airflow_broadway.testing.crashes.points import Strike

#: The execution that is struck.
NAME = "one/process/1"


class Died(BaseException):
    """The process would have died here."""


def striking(text: str = "") -> Interceptor:
    """An interceptor that strikes there: ``CALL #N: WHAT``."""
    strikes = {NAME: Strike.parse(f"{NAME} {text}")} if text else {}
    return Interceptor(NAME, strikes)


def calls(interceptor: Interceptor) -> list[str]:
    """Returns the observed calls, in order."""
    return [f"{point.call} #{point.nth}" for point in interceptor.seen]
