"""Counts listings of a queue whose broker deletes a message after a number of deliveries.

Some brokers return a message only by delivering it, and count each delivery against a limit of the
queue.  So each listing is counted in a small file before it begins, and refused close to the limit.
"""

from __future__ import annotations

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import pluralize
from airflow_broadway.producers.kit.state_files import StateFiles, digest, state_files

#: Deliveries below the limit that are reserved for other clients and for concurrent listings.
RESERVE = 2


class LookCount:
    """The number of deliveries that listings have used up at one dead-letter queue.

    :param staging: The pipeline's staging folder, for the count; ``None``: it is in memory.
    :param queue: The queue's description.
    :param limit: The deliveries after which the broker removes a message; ``None``: no limit.
    :param setting: The name of the limit's setting, such as ``"x-delivery-limit"``.
    """

    def __init__(self, staging: str | None, queue: str, limit: int | None, setting: str) -> None:
        self._files: StateFiles = state_files(staging, "looks")
        self._file = f"{digest(queue)}.json"
        self._queue = queue
        self._limit = limit
        self._setting = setting
        self._highest = 0

    @property
    def limit(self) -> int | None:
        """The deliveries after which the broker removes a message; ``None``: no limit."""
        return self._limit

    def begin(self, *, empty: bool = False) -> None:
        """Counts a listing, or refuses it.

        :param empty: Whether the queue is known to be empty, which resets the count.
        :raises ProducerError: If the count is close to the limit.
        """
        if self._limit is None:
            return
        used = 0 if empty else self._used() + 1
        if not empty and used > self._limit - RESERVE:
            raise self.refusal()
        self._files.write(self._file, {"queue": self._queue, "deliveries": used})

    def note(self, deliveries: int) -> None:
        """Adopts the broker's delivery count of one dead letter, including this listing.

        :raises ProducerError: If another listing might remove the dead letter.
        """
        self._highest = max(self._highest, deliveries)
        if self._limit is None or deliveries <= self._used():
            return
        self._files.write(self._file, {"queue": self._queue, "deliveries": deliveries})
        if deliveries > self._limit - RESERVE:
            raise self.refusal()

    def end(self) -> None:
        """Adopts the highest delivery count of a complete listing."""
        if self._limit is not None:
            self._files.write(self._file, {"queue": self._queue, "deliveries": self._highest})

    def refusal(self) -> ProducerError:
        """Returns the error of a refused listing."""
        return ProducerError(
            f"the dead letters in {self._queue} cannot be listed any more: {self._setting} is"
            f" {self._limit}, each look counts as a delivery, and after"
            f" {pluralize(self._limit or 0, 'delivery', 'deliveries')} the broker removes a letter;"
            f" raise {self._setting}, or send back or delete all of them (--all)"
        )

    def _used(self) -> int:
        value = self._files.read(self._file)
        return int(value["deliveries"]) if isinstance(value, dict) else 0
