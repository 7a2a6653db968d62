"""Keep leases alive while a task is at work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from airflow_broadway.core.custody import Custodian, Lease
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed

log = logging.getLogger(__name__)

#: A lease is renewed this many times within its length, so that two renewals may fail unnoticed.
RENEWALS = 4


class LeaseKeeper:
    """Renews leases from a thread, from ``with`` to its end.

    :param open_custodian: Opens the custodian; called in the thread that then uses it alone.
    :param leases: What to renew.
    :param renewed: Called with each renewed lease, in the thread.
    :param idle: Called before each round; the round is passed over while it returns true.
    """

    def __init__(
        self,
        open_custodian: Callable[[], Custodian],
        leases: Sequence[Lease],
        *,
        renewed: Callable[[Lease], None] = lambda lease: None,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._open = open_custodian
        self._leases = list(leases)
        self._renewed = renewed
        self._idle = idle
        self._stop = threading.Event()
        self._lapsed: list[str] = []
        self._thread = threading.Thread(target=self._keep, name="lease-keeper", daemon=True)

    def __enter__(self) -> Self:
        if self._leases:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def check(self) -> None:
        """Go on only while all leases are held.

        :raises LeaseLapsed: If one lapsed.
        """
        if self._lapsed:
            raise LeaseLapsed(
                f"this run no longer holds its messages (generations {self._lapsed}): their lease"
                " lapsed before it was renewed; clear `process` to receive them again"
            )

    def _keep(self) -> None:
        custodian: Custodian | None = None
        interval = min(lease.seconds for lease in self._leases) / RENEWALS
        while not self._stop.wait(interval):
            if self._idle():
                continue
            for lease in list(self._leases):
                try:
                    custodian = custodian or self._open()
                    held = custodian.renew(lease)
                except BroadwayError as error:
                    # The next round tries again; the lease outlasts several.
                    log.warning("Could not renew the lease of %s: %s", lease.generation, error)
                    continue
                if held is None:
                    self._lapsed.append(lease.generation)
                    self._leases.remove(lease)
                    log.error("The lease of generation %s has lapsed.", lease.generation)
                else:
                    self._renewed(held)
        if custodian is not None:
            custodian.close()
