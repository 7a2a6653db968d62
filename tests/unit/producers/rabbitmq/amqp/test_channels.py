from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.producers.rabbitmq.amqp.channels import ConfirmWindow


def window(count: int) -> ConfirmWindow:
    confirms = ConfirmWindow()
    for number in range(1, count + 1):
        confirms.publish(f"b{number}", number * 10, f"load {number}")
    return confirms


def test_unidentified_return_refuses_all_unconfirmed():
    confirms = window(3)
    confirms.confirmed(1, False)
    confirms.returned(None, "NO_ROUTE")
    confirms.confirmed(3, True)

    assert confirms.take_secured() == [(10, "load 1")]
    assert set(confirms.refused) == {"b2", "b3"}


@pytest.mark.parametrize(("tag", "last"), [(25, 25), (15, 20)], ids=["later", "earlier"])
def test_empty_delivery_is_finished_after_earlier_ones(tag, last):
    confirms = window(2)

    assert confirms.extend(tag)

    confirms.confirmed(2, True)
    assert confirms.take_secured() == [(10, "load 1"), (last, "load 2")]
    assert not confirms.extend(30)


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 14), st.booleans(), st.sampled_from("acr")), max_size=30),
)
def test_only_confirmed_prefix_is_relied_on(count, events):
    confirms = window(count)
    good: set[int] = set()
    bad: set[int] = set()
    relied: list[int] = []
    for number, multiple, kind in events:
        numbers = {n for n in range(1, count + 1) if n == number or (multiple and n < number)}
        news = numbers - good - bad if kind != "r" else set()
        if kind == "r" and number <= count and number not in good | bad:
            confirms.returned(f"b{number}", "returned")
            bad.add(number)
        elif kind != "r":
            confirms.confirmed(number, multiple, refused=kind == "c")
            (good if kind == "a" else bad).update(news)
        relied += [tag // 10 for tag, _ in confirms.take_secured() if tag is not None]

        prefix = 0
        while prefix + 1 in good:
            prefix += 1
        assert relied == list(range(1, prefix + 1))
        assert set(confirms.refused) == {f"b{n}" for n in bad}
