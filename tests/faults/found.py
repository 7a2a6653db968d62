"""The findings of a fault case: an entry of ``build/faults.json``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Found:
    """The final states of one case's messages.

    :param name: ``<broker>.<case>``.
    :param messages: How many there were.
    :param runs: In how many runs, where that is a number of its own.
    :param killed: How often what was killed.
    :param lost: Numbers that were neither handled to success nor are dead letters, as they should.
    :param told_lost: Messages that an operator deleted with their queue, if that was counted and
        reported.
    :param duplicates: Messages handled again at the same attempt, or that ended twice.
    :param unmarked: Those of the duplicates that are not marked.
    :param mistakes: Anything else that must not be, one sentence each.
    """

    name: str
    messages: int
    runs: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    told_lost: int = 0
    duplicates: int = 0
    unmarked: int = 0
    mistakes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing was lost, repeated without a mark, or otherwise wrong."""
        return not (self.lost or self.unmarked or self.mistakes)

    def to_json(self) -> dict[str, Any]:
        """The entry."""
        return {
            "name": self.name,
            "messages": self.messages,
            **({"runs": self.runs} if self.runs else {}),
            "kills": self.killed.total(),
            "lost": len(self.lost),
            "duplicates": self.duplicates,
            "unmarked": self.unmarked,
            **({"deleted_by_operator": self.told_lost} if self.told_lost else {}),
            "mistakes": self.mistakes,
        }
