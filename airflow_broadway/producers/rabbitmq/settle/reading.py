"""What one settlement reads of a lease queue, and how two that do so at once report together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, Action, Verdict
from airflow_broadway.core.errors import ProducerError, StagingError
from airflow_broadway.producers.kit.generation_log import Settled
from airflow_broadway.producers.kit.reports import beyond, report_of
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.bundle import Header, Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.staged_bundle import load_staged

__all__ = ["BundlesRead", "Verdicts", "together", "unreported"]


def unreported(now: Mapping[str, Action], settlement: Settlement) -> SettleReport:
    """What was settled at once beyond what the settlement knows of.

    :param now: The messages that were settled at once: message id → action.
    """
    return beyond(report_of(now.values()), settlement)


class Verdicts:
    """What a settlement says of the messages of a lease queue."""

    def __init__(self, settlement: Settlement) -> None:
        self._verdicts = {entry.message_id: entry.verdict for entry in settlement.entries()}
        self._rest = settlement.rest
        #: Whether there is a manifest.
        self.published = settlement.expected is not None
        # The messages of the manifest, where the queue may hold others.
        self._manifest: set[str] | None = None
        if settlement.rest.action is not Action.RELEASE and settlement.everything is not None:
            self._manifest = {entry.message_id for entry in settlement.everything()}

    @property
    def named(self) -> dict[str, Action]:
        """The messages that have a verdict of their own."""
        return {key: verdict.action for key, verdict in self._verdicts.items()}

    def of(self, message_id: str) -> Verdict:
        """What is to be done with a message."""
        return self._verdicts.get(message_id, self._rest)

    def names(self, message_id: str) -> bool:
        """Whether the manifest has the message, as far as that matters."""
        return (
            self._manifest is None or message_id in self._manifest or message_id in self._verdicts
        )


class BundlesRead:
    """What was read of a lease queue, and what became of it.

    :param named: The messages that have a verdict of their own.
    """

    def __init__(self, named: Mapping[str, Action]) -> None:
        self.named = named
        #: Bundle → its messages.
        self.bundles: dict[str, list[str]] = {}
        #: Message id → what was done with it.
        self.became: dict[str, Action] = {}
        self.failed: set[str] = set()
        self.errors: list[str] = []
        self._hashes: dict[str, int] = {}
        self._more: Counter[Action] = Counter()

    def unpack(self, body: bytes, journal: QueueJournal) -> tuple[Header | None, list[Held]]:
        """A bundle's header and messages; no header if it cannot be read: it stays where it is."""
        try:
            header, messages = bundles.unpack(body)
            if header.staged is not None:
                messages = load_staged(header, journal)
        except (ProducerError, StagingError) as error:
            self.errors.append(str(error))
            return None, []
        self.bundles.setdefault(header.bundle, [])
        return header, messages

    def repeats(self, message: Held) -> bool:
        """Whether the very same message was read before."""
        return self._hashes.get(message.message_id) == _hash_of(message)

    def note(self, bundle: str, message: Held, action: Action) -> None:
        """Note what is done with a message."""
        key = message.message_id
        if key in self.became:  # of a generation without a manifest: all of it is given back
            self._more[action] += 1
            return
        self.became[key] = action
        self._hashes[key] = _hash_of(message)
        self.bundles[bundle].append(key)

    def fail(self, message_id: str) -> None:
        """Note that what was to be done with a message was not."""
        if self.became.pop(message_id, None) is not None:
            self.failed.add(message_id)

    @property
    def actions(self) -> Counter[Action]:
        """How many messages were done with in which way."""
        return Counter(self.became.values()) + self._more


def _hash_of(message: Held) -> int:
    return hash((message.attempt, message.route, message.properties, message.body))


def together(other: Settled, read: BundlesRead) -> tuple[SettleReport, list[str] | None]:
    """The report of two settlements at once: this one, and another that noted its own meanwhile.

    :returns: The report, and the bundles that it is true of; ``None``: all.
    """
    report = other.report
    if other.details["bundles"] is None:
        return report, None
    theirs, done = set(other.details["bundles"]), other.details["messages"]
    mine: Counter[Action] = Counter()
    final: list[str] = []
    failed = 0
    for name, ids in read.bundles.items():
        if name not in theirs:
            own = [key for key in ids if key not in done]
            mine.update(read.became[key] for key in own if key in read.became)
            final += [key for key in own if read.became.get(key, Action.RELEASE) not in COMES_AGAIN]
            failed += sum(key in read.failed for key in own)
    added = report_of(mine, failed=failed, errors=read.errors)
    report = replace(report + added, lapsed=max(0, report.lapsed - added.total))
    if report.again is not None:
        report = replace(report, again=report.again.but(final))
    return report, sorted({*theirs, *read.bundles})
