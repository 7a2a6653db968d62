"""Many entries in requests that are refused in part, or as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.engine.port import Refusal, Refused
from airflow_broadway.producers.engine.requests import BatchRequests
from airflow_broadway.testing import ManualClock
from tests.unit.producers.engine.adapters import EmptyBroker

FOUR = ["a", "b", "c", "d"]
LATER = Refusal("Later", "not now", again=True)
PERHAPS = Refusal("Lost", "the answer was lost", again=True, unclear=True)
INVALID = Refusal("Invalid", "it is not held", invalid=True)


class Broker:
    """Answers requests by what it was told to, and takes all after that.

    :param answers: An answer for each request: entries that are refused, or an error.
    """

    def __init__(self, *answers: Mapping[str, Refusal] | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[str] = []

    def __call__(self, entries: Sequence[Any]) -> Mapping[int, Refusal]:
        self.requests.append("".join(entries))
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, Exception):
            raise answer
        return {place: answer[item] for place, item in enumerate(entries) if item in answer}


@pytest.fixture
def send():
    with closing(BatchRequests(EmptyBroker(ProducerEnv(clock=ManualClock())))) as requests:
        yield lambda broker, keys: requests.send(broker, [(key, key) for key in keys])


Send = Callable[[Broker, Iterable[str]], dict[str, Refusal]]


def test_transient_entry_failure_is_retried_alone(send):
    broker = Broker({"b": LATER}, {"b": LATER})

    assert send(broker, FOUR) == {}
    assert broker.requests == ["abcd", "b", "b"]


def test_entry_is_sent_at_most_six_times(send):
    broker = Broker(*[{"b": LATER}] * 7)

    assert send(broker, FOUR) == {"b": LATER}
    assert broker.requests == ["abcd"] + ["b"] * 5


def test_refused_request_is_bisected_to_one_entry(send):
    broker = Broker(Refused("bad"), {}, Refused("bad"), Refused("bad"))

    assert send(broker, FOUR) == {"c": Refusal("Refused", "bad")}
    assert broker.requests == ["abcd", "ab", "cd", "c", "d"]


def test_bisection_skips_answered_entries(send):
    broker = Broker({"b": INVALID, "c": LATER, "d": LATER}, Refused("bad"), {}, Refused("bad"))

    assert send(broker, FOUR) == {"b": INVALID, "d": Refusal("Refused", "bad")}
    assert broker.requests == ["abcd", "cd", "c", "d"]


@pytest.mark.parametrize("lost", ["c", "d"])
def test_bisection_keeps_unclear_entries(send, lost):
    text = {"c": LATER, "d": LATER, lost: PERHAPS}
    broker = Broker(text, Refused("bad"), {"c": INVALID}, {"d": INVALID})

    assert send(broker, FOUR) == {item: INVALID._replace(unclear=item == lost) for item in "cd"}
    assert broker.requests == ["abcd", "cd", "c", "d"]


def test_request_error_refuses_remaining_entries(send):
    broker = Broker({"b": INVALID, "c": LATER}, ProducerError("no permission"))

    why = Refusal("ProducerError", "no permission")
    assert send(broker, [*FOUR, "e"]) == {"b": INVALID, "c": why, "e": why}
    assert broker.requests == ["abcd", "c"]


def test_bisection_ends_after_ten_single_refusals(send):
    keys = [chr(code) for code in range(ord("a"), ord("a") + 16)]
    hopeless = Broker(*[Refused("bad")] * 100)

    assert len(send(hopeless, keys)) == 16
    assert len([item for item in hopeless.requests if len(item) == 1]) == 10

    first, *others = keys
    hopeful = Broker({}, *[Refused("bad")] * 100)
    four = [first, *others[:3]]

    assert len(send(hopeful, [*four, *keys[4:]])) == 12
    assert len([item for item in hopeful.requests if len(item) == 1]) == 12
