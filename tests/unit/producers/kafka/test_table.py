"""Tables of partitions: pure functions, and a model of them that keeps each offset by itself."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.producers.kafka.ranges import FOREVER, Ranges, contains, count, of_offsets
from airflow_broadway.producers.kafka.settling import (
    AT_ONCE,
    Decision,
    Rest,
    decided,
    settle,
    settle_now,
)
from airflow_broadway.producers.kafka.table import (
    Held,
    Table,
    claim,
    drop,
    free,
    skip,
    unclaim,
)

ACK, RELEASE = Action.ACK, Action.RELEASE
DEAD = Decision(Action.DEAD_LETTER)
HALT = Decision(Action.LEAVE)


def retry(attempt: int = 1, at: float = 0.0, group: str = "") -> Decision:
    return Decision(Action.RETRY, at, attempt, group)


def claimed(table: Table, ranges: Ranges, who: str = "g", order: str = "none") -> Table:
    made, given = claim(table, who, ranges, 0.0, until=900.0, order=order)
    assert given == ranges
    return made


def again(table: Table) -> Table:
    """The table as another process reads it."""
    return Table.from_json(json.loads(json.dumps(table.to_json())))


# ------------------------------------------------------------------------------- what is free
def test_what_is_held_or_finished_is_not_free() -> None:
    table = claimed(Table(base=10, done=((12, 14),)), ((20, 30),))

    assert free(table, "other", 0.0, order="none") == ((10, 12), (14, 20), (30, FOREVER))


@pytest.mark.parametrize("order", ["partition", "key"])
def test_where_order_counts_a_partition_is_one_runs_alone(order: str) -> None:
    table = claimed(Table(base=0), ((0, 5),), order=order)

    assert free(table, "other", 0.0, order=order) == ()
    assert free(table, "g", 0.0, order=order) == ((5, FOREVER),)
    _, given = claim(table, "other", ((5, 9),), 0.0, until=1.0, order=order)
    assert given == ()


def test_a_message_that_is_not_ready_holds_up_a_partition_in_order() -> None:
    table = Table(base=0, held={7: Held(1, not_before=50.0)})

    assert free(table, "g", 49.0, order="partition") == ((0, 7),)
    assert free(table, "g", 49.0, order="none") == ((0, 7), (8, FOREVER))
    assert free(table, "g", 49.0, order="key") == ((0, 7), (8, FOREVER))
    assert free(table, "g", 50.0, order="partition") == ((0, FOREVER),)


def test_what_a_run_gave_back_it_does_not_take_again() -> None:
    table = claimed(Table(base=0), ((0, 3),))
    table, _ = settle_now(table, "g", {1: Decision(RELEASE)}, order="none")

    assert free(table, "g", 0.0, order="none") == ((3, FOREVER),)
    assert free(table, "other", 0.0, order="none") == ((1, 2), (3, FOREVER))


# ------------------------------------------------------------------------------- settling
def test_the_base_moves_over_what_is_finished_without_a_gap() -> None:
    table = claimed(Table(base=0), ((0, 10),))

    table, counts = settle(
        table, "g", {3: retry()}, Rest(ACK, ((0, 10),), messages=10), order="none"
    )

    assert (table.base, table.done) == (3, ((4, 10),))
    assert table.held == {3: Held(1)}
    assert counts == {"acked": 9, "requeued": 1}
    # When that one is finished too, all is
    table = claimed(table, ((3, 4),), who="h")
    table, _ = settle(table, "h", {}, Rest(ACK, ((3, 4),), messages=1), order="none")
    assert (table.base, table.done, table.held) == (10, (), {})


def test_gaps_of_the_log_are_finished_and_not_counted() -> None:
    """500 produced, 150 of them aborted: 350 are received, and the base is the end, 520."""
    table = claimed(Table(base=0), ((0, 520),))

    table, counts = settle(table, "g", {}, Rest(ACK, ((0, 520),), messages=350), order="none")

    assert (table.base, counts) == (520, {"acked": 350})


def test_gaps_are_finished_too_when_the_messages_are_given_back() -> None:
    table = claimed(Table(base=0), ((0, 6),))
    named = {0: "", 2: "", 4: ""}

    table, counts = settle(table, "g", {}, Rest(RELEASE, ((0, 6),), 3, named), order="none")

    assert counts == {"released": 3}
    assert (table.base, table.done) == (0, ((1, 2), (3, 4), (5, 6)))
    assert table.marks == ((0, 1), (2, 3), (4, 5))


def test_what_was_claimed_ahead_and_never_read_is_free_and_not_marked() -> None:
    table = claimed(Table(base=0), ((0, 2000),), order="partition")

    table, counts = settle(table, "g", {}, Rest(RELEASE, ((0, 3),), 3), order="partition")

    assert counts == {"released": 3}
    assert table.marks == ((0, 3),)
    assert free(table, "h", 0.0, order="partition") == ((0, FOREVER),)


def test_of_a_process_that_died_all_that_it_claimed_comes_marked() -> None:
    table = claimed(Table(base=0), ((0, 2000),), order="partition")

    table, _ = settle(table, "g", {}, Rest(RELEASE), order="partition")

    assert table.marks == ((0, 2000),)
    assert free(table, "h", 0.0, order="partition") == ((0, FOREVER),)


def test_what_no_manifest_names_is_never_acknowledged() -> None:
    table = claimed(Table(base=0), ((0, 5),))
    rest = Rest(ACK, ((0, 5),), 5, {0: "", 1: "", 3: ""}, whole=False)

    table, counts = settle(table, "g", {}, rest, order="none")

    assert counts == {"acked": 3, "released": 2}
    assert table.marks == ((2, 3), (4, 5))


def test_a_release_keeps_the_attempts_that_were_used() -> None:
    table = claimed(Table(base=0, held={0: Held(2, not_before=0.0)}), ((0, 1),))

    table, _ = settle(table, "g", {}, Rest(RELEASE, ((0, 1),), 1), order="none")

    assert table.held == {0: Held(2)}


@pytest.mark.parametrize("decision", [retry(), Decision(RELEASE), HALT])
def test_in_order_what_follows_a_message_that_comes_again_is_given_back(decision: Decision) -> None:
    table = claimed(Table(base=0), ((0, 6),), order="partition")
    named = dict.fromkeys(range(6), "")

    table, counts = settle(
        table,
        "g",
        {2: decision, 4: DEAD, 5: retry()},
        Rest(ACK, ((0, 6),), 6, named),
        order="partition",
    )

    assert table.base == 2
    assert table.done == ()
    assert counts["acked"] == 2
    assert counts["released"] == (4 if decision.action is RELEASE else 3)
    assert "dead_lettered" not in counts


def test_by_key_only_messages_of_the_key_are_held_up() -> None:
    table = claimed(Table(base=0), ((0, 6),), order="key")
    named = dict(enumerate(["a", "b", "a", "b", "", ""]))

    table, counts = settle(
        table, "g", {0: retry(group="a")}, Rest(ACK, ((0, 6),), 6, named), order="key"
    )

    assert counts == {"acked": 4, "requeued": 1, "released": 1}
    assert table.done == ((1, 2), (3, 6))
    assert table.held == {0: Held(1, 0.0, "a")}


def test_the_letters_that_are_sent_are_those_that_order_leaves() -> None:
    table = claimed(Table(base=0), ((0, 3),), order="partition")
    rest = Rest(ACK, ((0, 3),), 3, dict.fromkeys(range(3), ""))

    made = decided(table, "g", {0: DEAD, 1: retry(), 2: DEAD}, rest, order="partition")

    assert [offset for offset, each in made.items() if each == DEAD] == [0]


def test_settling_says_the_same_again() -> None:
    table = claimed(Table(base=0), ((0, 2),))
    table, counts = settle(table, "g", {0: DEAD}, Rest(ACK, ((0, 2),), 2), order="none")

    assert again(table).past["g"] == counts == {"acked": 1, "dead_lettered": 1}


def test_a_table_remembers_fifty_generations() -> None:
    table = Table(base=0)
    for number in range(60):
        table = claimed(table, ((number, number + 1),), who=f"g{number}")
        rest = Rest(ACK, ((number, number + 1),), 1)
        table, _ = settle(table, f"g{number}", {}, rest, order="none")

    assert list(table.past) == [f"g{number}" for number in range(10, 60)]


# ------------------------------------------------------------------------------- at once
def test_what_is_settled_at_once_is_counted_apart() -> None:
    table = claimed(Table(base=0), ((0, 4),))
    table, done = settle_now(table, "g", {0: Decision(ACK), 9: Decision(ACK)}, order="none")
    table, twice = settle_now(table, "g", {0: DEAD, 1: DEAD}, order="none")

    table, counts = settle(table, "g", {}, Rest(ACK, ((0, 4),), messages=4), order="none")

    assert done == {0: ACK}
    assert twice == {0: ACK, 1: Action.DEAD_LETTER}
    assert counts == {"acked": 2, f"{AT_ONCE}acked": 1, f"{AT_ONCE}dead_lettered": 1}
    assert table.base == 4


def test_at_once_too_order_is_kept() -> None:
    table = claimed(Table(base=0), ((0, 4),), order="partition")
    table, _ = settle_now(table, "g", {1: retry()}, order="partition")

    table, done = settle_now(table, "g", {0: Decision(ACK), 2: Decision(ACK)}, order="partition")

    assert done == {0: ACK, 2: RELEASE}


@pytest.mark.parametrize("decision", [retry(group="a"), Decision(RELEASE, group="a")])
def test_at_once_too_order_is_kept_by_key(decision: Decision) -> None:
    table = claimed(Table(base=0), ((0, 4),), order="key")
    table, _ = settle_now(table, "g", {1: decision}, order="key")
    later = {2: Decision(ACK, group="a"), 3: Decision(ACK, group="b")}

    table, done = settle_now(again(table), "g", later, order="key")

    assert done == {2: RELEASE, 3: ACK}


def test_a_late_settler_still_knows_what_was_settled_at_once() -> None:
    table = claimed(Table(base=0), ((0, 2),))
    table, _ = settle_now(table, "g", {1: Decision(ACK)}, order="none")

    table = drop(table, "g")

    assert table.now["g"] == {"ack": ((1, 2),)}


# ------------------------------------------------------------------------------- the rest
def test_what_holds_no_message_is_finished_unless_somebody_holds_it() -> None:
    table = claimed(Table(base=0), ((3, 5),))

    assert skip(table, ((0, 8),)).done == ((5, 8),)
    assert skip(table, ((0, 8),)).base == 3


def test_a_claim_is_taken_back_without_a_mark() -> None:
    table = claimed(Table(base=0), ((0, 5),))

    assert unclaim(table, "g", ((0, 5),)) == Table(base=0)
    assert unclaim(table, "g", ((3, 5),)).claims["g"].ranges == ((0, 3),)
    assert unclaim(table, "nobody", ((0, 5),)) == table


def test_the_highest_offset_that_was_handed_out_is_known() -> None:
    assert Table(base=4).highest == 4
    assert Table(base=4, held={9: Held(1)}).highest == 10
    assert claimed(Table(base=4), ((5, 30),)).highest == 30


def test_a_table_is_read_as_it_was_written() -> None:
    table = claimed(Table(base=1, held={5: Held(1, 2.5, "k")}, mirrored=1, epoch=3), ((7, 9),))
    table, _ = settle_now(table, "g", {7: retry()}, order="none")

    assert again(table) == table
    assert again(Table(base=0)) == Table(base=0)


def test_a_table_of_a_newer_release_is_refused() -> None:
    with pytest.raises(ValueError, match="format version 3; this release reads 2"):
        Table.from_json({"v": 3, "base": 0})


# ------------------------------------------------------------------------------- the model
GENERATIONS = ("a", "b", "c")
END = 24
verdicts = st.sampled_from(list(Action))


class Model(RuleBasedStateMachine):
    """Each offset by itself: free, held by somebody, finished; and how often it failed."""

    order = "none"

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(base=0)
        self.finished: set[int] = set()
        self.holder: dict[int, str] = {}
        self.attempts: Counter[int] = Counter()
        self.marked: set[int] = set()
        self.took: Counter[str] = Counter()
        self.gave_back: set[tuple[str, int]] = set()
        self.accounted: Counter[str] = Counter()
        self.serial = 0

    def _name(self, who: str) -> str:
        return f"{who}{self.serial}"

    @rule(who=st.sampled_from(GENERATIONS), low=st.integers(0, END), size=st.integers(1, 8))
    def claims(self, who: str, low: int, size: int) -> None:
        name = self._name(who)
        self.table, given = claim(
            self.table, name, ((low, min(END, low + size)),), 0.0, until=1.0, order=self.order
        )
        for offset in (each for a, b in given for each in range(a, b)):
            assert offset not in self.finished
            assert offset not in self.holder
            assert (name, offset) not in self.gave_back
            self.holder[offset] = name
            self.took[name] += 1

    @precondition(lambda self: self.holder)
    @rule(data=st.data())
    def settles_now(self, data: Any) -> None:
        who = data.draw(st.sampled_from(sorted(set(self.holder.values()))))
        own = [offset for offset, holder in self.holder.items() if holder == who]
        offset = data.draw(st.sampled_from(own))
        action = data.draw(verdicts)
        self.table, done = settle_now(
            self.table, who, {offset: self._decision(offset, action)}, order=self.order
        )
        assert done == {offset: action}
        del self.holder[offset]
        self.accounted[who] += 1
        self.gave_back.add((who, offset))
        self._becomes(offset, action)

    @precondition(lambda self: self.holder)
    @rule(data=st.data(), rest=st.sampled_from([ACK, RELEASE]))
    def settles(self, data: Any, rest: Action) -> None:
        who = data.draw(st.sampled_from(sorted(set(self.holder.values()))))
        own = sorted(offset for offset, holder in self.holder.items() if holder == who)
        single = data.draw(st.dictionaries(st.sampled_from(own), verdicts))
        decisions = {offset: self._decision(offset, action) for offset, action in single.items()}
        named = dict.fromkeys(own, "")
        self.table, counts = settle(
            self.table,
            who,
            decisions,
            Rest(rest, of_offsets(own), self.took[who], named),
            order=self.order,
        )
        assert sum(counts.values()) == self.took[who]
        for offset in own:
            del self.holder[offset]
            self._becomes(offset, single.get(offset, rest))
        self.serial += 1

    @precondition(lambda self: self.holder)
    @rule(data=st.data())
    def dies(self, data: Any) -> None:
        who = data.draw(st.sampled_from(sorted(set(self.holder.values()))))
        self.table = drop(self.table, who)
        for offset in [each for each, holder in self.holder.items() if holder == who]:
            del self.holder[offset]
            self.marked.add(offset)
        self.serial += 1

    def _decision(self, offset: int, action: Action) -> Decision:
        return Decision(action, 0.0, self.attempts[offset] + 1)

    def _becomes(self, offset: int, action: Action) -> None:
        if action in (ACK, Action.DEAD_LETTER):
            self.finished.add(offset)
        else:
            self.marked.add(offset)
            self.attempts[offset] += action is Action.RETRY

    @invariant()
    def says_the_same(self) -> None:
        table = again(self.table)
        assert table == self.table
        base = next(offset for offset in range(END + 1) if offset not in self.finished)
        assert table.base == base
        assert count(table.done) == len([each for each in self.finished if each > base])
        for offset in range(END):
            held = {who for who, each in table.claims.items() if contains(each.ranges, offset)}
            assert held == ({self.holder[offset]} if offset in self.holder else set())
            if offset not in self.finished:
                failed = table.held.get(offset)
                assert (failed.attempts if failed else 0) == self.attempts[offset]
                redelivered = failed is not None or contains(table.marks, offset)
                assert redelivered == (offset in self.marked)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
