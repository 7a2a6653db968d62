"""The confirm rule, as a value without a network.

What was published may be relied on once it is confirmed and was not returned: a return comes before
its confirm and cancels it, a nack is a refusal, and confirms come out of order.  A delivery may be
acknowledged once everything published up to its own last publication may be relied on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

__all__ = ["Window"]


@dataclass(slots=True)
class _Published:
    key: str
    tag: int | None
    load: Any
    confirmed: bool = False


class Window:
    """What was published on one channel and is not yet relied on."""

    def __init__(self) -> None:
        #: Key → why, of all that the broker returned or refused.
        self.refused: dict[str, str] = {}
        self._last = 0
        self._open: dict[int, _Published] = {}
        self._keys: dict[str, _Published] = {}
        self._order: deque[_Published] = deque()

    def __len__(self) -> int:
        """Publications whose confirm is to come."""
        return len(self._open)

    def publish(self, key: str, tag: int | None = None, load: Any = None) -> None:
        """Note a publication, in order.

        :param key: Names it in a return.
        :param tag: The delivery that is done with once all up to here is relied on.
        :param load: What :meth:`relied_on` is to give back.
        """
        self._last += 1
        published = _Published(key, tag, load)
        self._open[self._last] = published
        self._keys[key] = published
        self._order.append(published)

    def extend(self, tag: int) -> bool:
        """Let ``tag`` be done with when the last publication is; ``False`` if there is none."""
        if not self._order:
            return False
        self._order[-1].tag = tag
        return True

    def returned(self, key: str | None, reason: str) -> None:
        """The broker gave a publication back; an unknown key refuses everything that is open."""
        if key is not None and key in self._keys:
            self.refused[key] = reason
            return
        for name in self._keys:
            self.refused.setdefault(name, reason)

    def confirmed(self, number: int, multiple: bool, *, refused: bool = False) -> None:
        """A confirm, or a refusal, of one publication or of all up to it."""
        if multiple:
            numbers = []
            for each in self._open:
                if each > number:
                    break
                numbers.append(each)
        else:
            numbers = [number] if number in self._open else []
        for each in numbers:
            published = self._open.pop(each)
            if self._keys.get(published.key) is published:
                del self._keys[published.key]
            if refused:
                self.refused.setdefault(published.key, "the queue refused it")
            elif published.key not in self.refused:
                published.confirmed = True

    def relied_on(self) -> list[tuple[int | None, Any]]:
        """The tags and loads of the longest prefix that may newly be relied on."""
        order, found = self._order, []
        while order and order[0].confirmed:
            published = order.popleft()
            found.append((published.tag, published.load))
        return found

    def forget(self) -> dict[str, str]:
        """Begin anew once nothing is open; what was refused, and why."""
        refused, self.refused = self.refused, {}
        self._order.clear()
        return refused
