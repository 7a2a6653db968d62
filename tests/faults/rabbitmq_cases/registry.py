"""The registry of the custody cases: functions that inject a fault and return a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.case_result import CaseResult
from tests.faults.rabbitmq_cases.harness import QueueHarness


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitCase:
    """A registered case.

    :param name: The function's name; ``rabbitmq.<name>`` in ``build/faults.json``.
    :param run: The function; raises ``AssertionError`` for violations that are not counted.
    :param slow: Whether it takes more than a few seconds.
    :param kills_server: Whether it kills its server.
    """

    name: str
    run: Callable[[QueueHarness], CaseResult]
    slow: bool
    kills_server: bool


#: All cases, in the order of their definitions.
CASES: list[RabbitCase] = []


def case(
    *, slow: bool = True, kills_server: bool = False
) -> Callable[[Callable[[QueueHarness, str], CaseResult]], None]:
    """Registers a case under the function's name, which is also its second argument."""

    def declare(function: Callable[[QueueHarness, str], CaseResult]) -> None:
        name = function.__name__
        CASES.append(
            RabbitCase(
                name=name, run=lambda p: function(p, name), slow=slow, kills_server=kills_server
            )
        )

    return declare
