"""Knows which messages were delivered before, where the broker does not count deliveries.

A message comes again for one of two reasons, and both are known from staging: it was released,
which was recorded before; or the lease of a generation lapsed, whose receipts are still there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.engine.receipts import ReceiptsFolder

log = logging.getLogger(__name__)

#: Seconds between two looks for generations of others: less than the shortest lease.
_LOOK_INTERVAL: Final = 5.0


class Earlier:
    """The messages of generations whose lease has lapsed; used from one thread.

    :param own: The generation of the caller.
    """

    def __init__(self, folder: ReceiptsFolder, own: str) -> None:
        self._folder = folder
        self._own = own
        self._look_at = 0.0
        #: Open generations of others → until when their messages are held, as far as is known.
        self._until: dict[str, float] = {}
        #: Generations of which nothing more is to be learnt.
        self._known: set[str] = set()
        self._ids: set[str] = set()

    def among(self, ids: Iterable[str], now: datetime) -> set[str]:
        """Returns those of ``ids`` that such a generation held.

        :raises StagingError: If that cannot be read.
        """
        seconds = now.timestamp()
        if seconds >= self._look_at:
            self._look_at = seconds + _LOOK_INTERVAL
            open_ones = self._folder.open_ones(self._own) - self._known
            self._until = {folder: self._until.get(folder, 0.0) for folder in open_ones}
        for folder in [folder for folder, until in self._until.items() if until <= seconds]:
            self._learn(folder, seconds)
        return self._ids.intersection(ids) if self._ids else set()

    def _learn(self, folder: str, now: float) -> None:
        try:
            receipts = self._folder.in_folder(folder)
        except StagingError as error:  # settled meanwhile, or of another release
            log.info("%s", error)
            return
        if receipts.report is None:
            # One that has received nothing yet has nothing that lapses before the next look.
            self._until[folder] = receipts.until or now + _LOOK_INTERVAL
            if self._until[folder] > now:
                return
            self._ids.update(receipts.handles)
        # Lapsed; or settled, which recorded what came again.
        self._known.add(folder)
        del self._until[folder]
