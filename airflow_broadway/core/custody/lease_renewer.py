"""Renews leases in a thread while messages are handled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed
from airflow_broadway.core.log_context import keep_ids

log = logging.getLogger(__name__)

#: Renewals within the duration of a lease, so that some of them may fail.
RENEWALS = 4


class Renewer(Protocol):
    """The part of a custodian that a :class:`LeaseRenewer` uses."""

    def renew(self, lease: Lease) -> Lease | None:
        """Renews as :meth:`airflow_broadway.core.custody.protocol.Custodian.renew`."""

    def close(self) -> None: ...


class LeaseRenewer:
    """Renews leases from :meth:`start` to :meth:`stop`, or within ``with``.

    :param custodian: Opens the custodian; called in the renewing thread, which uses it alone.
    :param seconds: The duration of the shortest lease.
    :param leases: Returns the leases to renew: those that hold messages.
    :param renewed: Called with each renewed lease, in the renewing thread.
    :param at_once: Renew for the first time immediately: the last renewal may be long ago.
    """

    def __init__(
        self,
        custodian: Callable[[], Renewer],
        seconds: float,
        leases: Callable[[], Sequence[Lease]],
        *,
        renewed: Callable[[Lease], None] = lambda lease: None,
        at_once: bool = False,
    ) -> None:
        self._open = custodian
        self._interval = seconds / RENEWALS
        self._leases = leases
        self._renewed = renewed
        self._first = 0.0 if at_once else self._interval
        self._stop = threading.Event()
        self._lapsed: set[str] = set()
        self._thread = threading.Thread(
            target=keep_ids(self._run), name="broadway-lease-renewer", daemon=True
        )

    def __enter__(self) -> LeaseRenewer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def lapsed(self) -> bool:
        """Whether a lease has lapsed."""
        return bool(self._lapsed)

    def check(self) -> None:
        """Checks that all leases are still held.

        :raises LeaseLapsed: If one lapsed.
        """
        if self._lapsed:
            raise LeaseLapsed(
                f"this run no longer holds its messages (generations {sorted(self._lapsed)}): their"
                " lease lapsed before it was renewed; clear `process` to receive them again"
            )

    def start(self) -> None:
        """Starts; the first renewal is after a quarter of the lease, unless ``at_once``."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread.  Safe to repeat."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30.0)

    def _run(self) -> None:
        custodian: Renewer | None = None
        wait = self._first
        while not self._stop.wait(wait):
            wait = self._interval
            leases: Sequence[Lease] = ()
            with _logged_errors():
                leases = self._leases()
            for lease in leases:
                if lease.generation in self._lapsed:
                    continue
                # After an error other leases are renewed all the same, and the next round retries:
                # a lease lasts several rounds.
                with _logged_errors():
                    custodian = custodian or self._open()
                    self._renew(custodian, lease)
        if custodian is not None:
            custodian.close()

    def _renew(self, custodian: Renewer, lease: Lease) -> None:
        renewed = custodian.renew(lease)
        if renewed is None:
            self._lapsed.add(lease.generation)
            log.error(
                "the lease of generation %s has lapsed: its messages may be handled by another run",
                lease.generation,
            )
        else:
            self._renewed(renewed)


@contextmanager
def _logged_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        unexpected = None if isinstance(error, BroadwayError) else error
        log.warning("could not renew leases yet: %s", error, exc_info=unexpected)
