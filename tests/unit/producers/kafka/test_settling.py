"""The end of claims: pure functions, and a model with one entry per offset."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_broadway.core.custody.report import CLASS_OF, ComingAgain
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, Action
from airflow_broadway.producers.kafka.settling import (
    Claim,
    Decision,
    Ended,
    Failed,
    Read,
    contains,
    end_claim,
    keep_order,
    take_over,
)

ACK, RELEASE, RETRY = Action.ACK, Action.RELEASE, Action.RETRY


def verdict(action: Action, offset: int, **fields: Any) -> Decision:
    return Decision(action, message_id=f"t-0-{offset}", **fields)


def verdicts(*actions: tuple[int, Action], **fields: Any) -> dict[int, Decision]:
    return {offset: verdict(action, offset, **fields) for offset, action in actions}


def settled(
    claim: Claim,
    decisions: dict[int, Decision],
    *,
    rest: Action = ACK,
    order: str = "none",
    at_once: dict[int, Decision] | None = None,
    read: Read | None = None,
    names: tuple[int, ...] | None = None,
    whole: bool = True,
) -> Ended:
    read = read or Read(claim.start, claim.end, claim.end - claim.start)
    now = at_once or {}
    named = {o: verdict(rest, o) for o in names or () if o not in now} | decisions
    unnamed = rest if names is None else None if whole else RELEASE
    return end_claim(claim, read, keep_order(named, now, order), now, unnamed)


def claimed(start: int, end: int, **fields: Any) -> Claim:
    return Claim(start=start, end=end, generation="g", until=900.0, **fields)


def test_offset_moves_over_contiguous_finished_prefix():
    end = settled(claimed(10, 20), verdicts((13, RELEASE), (17, RELEASE)))

    assert (end.after.start, end.after.done) == (13, ((14, 17), (18, 20)))
    assert (end.after.generation, end.after.marked) == ("", 20)
    assert end.counts == {"acked": 8, "released": 2}
    assert end.again == ComingAgain(frozenset({"t-0-13", "t-0-17"}))


def test_finished_ranges_are_kept_until_offset_passes():
    claim = claimed(13, 14, done=((14, 17), (18, 20)))

    end = settled(claim, {}, read=Read(13, 14, 1))
    assert (end.after.start, end.after.done) == (14, ((14, 17), (18, 20)))

    again = settled(claimed(14, 20, done=end.after.done), {}, read=Read(14, 20, 1))
    assert (again.after.start, again.after.done, again.counts) == (20, (), {"acked": 1})


def test_log_gaps_are_finished_and_not_counted():
    end = settled(claimed(0, 10), {}, read=Read(0, 10, 4))

    assert (end.after.start, end.counts) == (10, {"acked": 4})


def test_log_gaps_are_finished_between_retries():
    end = settled(claimed(0, 10), {}, rest=RELEASE, read=Read(0, 10, 2), names=(4, 8))

    assert (end.after.start, end.after.done) == (4, ((5, 8), (9, 10)))
    assert end.counts == {"released": 2}


def test_unread_claimed_messages_are_not_marked():
    end = settled(claimed(0, 2_000), {}, read=Read(0, 7, 7))

    assert (end.after.start, end.after.marked) == (7, 7)


def test_dead_process_marks_whole_claim():
    end = settled(claimed(0, 2_000), {}, rest=RELEASE, read=Read(0, 2_000))

    assert (end.after.start, end.after.marked) == (0, 2_000)
    assert end.counts == {"released": 2_000}


def test_message_outside_manifest_is_never_acknowledged():
    end = settled(claimed(0, 5), {}, read=Read(0, 5, 5), names=(0, 1, 3), whole=False)

    assert (end.after.start, end.after.done) == (2, ((3, 4),))
    assert end.counts == {"acked": 3, "released": 2}
    assert end.again == ComingAgain(frozenset({"t-0-0", "t-0-1", "t-0-3"}), all_but=True)


def test_message_sent_to_retry_topic_is_finished():
    end = settled(claimed(0, 3), verdicts((1, RETRY), moved=True))

    assert (end.after.start, end.after.failed) == (3, {})
    assert end.counts == {"acked": 2, "requeued": 1}
    assert end.again == ComingAgain(frozenset({"t-0-1"}))


@pytest.mark.parametrize("action", [RETRY, RELEASE, Action.LEAVE])
def test_ordered_partition_stops_at_first_retry(action):
    decisions = verdicts((2, action), (4, Action.DEAD_LETTER), (5, RETRY), not_before=9.0)

    end = settled(claimed(0, 7), decisions, order="partition", names=tuple(range(7)))

    assert (end.after.start, end.after.done) == (2, ())
    expected = {"acked": 2, "released": 4}
    expected[CLASS_OF[action]] = expected.get(CLASS_OF[action], 0) + 1
    assert end.counts == expected
    assert end.after.failed == ({2: Failed(1, 9.0)} if action is RETRY else {})


def test_keyed_order_blocks_only_its_key():
    decisions = {
        0: verdict(RETRY, 0, group="a"),
        1: verdict(ACK, 1, group="b"),
        2: verdict(ACK, 2, group="a"),
        3: verdict(RETRY, 3, group=""),
        4: verdict(ACK, 4, group=""),
    }

    end = settled(claimed(0, 5), decisions, order="key")

    assert (end.after.start, end.after.done) == (0, ((1, 2), (4, 5)))
    assert end.counts == {"acked": 2, "requeued": 2, "released": 1}
    assert end.after.failed == {0: Failed(1, 0.0, "a"), 3: Failed(1)}


def test_release_keeps_attempts_without_delay():
    claim = claimed(0, 3, failed={1: Failed(2, 50.0)})

    end = settled(claim, {}, rest=RELEASE, names=(0, 1, 2))
    assert end.after.failed == {1: Failed(2, 0.0)}

    assert settled(claimed(0, 3, failed=end.after.failed), {}).after.failed == {}


def test_waiting_message_is_neither_counted_nor_finished():
    claim = claimed(0, 6, failed={2: Failed(1, 50.0, "a")})

    end = settled(claim, {}, order="key", read=Read(0, 6, 4, ((2, 3), (5, 6))))

    assert (end.after.start, end.after.done) == (2, ((3, 5),))
    assert end.after.failed == claim.failed
    assert end.counts == {"acked": 4}


def test_early_verdicts_stand_and_are_counted_apart():
    at_once = verdicts((1, ACK), (3, Action.DEAD_LETTER), (4, RELEASE))

    end = settled(claimed(0, 6), {}, rest=RELEASE, at_once=at_once, names=(0, 2, 5))

    assert (end.after.start, end.after.done) == (0, ((1, 2), (3, 4)))
    assert end.counts == {"released": 3}
    assert end.again == ComingAgain(frozenset(f"t-0-{n}" for n in (0, 2, 4, 5)))


def test_early_verdicts_keep_order():
    before = verdicts((2, RELEASE))

    decided = keep_order(verdicts((1, ACK), (3, ACK), (5, RETRY)), before, "partition")

    actions = {offset: decision.action for offset, decision in decided.items()}
    assert actions == {1: ACK, 3: RELEASE, 5: RELEASE}


def test_early_verdicts_of_dead_generation_are_taken_over():
    claim = claimed(0, 9, done=((7, 8),), failed={5: Failed(1, 9.0)})
    at_once = verdicts((2, ACK), (3, RETRY), (4, RELEASE), (5, RELEASE), attempt=2)

    after = take_over(claim, at_once)

    assert after.done == ((2, 3), (7, 8))
    assert after.failed == {3: Failed(2), 5: Failed(1, 0.0)}


def test_claim_round_trips():
    claim = Claim(
        start=3,
        generation="g",
        end=9,
        until=1.5,
        marked=7,
        done=((4, 5), (6, 8)),
        failed={5: Failed(2, 9.5, "k")},
        settled=("f",),
        topic_id="id",
        epoch=3,
        limit=12,
    )

    assert Claim.from_json(json.loads(json.dumps(claim.to_json()))) == claim
    assert Claim.from_json(json.loads(json.dumps(Claim(start=0).to_json()))) == Claim(start=0)


def test_claim_of_newer_release_is_refused():
    with pytest.raises(ValueError, match="format version 99; this release reads 3"):
        Claim.from_json({"v": 99, "start": 0})


# ------------------------------------------------------------------------------- a model
ACTIONS = st.sampled_from(list(Action))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), order=st.sampled_from(["none", "partition", "key"]))
def test_every_message_is_in_exactly_one_place(data, order):
    """Over a log with gaps and several runs: no loss, and no redelivery of finished messages."""
    log_end = 12
    gaps = data.draw(st.frozensets(st.integers(0, log_end - 1), max_size=4))
    messages = [offset for offset in range(log_end) if offset not in gaps]
    groups = {offset: "ab"[offset % 2] if order == "key" else "" for offset in messages}
    finished: set[int] = set()
    retried: set[int] = set()
    claim = Claim(start=0)
    for _ in range(data.draw(st.integers(1, 4))):
        end = data.draw(st.integers(claim.start, log_end))
        current = Claim(
            start=claim.start, end=end, generation="g", marked=claim.high,
            done=claim.done, failed=claim.failed,
        )  # fmt: skip
        handed_out = [
            o for o in messages if current.start <= o < end and not contains(current.done, o)
        ]
        # Then no finished message is redelivered
        assert not finished.intersection(handed_out)
        now: dict[int, Decision] = {}
        single: dict[int, Decision] = {}
        for offset in handed_out:
            into = data.draw(st.sampled_from([now, single, None]))
            if into is not None:
                into[offset] = verdict(data.draw(ACTIONS), offset, group=groups[offset])
        now = keep_order(now, {}, order)
        moves = order == "none"
        now = {o: d._replace(moved=moves and d.action is RETRY) for o, d in now.items()}
        rest_action = data.draw(st.sampled_from([ACK, RELEASE]))
        rest = {o: verdict(rest_action, o, group=groups[o]) for o in handed_out if o not in now}
        read = Read(current.start, end, len(handed_out))
        decided = keep_order(rest | single, now, order)
        decided = {o: d._replace(moved=moves and d.action is RETRY) for o, d in decided.items()}
        result = end_claim(current, read, decided, now, None)
        every = {**decided, **now}
        # Every message is in exactly one class
        assert every.keys() == set(handed_out)
        assert result.counts == Counter(CLASS_OF[d.action] for d in decided.values())
        finished |= {o for o, d in every.items() if not d.stays}
        retried |= {o for o, d in every.items() if d.moved}
        claim = result.after
        # Messages below the offset are finished; unfinished ones are above it
        for offset in messages:
            is_done = offset < claim.start or contains(claim.done, offset)
            assert is_done == (offset in finished), (offset, claim, every)
        assert claim.marked >= max(handed_out, default=-1) + 1
        if order == "partition":
            again = [o for o, d in every.items() if d.action in COMES_AGAIN and o not in now]
            later = [o for o in handed_out if again and o > min(again) and o not in now]
            assert not finished.intersection(later)
