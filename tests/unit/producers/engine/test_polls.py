"""Receives in flight, executed one at a time by the test."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.producers.engine.polls import Polls
from airflow_broadway.producers.engine.port import Answer, Received
from tests.unit.producers.engine.adapters import EmptyBroker

SOME = Answer(0.0, [Received("id", "receipt", None, 1)] * 40)


def polls_of(monkeypatch, *answers):
    """Wants 200 messages of a broker with these answers, 100 at a time."""
    demands, left = [], iter(answers)

    def receive(demand):
        demands.append(demand)
        return next(left)

    polls = Polls(EmptyBroker(ProducerEnv()), receive)
    monkeypatch.setattr(polls, "_pool", SimpleNamespace(submit=lambda poll: poll()))
    polls.want(200)
    return polls, demands


def test_a_failed_receive_cancels_those_behind_it(monkeypatch):
    polls, demands = polls_of(monkeypatch)
    with pytest.raises(StopIteration):
        polls.take(0.0)

    assert demands == [100]
    assert not polls.flying


def test_threads_receive_again_while_the_broker_returns_less_than_requested(monkeypatch):
    """The run's thread handles messages meanwhile, and states no demand."""
    polls, demands = polls_of(monkeypatch, *[SOME] * 5)

    assert demands == [100, 100, 100, 80, 40]
    assert len(polls.take(0.0, 200)) == 5


def test_an_empty_receive_is_the_last_of_its_thread(monkeypatch):
    polls, demands = polls_of(monkeypatch, SOME, Answer(0.0, ()))

    assert demands == [100, 100]
    assert polls.quiet
