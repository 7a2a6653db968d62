"""How much waits for pipelines at their brokers, asked of the command line in child processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.plugin.children import CHILDREN, ChildError, Children
from airflow_broadway.plugin.declared import Declared
from airflow_broadway.plugin.rendered import UNFILLED, has_template

__all__ = ["DEPTHS", "Depth", "Depths"]

#: Seconds for which a depth counts in the order of pipelines, and how many are remembered.
REMEMBERED: Final = 600.0
MOST_REMEMBERED: Final = 2_000
#: Seconds in which brokers are to answer.
_TIMEOUT: Final = 15

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How much waits, as :class:`.QueueDepth` says.

    :param unknown: Why nothing is known; the counts are then ``None``.
    :param at: When that was so.
    """

    ready: int | None = None
    delayed: int | None = None
    leased: int | None = None
    dead: int | None = None
    oldest_age: float | None = None
    unknown: str = ""
    at: datetime


class Depths:
    """Asks for depths, and remembers them for a while; used from one event loop."""

    def __init__(self, children: Children, clock: Clock | None = None) -> None:
        self._children = children
        self._clock = clock or SystemClock()
        self._known: dict[_Key, Depth] = {}

    def recall(self, declared: Declared) -> Depth | None:
        """What was known lately."""
        depth = self._known.get(_key_of(declared))
        if depth is None or self._clock.now() - depth.at > timedelta(seconds=REMEMBERED):
            return None
        return depth

    async def ask(self, declared: Sequence[Declared]) -> None:
        """Ask for these, those of one staging root in one process: to start one costs seconds."""
        by_root: dict[str, list[Declared]] = {}
        for each in declared:
            if has_template(each.reference):
                self._known |= self._unknown([_key_of(each)], UNFILLED)
                continue
            by_root.setdefault(each.staging or "", []).append(each)
        for answers in await asyncio.gather(
            *(self._ask(root, asked) for root, asked in by_root.items())
        ):
            self._known |= answers
        while len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]

    async def _ask(self, root: str, asked: Collection[Declared]) -> Mapping[_Key, Depth]:
        keys = list(dict.fromkeys(map(_key_of, asked)))
        if "{{" in root:
            return self._unknown(keys, f"its staging root is a template: {root}")
        where = [f"--staging={root}"] if root else []
        references = sorted(reference for _, reference in keys)
        try:
            answer = await self._children.ask(
                "depth",
                f"--timeout={_TIMEOUT}",
                *where,
                *(f"--pipeline={reference}" for reference in references),
            )
            found = {each["reference"]: each for each in answer.value}
            return {
                (root, reference): Depth(
                    **{name: found[reference][name] for name in _FIELDS}, at=answer.at
                )
                for reference in references
            }
        except ChildError as error:
            return self._unknown(keys, str(error))
        except (KeyError, TypeError):
            return self._unknown(keys, "the command line said what this release does not know")

    def _unknown(self, keys: Collection[_Key], why: str) -> Mapping[_Key, Depth]:
        return dict.fromkeys(keys, Depth(unknown=why, at=self._clock.now()))


_FIELDS: Final = ("ready", "delayed", "leased", "dead", "oldest_age", "unknown")


def _key_of(declared: Declared) -> _Key:
    return declared.staging or "", json.dumps(declared.reference, sort_keys=True)


#: Those of this process of the API server.
DEPTHS: Final = Depths(CHILDREN)
