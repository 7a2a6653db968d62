"""The confirm rule, as a value without a network.

A publication may be relied on when the broker has confirmed it and has not returned it.  A return
comes before the confirm and cancels it; a nack is a refusal; confirms come in any order.

A delivery may be acknowledged when all that was made of it, and of the deliveries before it, may be
relied on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Place:
    """The place of one publication in the order of the deliveries."""

    key: str
    tag: int | None
    load: Any
    confirmed: bool = False
    refused: bool = False


class ConfirmWindow:
    """What was published on one channel and is not yet relied on."""

    def __init__(self) -> None:
        #: Key → why, of all that the broker returned or refused.
        self.refused: dict[str, str] = {}
        self._last = 0
        self._open: dict[int, Place] = {}
        self._keys: dict[str, Place] = {}
        self._order: deque[Place] = deque()

    def __len__(self) -> int:
        """Publications whose confirm is to come."""
        return len(self._open)

    @property
    def idle(self) -> bool:
        """Whether all there was may be relied on."""
        return not self._order

    @property
    def uncertain(self) -> bool:
        """Whether the broker may have taken something that is not relied on."""
        return any(not place.refused for place in self._order)

    def publish(self, key: str, tag: int | None = None, load: Any = None) -> None:
        """Note a publication, which is made next.

        :param key: Names it in a return.
        :param tag: The delivery that is done with once all up to here is relied on.
        :param load: What :meth:`relied_on` is to give back.
        """
        place = Place(key, tag, load)
        self._last += 1
        self._order.append(place)
        self._open[self._last] = place
        self._keys[key] = place

    def extend(self, tag: int) -> bool:
        """Let ``tag`` be done with when the last place is; ``False`` if there is none."""
        if not self._order:
            return False
        last = self._order[-1]
        last.tag = tag if last.tag is None else max(tag, last.tag)
        return True

    def returned(self, key: str | None, reason: str) -> None:
        """Note that the broker gave a publication back: every open one, if its key is unknown."""
        names = [key] if key is not None and key in self._keys else list(self._keys)
        for name in names:
            self.refused.setdefault(name, reason)
            self._keys[name].refused = True

    def confirmed(self, number: int, multiple: bool, *, refused: bool = False) -> list[Place]:
        """Note the answer to one publication, or to all up to it; returns their places.

        :param number: Of the publication on its channel, from 1.
        """
        if multiple:
            numbers = []
            for each in self._open:
                if each > number:
                    break
                numbers.append(each)
        else:
            numbers = [number] if number in self._open else []
        answered = []
        for each in numbers:
            place = self._open.pop(each)
            answered.append(place)
            if self._keys.get(place.key) is place:
                del self._keys[place.key]
            if refused:
                self.refused.setdefault(place.key, "the queue refused it")
                place.refused = True
            elif place.key not in self.refused:
                place.confirmed = True
        return answered

    def relied_on(self) -> list[tuple[int | None, Any]]:
        """The tags and loads of what may newly be relied on, in order; each is returned once."""
        order, found = self._order, []
        while order and order[0].confirmed:
            place = order.popleft()
            found.append((place.tag, place.load))
        return found

    def forget(self) -> dict[str, str]:
        """Begin anew, once nothing is open; returns what was refused: key → why."""
        refused, self.refused = self.refused, {}
        self._order.clear()
        return refused
