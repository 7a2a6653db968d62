from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_broadway.producers.rabbitmq.amqp.channels import ConfirmWindow


def window(count: int) -> ConfirmWindow:
    made = ConfirmWindow()
    for number in range(1, count + 1):
        made.publish(f"b{number}", number * 10, f"load {number}")
    return made


def test_unidentified_return_refuses_all_unconfirmed():
    made = window(3)
    made.confirmed(1, False)
    made.returned(None, "NO_ROUTE")
    made.confirmed(3, True)

    assert made.take_secured() == [(10, "load 1")]
    assert set(made.refused) == {"b2", "b3"}


@pytest.mark.parametrize(("tag", "last"), [(25, 25), (15, 20)], ids=["later", "earlier"])
def test_empty_delivery_is_finished_after_earlier_ones(tag, last):
    made = window(2)

    assert made.extend(tag)

    made.confirmed(2, True)
    assert made.take_secured() == [(10, "load 1"), (last, "load 2")]
    assert not made.extend(30)


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 14), st.booleans(), st.sampled_from("acr")), max_size=30),
)
def test_only_confirmed_prefix_is_relied_on(count, events):
    made = window(count)
    good: set[int] = set()
    bad: set[int] = set()
    relied: list[int] = []
    for number, multiple, kind in events:
        numbers = {n for n in range(1, count + 1) if n == number or (multiple and n < number)}
        news = numbers - good - bad if kind != "r" else set()
        if kind == "r" and number <= count and number not in good | bad:
            made.returned(f"b{number}", "returned")
            bad.add(number)
        elif kind != "r":
            made.confirmed(number, multiple, refused=kind == "c")
            (good if kind == "a" else bad).update(news)
        relied += [tag // 10 for tag, _ in made.take_secured() if tag is not None]

        prefix = 0
        while prefix + 1 in good:
            prefix += 1
        assert relied == list(range(1, prefix + 1))
        assert set(made.refused) == {f"b{n}" for n in bad}
