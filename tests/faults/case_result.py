"""The result of a fault case: an entry of ``build/faults.json``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CaseResult:
    """Counts of a case's messages by final state.

    :param name: ``<broker>.<case>``.
    :param messages: The number of messages.
    :param runs: The number of runs, if the case reports it.
    :param killed: The number of kills by kind of process.
    :param lost: The numbers of messages that are in no expected final state.
    :param reported_lost: Messages that an operator deleted with their queue, and that the package
        reported as lost.
    :param duplicates: Messages that were handled again at the same attempt, or settled twice.
    :param unmarked: Duplicates without a redelivery mark.
    :param mistakes: Other violations, one sentence each.
    """

    name: str
    messages: int
    runs: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    reported_lost: int = 0
    duplicates: int = 0
    unmarked: int = 0
    mistakes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether there are no losses, unmarked duplicates or mistakes."""
        return not (self.lost or self.unmarked or self.mistakes)

    def to_json(self) -> dict[str, Any]:
        """Returns the entry of ``build/faults.json``."""
        return {
            "name": self.name,
            "messages": self.messages,
            **({"runs": self.runs} if self.runs else {}),
            "kills": self.killed.total(),
            "lost": len(self.lost),
            "duplicates": self.duplicates,
            "unmarked": self.unmarked,
            **({"deleted_by_operator": self.reported_lost} if self.reported_lost else {}),
            "mistakes": self.mistakes,
        }
