"""Exceptions that end a run propagate through calls of users' methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowTaskTimeout

from airflow_broadway.core.model.message import Status
from airflow_broadway.core.schema import records as schema_convert
from airflow_broadway.core.schema import values as schema_values
from airflow_broadway.core.stages.subprocess_channel import pickles


def _killed(kind: type[BaseException]) -> Any:
    """An object whose text ends the process."""

    def ends(self: object, *_: object) -> Any:
        raise kind

    return type("Odd", (ValueError,), {"__str__": ends, "__repr__": ends, "__reduce__": ends})()


CALLS: dict[str, Callable[[Any], Any]] = {
    "the text of a reason": lambda odd: Status("error", odd).text,
    "the path of a value": schema_convert._path_step,
    "a value in an error": schema_values.describe,
    "what goes to another process": pickles,
}


KILLS = [KeyboardInterrupt, SystemExit, AirflowTaskTimeout]
#: An exit there fails its message alone, as one from a callback does.
FAILS = ("the text of a reason", SystemExit)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in CALLS for kind in KILLS if (name, kind) != FAILS]
)
def test_no_kill_is_swallowed(name, kind):
    with pytest.raises(kind):
        CALLS[name](_killed(kind))


@pytest.mark.parametrize(("name", "kind"), [*((name, RuntimeError) for name in CALLS), FAILS])
def test_other_errors_of_such_methods_are_swallowed(name, kind):
    assert CALLS[name](_killed(kind)) is not None
