"""Which messages may have been handed out before: Pub/Sub itself does not tell.

Without a dead-letter policy Pub/Sub counts no deliveries.  A message comes again for one of two
reasons, and both are known from staging: somebody gave it back, and noted that before; or the lease
of a generation lapsed, whose receipts are still there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kit.receipts.receipts import ReceiptsFolder

__all__ = ["Earlier"]

log = logging.getLogger(__name__)

#: Seconds between two looks for generations of others: less than the shortest lease.
_LOOK_INTERVAL: Final = 5.0


class Earlier:
    """What generations held whose lease has lapsed; used from one thread.

    :param own: The generation that asks.
    """

    def __init__(self, folder: ReceiptsFolder, own: str) -> None:
        self._folder = folder
        self._own = own
        self._look_at = 0.0
        #: Open generations of others → until when their messages are held, as far as is known.
        self._until: dict[str, float] = {}
        #: Those that nothing more is to be learnt of.
        self._known: set[str] = set()
        self._ids: set[str] = set()

    def among(self, ids: Iterable[str], now: datetime) -> set[str]:
        """Those of ``ids`` that such a generation held.

        :raises StagingError: If that cannot be read.
        """
        instant = now.timestamp()
        if instant >= self._look_at:
            self._look_at = instant + _LOOK_INTERVAL
            self._look()
        for each in [each for each, until in self._until.items() if until <= instant]:
            self._learn(each, instant)
        return self._ids.intersection(ids) if self._ids else set()

    def _look(self) -> None:
        found = self._folder.open_ones(self._own)
        self._until = {each: self._until.get(each, 0.0) for each in found - self._known}

    def _learn(self, folder: str, now: float) -> None:
        try:
            receipts = self._folder.in_folder(folder)
        except StagingError as error:  # settled meanwhile, or of another release
            log.info("%s", error)
            return
        if receipts.report is None:
            # What has received nothing yet has nothing that lapses before the next look.
            self._until[folder] = receipts.until or now + _LOOK_INTERVAL
            if self._until[folder] > now:
                return
            self._ids.update(receipts.handles)
        # Lapsed; or settled, which noted what came again.
        self._known.add(folder)
        del self._until[folder]
