"""The account from outside: what was confirmed to the publisher, and where it is now.

Known are the publisher's numbers, the sink's lines and the queues' contents.  What the package
itself reports is held against that at the end, never used for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.living.brokers import DEAD, Left
from tests.living.pipelines import fails_at_first
from tests.living.sink import Handled


@dataclass
class Account:
    """The final states of the messages.

    :param confirmed: How many the broker confirmed to the publisher.
    :param handled: Of them, in the sink; ``settled``: and in no queue any more.
    :param lost: Confirmed, and then neither handled nor in a queue.
    :param again: Messages handled again, or handled and still in a queue.
    :param unmarked: Those of them that are not marked as possible duplicates.
    :param places: How many messages lie where.
    :param mistakes: Where the reports differ from the truth.
    """

    confirmed: int = 0
    handled: int = 0
    settled: int = 0
    lost: list[int] = field(default_factory=list)
    again: int = 0
    unmarked: list[int] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.confirmed} confirmed, {self.handled} handled, {len(self.lost)} lost, "
            f"{self.again} again, {len(self.unmarked)} of them unmarked; in queues: "
            f"{dict(self.places)}; {'; '.join(self.mistakes) or 'the reports agree'}"
        )

    @property
    def good(self) -> bool:
        """Whether nothing was lost, repeated without a mark, or misreported."""
        return not (self.lost or self.unmarked or self.mistakes)


def account(
    confirmed: Mapping[int, float], published: int, lines: Sequence[Handled], left: Sequence[Left]
) -> Account:
    """Looks for each number in the sink and in the queues.

    :param published: How many were published; what was not confirmed may be anywhere, but once.
    """
    summary = Account(confirmed=len(confirmed))
    summary.places.update(message.place for message in left)
    done: dict[int, list[bool]] = defaultdict(list)
    batches: dict[int, set[str]] = defaultdict(set)
    for line in lines:
        before = batches[line.number]
        # The same batch once more has the same id: a sink knows it by that.
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
        summary.again += max(0, len(first) + len(then) - 1)
        # One appearance may be without a mark; where it was handled, that is the one.
        if first.count(False) > 1 or then.count(False) > (0 if first else 1):
            summary.unmarked.append(number)
    strange = done.keys() | queued.keys()
    if strange:
        summary.mistakes.append(f"messages that nobody published: {sorted(strange)[:10]}")
    return summary


def check_order(
    made: Account,
    lines: Sequence[Handled],
    left: Sequence[Left],
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
        made.mistakes.append(f"settled before earlier ones: {sorted(overtaking)[:10]}")


def check_attempts(made: Account, lines: Sequence[Handled]) -> None:
    """Checks that only failures use up attempts: kills do not."""
    wrong = {line.number for line in lines if line.attempt != 1 + fails_at_first(line.number)}
    if wrong:
        made.mistakes.append(f"handled at a wrong attempt: {sorted(wrong)[:10]}")


def compare(made: Account, reports: Sequence[Mapping[str, Any]]) -> None:
    """Compares the totals of the runs' reports with the account.

    For runs of which each was settled, and none was killed, stalled or late.
    """
    totals = _totals(reports)
    for what, result, truth in (
        ("acked", totals["acked"], made.settled),
        ("dead-lettered", totals["dead_lettered"], made.places[DEAD]),
        ("still leased", 0, made.places["leased"]),
        ("lapsed", totals["lapsed"], 0),
        ("failed to settle", totals["settle_failed"], 0),
    ):
        if result != truth:
            made.mistakes.append(f"the reports say {result} {what}, and the truth is {truth}")


def bound(
    made: Account, reports: Mapping[str, Mapping[str, Any]], lines: Sequence[Handled]
) -> None:
    """Compares the runs' reports with what can be true at most, in spite of kills and takeovers.

    A run whose messages were taken from it meanwhile must not count what others count too.

    :param reports: Of each run by its name, the last.
    """
    # At RabbitMQ a message may come twice, under two ids, after a process died.
    done: dict[str, set[tuple[int, str]]] = defaultdict(set)
    twins: dict[int, set[str]] = defaultdict(set)
    for line in lines:
        done[line.run].add((line.number, line.message_id))
        twins[line.number].add(line.message_id)
    more = sum(len(ids) - 1 for ids in twins.values())
    for run, report in reports.items():
        if report["acked"] > len(done[run]):
            made.mistakes.append(f"{run}: {report['acked']} acked, {len(done[run])} handled")
    totals = _totals(reports.values())
    for what, result, most in (
        ("acked", totals["acked"], made.settled + more),
        ("dead-lettered", totals["dead_lettered"], made.places[DEAD]),
    ):
        if result > most:
            made.mistakes.append(f"the reports say {result} {what}, and at most {most} were")


def _totals(reports: Iterable[Mapping[str, Any]]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for report in reports:
        totals.update({name: count for name, count in report.items() if isinstance(count, int)})
    return totals
