"""How a case is declared: a function that does its harm, and returns what it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.found import Found
from tests.faults.rabbitmq_cases.place import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitCase:
    """One case.

    :param name: What happens; ``rabbitmq.<name>`` in ``build/faults.json``.
    :param run: Does it; raises ``AssertionError`` for what must not be and is no count.
    :param slow: Whether it takes more than a few seconds.
    :param mortal: Whether it kills its server.
    """

    name: str
    run: Callable[[Place], Found]
    slow: bool
    mortal: bool


#: All of them, in the order in which they are declared.
CASES: list[RabbitCase] = []


def case(
    *, slow: bool = True, mortal: bool = False
) -> Callable[[Callable[[Place, str], Found]], None]:
    """Declares a case: its name is the function's, which it gets back as its second argument."""

    def declare(function: Callable[[Place, str], Found]) -> None:
        name = function.__name__
        CASES.append(
            RabbitCase(name=name, run=lambda p: function(p, name), slow=slow, mortal=mortal)
        )

    return declare
