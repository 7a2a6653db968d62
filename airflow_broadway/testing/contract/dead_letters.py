"""The contract of dead letters: listing, requeueing, deleting, and interruptions of these."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import ClassVar

import pytest

from airflow_broadway.core.custody.dead_letters import Choice, DeadLetter, DeadLetters
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.testing.contract.base import ContractBase
from airflow_broadway.testing.harness import Harness, bodies, ids, settlement_of
from airflow_broadway.testing.other_process import Child


class DeadLettersContract(ContractBase):
    """The contract of every dead-letter queue; a subclass provides the ``harness`` fixture."""

    #: Whether a requeued message keeps its id.
    keeps_id: ClassVar[bool] = True
    #: Seconds for which an interrupted listing hides dead letters from others.
    hidden_seconds: ClassVar[float] = 0.0
    #: The number of dead letters in an interrupted requeue.
    letters_killed: ClassVar[int] = 300

    @contextmanager
    def opened(self, harness: Harness) -> Iterator[DeadLetters]:
        """Opens the dead letters, and closes them at the end."""
        with closing(harness.producer().dead_letters(harness.env("letters"))) as letters:
            yield letters

    def die(
        self, harness: Harness, sent: Sequence[bytes], *, reason: str = "Boom: why"
    ) -> list[Message]:
        """Sends messages and dead-letters them, alternately in the stages process and batch."""
        harness.send(sent)
        lease, messages = self.hold(harness, f"died of {reason}")
        assert len(messages) == len(sent)
        stages = ("process", "batch")
        verdicts = {
            m.message_id: Verdict(Action.DEAD_LETTER, 0.0, reason, stages[place % 2])
            for place, m in enumerate(messages)
        }
        report = self.settle(harness, lease, settlement_of(messages, verdicts))
        assert report.dead_lettered == len(sent), report
        return messages

    def listed(self, harness: Harness, choice: Choice | None = None) -> list[DeadLetter]:
        with self.opened(harness) as place:
            return list(place.letters(choice or Choice()))

    def own_ids(self, harness: Harness, messages: Sequence[Message]) -> frozenset[str]:
        """Returns the ids of the messages' dead letters."""
        dead_letters = self.listed(harness, Choice(ids=frozenset(ids(messages))))
        assert len(dead_letters) == len(messages)
        return frozenset(ids_of(dead_letters))

    # -- listing -------------------------------------------------------------------------------

    def test_an_empty_dead_letter_queue_has_no_dead_letters(self, harness: Harness) -> None:
        self.die(harness, bodies(1))
        with self.opened(harness) as place:
            place.delete()
            assert place.count() == 0
            assert list(place.letters()) == []
            assert place.requeue() == place.delete()
            assert place.requeue().count == 0

    def test_a_dead_letter_has_its_message_and_the_reason(self, harness: Harness) -> None:
        sent = bodies(4)
        before = harness.clock.now()
        messages = self.die(harness, sent)

        listed = {dead.original_id: dead for dead in self.listed(harness)}

        assert sorted(listed) == sorted(ids(messages))
        assert len({dead.message_id for dead in listed.values()}) == 4
        for place, message in enumerate(messages):
            letter = listed[message.message_id]
            assert letter.body == message.data
            assert (letter.reason, letter.attempt) == ("Boom: why", 1)
            assert letter.stage == ("batch" if place % 2 else "process")
            assert letter.origin
            assert letter.died_at is not None
            assert abs(letter.died_at - before) < timedelta(seconds=60)
        with self.opened(harness) as place_of:
            assert place_of.count() == 4
            assert place_of.place

    def test_dead_letters_are_filtered_by_id_reason_stage_and_time(self, harness: Harness) -> None:
        messages = self.die(harness, bodies(4), reason="Boom: one")
        others = self.die(harness, bodies(2, start=10), reason="Crash: other")
        now = harness.clock.now()

        def chosen(**choice: object) -> list[bytes]:
            listed = self.listed(harness, Choice(**choice))  # type: ignore[arg-type]
            return sorted(letter.body for letter in listed)

        assert chosen(reason="Crash") == sorted(m.data for m in others)
        assert chosen(reason="nothing like it") == []
        assert len(chosen(stage="batch")) == 3
        assert chosen(stage="batch", reason="Crash") == [others[1].data]
        named = frozenset({messages[0].message_id, others[0].message_id, "no-such-0-1"})
        assert chosen(ids=named) == sorted([messages[0].data, others[0].data])
        assert len(chosen(since=now - timedelta(hours=1), until=now + timedelta(hours=1))) == 6
        assert chosen(until=now - timedelta(hours=1)) == []
        assert chosen(since=now + timedelta(hours=1)) == []

    def test_listing_leaves_all_dead_letters_in_place(self, harness: Harness) -> None:
        self.die(harness, bodies(30))
        with self.opened(harness) as place:
            letters = place.letters()
            next(letters)
            letters.close()  # type: ignore[attr-defined]

        first = self.listed(harness)
        second = self.listed(harness)

        assert len(first) == 30
        assert sorted(ids_of(first)) == sorted(ids_of(second))
        with self.opened(harness) as place:
            assert place.count() == 30
            assert place.requeue().count == 30

    # -- requeueing ----------------------------------------------------------------------------

    def test_a_requeued_message_is_unchanged_on_its_first_attempt(self, harness: Harness) -> None:
        messages = self.die(harness, bodies(25))

        with self.opened(harness) as place:
            moved = place.requeue()

        assert (moved.count, moved.unknown, dict(moved.refused)) == (25, (), {})
        assert self.listed(harness) == []
        again = self.rest_of_queue(harness)
        assert sorted(m.data for m in again) == sorted(m.data for m in messages)
        assert all(m.redelivered and m.attempt == 1 for m in again)
        if self.keeps_id:
            assert sorted(ids(again)) == sorted(ids(messages))
        producer = harness.producer()
        was = {m.data: None if self.keeps_id else m.message_id for m in messages}
        assert {m.data: producer.sent_back_as(m) for m in again} == was

    def test_a_requeued_message_may_be_dead_lettered_again(self, harness: Harness) -> None:
        [first] = self.die(harness, bodies(1))
        for _ in range(2):
            with self.opened(harness) as place:
                assert place.requeue().count == 1
            [again] = self.die_again(harness)
            assert (again.data, again.attempt, again.redelivered) == (first.data, 1, True)
        [letter] = self.listed(harness)
        assert (letter.body, letter.reason) == (first.data, "again")

    def die_again(self, harness: Harness) -> list[Message]:
        """Dead-letters all messages of the queue."""
        lease, messages = self.hold(harness, f"again {random.random()}")
        verdict = Verdict(Action.DEAD_LETTER, 0.0, "again", "process")
        verdicts = dict.fromkeys(ids(messages), verdict)
        self.settle(harness, lease, settlement_of(messages, verdicts))
        return messages

    def test_only_selected_dead_letters_are_requeued(self, harness: Harness) -> None:
        messages = self.die(harness, bodies(20))
        wanted = self.own_ids(harness, messages[5:8]) | {"no-such-0-1"}

        with self.opened(harness) as place:
            moved = place.requeue(Choice(ids=wanted))

        assert (moved.count, moved.unknown) == (3, ("no-such-0-1",))
        assert len(self.listed(harness)) == 17
        again = self.rest_of_queue(harness)
        assert sorted(m.data for m in again) == sorted(m.data for m in messages[5:8])

    def test_a_dead_letter_is_moved_by_its_own_id_and_not_by_that_of_its_message(
        self, harness: Harness
    ) -> None:
        messages = self.die(harness, bodies(3))
        [letter] = self.listed(harness, Choice(ids=frozenset({messages[0].message_id})))
        if letter.message_id == letter.original_id:
            return  # the dead letter keeps the id of its message
        for move in ("requeue", "delete"):
            with self.opened(harness) as place:
                moved = getattr(place, move)(Choice(ids=frozenset({letter.original_id})))
            assert (moved.count, moved.unknown) == (0, ())
            assert letter.message_id in moved.refused[letter.original_id]
        assert len(self.listed(harness)) == 3

    def test_concurrently_deleted_dead_letters_are_unknown_and_others_unchanged(
        self, harness: Harness
    ) -> None:
        messages = self.die(harness, bodies(6))
        ids = self.own_ids(harness, messages[:2])
        with self.opened(harness) as one, self.opened(harness) as other:
            assert len(list(one.letters())) == 6
            assert other.delete(Choice(ids=ids)).count == 2

            moved = one.requeue(Choice(ids=ids))
            rest = one.delete(Choice(ids=ids))

        assert (moved.count, moved.unknown) == (0, tuple(sorted(ids)))
        assert (rest.count, rest.unknown) == (0, tuple(sorted(ids)))
        assert len(self.listed(harness)) == 4
        assert self.rest_of_queue(harness) == []

    def test_deleted_dead_letters_are_never_received(self, harness: Harness) -> None:
        messages = self.die(harness, bodies(12))
        with self.opened(harness) as place:
            assert place.delete(Choice(stage="batch")).count == 6
            assert place.count() == 6
            assert place.delete().count == 6
            assert place.count() == 0
        assert self.rest_of_queue(harness) == []
        assert len(messages) == 12

    # -- concurrency ---------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(2))
    def test_an_interrupted_requeue_loses_nothing_and_marks_duplicates(
        self, harness: Harness, seed: int
    ) -> None:
        sent = bodies(self.letters_killed)
        self.die(harness, sent)
        with Child(harness, "requeue") as child:
            child.line()
            time.sleep(random.Random(seed).uniform(0.0, 0.15))
            child.kill()
        for _ in range(2):  # the killed process's last request may arrive after the first requeue
            harness.pass_time(self.hidden_seconds)
            with self.opened(harness) as place:
                assert dict(place.requeue().refused) == {}

        assert self.listed(harness) == []
        again = Counter(m.data for m in self.all_of_queue(harness))
        assert sorted(again) == sent
        # A dead letter is in both queues at most, so no message is received three times.
        assert set(again.values()) <= {1, 2}

    def all_of_queue(self, harness: Harness) -> list[Message]:
        """Receives all messages in several runs; each must be marked as redelivered."""
        received: list[Message] = []
        while messages := self.rest_of_queue(harness, f"rest {len(received)}"):
            assert all(message.redelivered for message in messages)
            received += messages
        return received

    def test_two_concurrent_requeues_lose_nothing(self, harness: Harness) -> None:
        sent = bodies(60)
        self.die(harness, sent)
        with Child(harness, "requeue") as child, self.opened(harness) as place:
            child.line()
            place.requeue()
            child.line()
        harness.pass_time(self.hidden_seconds)
        with self.opened(harness) as place:
            place.requeue()

        assert sorted({m.data for m in self.all_of_queue(harness)}) == sent
        assert self.listed(harness) == []

    def test_messages_that_arrive_during_a_requeue_are_unchanged(self, harness: Harness) -> None:
        messages = self.die(harness, bodies(20))
        with harness.publish_meanwhile() as published, self.opened(harness) as place:
            while len(published) < 3:
                time.sleep(0.01)
            assert place.requeue().count == 20

        received = self.rest_of_queue(harness)
        assert sorted(m.data for m in received) == sorted([*(m.data for m in messages), *published])


def ids_of(letters: Sequence[DeadLetter]) -> list[str]:
    """Returns the ids of dead letters, in their order."""
    return [letter.message_id for letter in letters]
