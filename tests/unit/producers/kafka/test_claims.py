"""Claims in files, as several processes make them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kafka.claims import Claims, Place
from airflow_broadway.producers.kafka.settling import Claim, Decision
from airflow_broadway.producers.kit.state_files import MemoryFiles

PLACE: Place = ("topic", 0)


def claim(claims: Claims, generation: str) -> Claim | None:
    """Claims a partition that nobody has read."""
    claim = Claim(start=0, generation=generation, end=5, until=100.0)
    return claim if claims.replace(PLACE, None, claim) else None


def test_concurrent_claims_have_one_winner():
    files = MemoryFiles()
    one, other = Claims(files), Claims(files)
    assert one.read(PLACE) is other.read(PLACE) is None

    assert claim(one, "one") is not None
    assert claim(other, "other") is None

    found = other.read(PLACE)
    assert found is not None
    assert found.generation == "one"


def test_only_own_generation_ends_claim():
    claims = Claims(MemoryFiles())
    claim(claims, "one")

    claims.end(PLACE, "other", Claim(start=3))
    assert claims.read(PLACE) == Claim(start=0, generation="one", end=5, until=100.0)
    claims.end(PLACE, "one", Claim(start=3))
    assert claims.read(PLACE) == Claim(start=3)


def test_partition_is_claimed_until_30_s_after_lease():
    claims = Claims(MemoryFiles())
    held = claim(claims, "one")

    assert claims.held_until(held, 129.0) == 100.0
    assert claims.held_until(held, 131.0) == 0.0
    claims.generation("one").hold(400.0, {"run_id": "r"})
    assert claims.held_until(held, 131.0) == 400.0
    assert claims.held_until(held, 430.0) == 0.0


def test_removed_claim_version_is_not_recreated():
    # Given one that has read the first version, when others have made many more
    files = MemoryFiles()
    slept, other = Claims(files), Claims(files)
    claim(other, "one")
    stale = slept.read(PLACE)
    for number in range(20):
        other.change(PLACE, lambda c, n=number: replace(c, epoch=n))  # type: ignore[misc]
    assert len(files.names("claims/topic/0")) <= 11
    assert stale is not None

    assert not slept.replace(PLACE, stale, replace(stale, start=9))
    newest = slept.read(PLACE)
    assert newest == other.read(PLACE)
    assert newest is not None
    assert newest.epoch == 19
    assert slept.replace(PLACE, newest, replace(newest, start=9))
    assert other.read(PLACE) == slept.read(PLACE) == replace(newest, start=9)


def test_known_takeover_is_not_overwritten():
    files = MemoryFiles()
    slept, other = Claims(files), Claims(files)
    own = claim(slept, "one")
    assert own is not None
    taken = replace(own, generation="two")
    assert other.replace(PLACE, other.read(PLACE), taken)

    # It looks, as it does where it gives a claim up, and still has its own claim in hand
    assert slept.read(PLACE) == taken
    assert not slept.replace(PLACE, own, replace(own, end=9))

    assert other.read(PLACE) == taken


def test_unchanged_claim_is_not_written():
    files = MemoryFiles()
    claims = Claims(files)
    claim(claims, "one")
    before = files.names("claims/topic/0")

    claims.change(PLACE, lambda known: known)
    claims.change(PLACE, lambda _: None)

    assert files.names("claims/topic/0") == before


def test_early_verdicts_round_trip():
    files = MemoryFiles()
    one = Claims(files).generation("g")
    decisions = {PLACE: {3: Decision(Action.RETRY, 9.5, 2, "k", "topic-0-3", moved=True)}}

    one.note_decisions(decisions)
    one.note_decisions({("other", 1): {0: Decision(Action.ACK, message_id="other-1-0")}})
    one.note_decisions({})

    again = Claims(files).generation("g").decisions()
    assert again == {**decisions, ("other", 1): {0: Decision(Action.ACK, message_id="other-1-0")}}


def test_malformed_claim_is_one_error():
    files = MemoryFiles()
    files.write("claims/topic/0/000000000001.json", {"v": 99})

    with pytest.raises(StagingError, match=r"the claim of topic-0 in staging cannot be read .*99"):
        Claims(files).read(PLACE)
