"""Compares the confirmed messages with the sink and the queues, independently of the package.

The counts come from the publisher, the sink's file and the drained queues.  The package's reports
are then checked against them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.traffic.brokers import DEAD, QueuedMessage
from tests.traffic.pipelines import fails_at_first
from tests.traffic.sink import HandledMessage


@dataclass
class Account:
    """Counts of the messages by final state.

    :param confirmed: Messages that the broker confirmed to the publisher.
    :param handled: Messages in the sink.
    :param settled: Messages in the sink, but in no queue.
    :param lost: Confirmed messages that are neither in the sink nor in a queue.
    :param duplicates: Messages handled again, or handled and still in a queue.
    :param unmarked: Duplicates without a redelivery mark.
    :param places: Messages in queues, by place.
    :param mistakes: Differences between the reports and the counts, and other violations.
    """

    confirmed: int = 0
    handled: int = 0
    settled: int = 0
    lost: list[int] = field(default_factory=list)
    duplicates: int = 0
    unmarked: list[int] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.confirmed} confirmed, {self.handled} handled, {len(self.lost)} lost, "
            f"{self.duplicates} duplicates, {len(self.unmarked)} of them unmarked; in queues: "
            f"{dict(self.places)}; {'; '.join(self.mistakes) or 'the reports agree'}"
        )

    @property
    def passed(self) -> bool:
        """Whether there are no losses, unmarked duplicates or mistakes."""
        return not (self.lost or self.unmarked or self.mistakes)


def count_messages(
    confirmed: Mapping[int, float],
    published: int,
    lines: Sequence[HandledMessage],
    left: Sequence[QueuedMessage],
) -> Account:
    """Counts each number in the sink and in the queues.

    :param published: The number of published messages; unconfirmed ones may be lost.
    """
    summary = Account(confirmed=len(confirmed))
    summary.places.update(message.place for message in left)
    done: dict[int, list[bool]] = defaultdict(list)
    batches: dict[int, set[str]] = defaultdict(set)
    for line in lines:
        before = batches[line.number]
        # A repeated batch has the same id, by which a sink recognizes it.
        done[line.number].append(line.redelivered or line.attempt > 1 or line.batch in before)
        before.add(line.batch)
    summary.handled = len(done)
    queued: dict[int, list[bool]] = defaultdict(list)
    for message in left:
        queued[message.number].append(message.marked)
    summary.settled = summary.handled - len(done.keys() & queued.keys())
    for number in range(published):
        first, then = done.pop(number, []), queued.pop(number, [])
        if not first and not then and number in confirmed:
            summary.lost.append(number)
        summary.duplicates += max(0, len(first) + len(then) - 1)
        # One copy may be unmarked: the handled one, if there is one.
        if first.count(False) > 1 or then.count(False) > (0 if first else 1):
            summary.unmarked.append(number)
    strange = done.keys() | queued.keys()
    if strange:
        summary.mistakes.append(f"messages that were not published: {sorted(strange)[:10]}")
    return summary


def check_order(
    account: Account,
    lines: Sequence[HandledMessage],
    left: Sequence[QueuedMessage],
    group_of: Callable[[int], int | None],
) -> None:
    """Checks that a message is settled only after all earlier messages of its group.

    A message may be handled before an earlier one if it is handled again afterwards.
    """
    queued = {message.number for message in left if message.place != DEAD}
    stacks: dict[int, list[int]] = defaultdict(list)
    for line in lines:
        group = group_of(line.number)
        if group is not None:
            stack = stacks[group]
            while stack and stack[-1] >= line.number:
                stack.pop()
            stack.append(line.number)
    in_order = {number for stack in stacks.values() for number in stack}
    settled = {line.number for line in lines if group_of(line.number) in stacks} - queued
    overtaking = settled - in_order | {
        number
        for number in settled
        if any(earlier < number and group_of(earlier) == group_of(number) for earlier in queued)
    }
    if overtaking:
        account.mistakes.append(f"settled before earlier ones: {sorted(overtaking)[:10]}")


def check_attempts(account: Account, lines: Sequence[HandledMessage]) -> None:
    """Checks that failures use up attempts and kills do not."""
    wrong = {line.number for line in lines if line.attempt != 1 + fails_at_first(line.number)}
    if wrong:
        account.mistakes.append(f"handled at a wrong attempt: {sorted(wrong)[:10]}")


def check_reports(account: Account, reports: Sequence[Mapping[str, Any]]) -> None:
    """Checks that the totals of the runs' reports equal the counts.

    Only for runs that all settled, and of which none was killed, stopped or late.
    """
    totals = _totals(reports)
    for what, result, truth in (
        ("acked", totals["acked"], account.settled),
        ("dead-lettered", totals["dead_lettered"], account.places[DEAD]),
        ("still leased", 0, account.places["leased"]),
        ("lapsed", totals["lapsed"], 0),
        ("failed to settle", totals["settle_failed"], 0),
    ):
        if result != truth:
            account.mistakes.append(f"the reports say {result} {what}, {truth} were counted")


def check_report_limits(
    account: Account, reports: Mapping[str, Mapping[str, Any]], lines: Sequence[HandledMessage]
) -> None:
    """Checks that the runs' reports do not exceed the counts, despite kills and takeovers.

    A run whose messages were taken over must not count messages that the other run counts.

    :param reports: The last report of each run by its name.
    """
    # After a crash RabbitMQ may deliver a message twice, under two ids.
    done: dict[str, set[tuple[int, str]]] = defaultdict(set)
    twins: dict[int, set[str]] = defaultdict(set)
    for line in lines:
        done[line.run].add((line.number, line.message_id))
        twins[line.number].add(line.message_id)
    more = sum(len(ids) - 1 for ids in twins.values())
    for run, report in reports.items():
        if report["acked"] > len(done[run]):
            account.mistakes.append(f"{run}: {report['acked']} acked, {len(done[run])} handled")
    totals = _totals(reports.values())
    for what, result, most in (
        ("acked", totals["acked"], account.settled + more),
        ("dead-lettered", totals["dead_lettered"], account.places[DEAD]),
    ):
        if result > most:
            account.mistakes.append(f"the reports say {result} {what}, at most {most} were counted")


def _totals(reports: Iterable[Mapping[str, Any]]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for report in reports:
        totals.update({name: count for name, count in report.items() if isinstance(count, int)})
    return totals
