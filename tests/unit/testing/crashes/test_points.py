"""Names of calls are the same in every run, and what a report writes can be read back."""

from __future__ import annotations

import pytest

from airflow_broadway.testing.crashes.case import Case, Recovery
from airflow_broadway.testing.crashes.points import Fault, Names, Strike


def test_what_is_random_in_a_name_is_numbered_in_order_of_first_use() -> None:
    first, second = Names(), Names()
    one = [first.plain(f"{key}/manifest.json") for key in ("0c91f9f8c924", "a1b2c3d4")]
    other = [second.plain(f"{key}/manifest.json") for key in ("ffffffffffff", "99999999")]

    assert one == other == ["<1>/manifest.json", "<2>/manifest.json"]
    assert first.plain("a1b2c3d4.json") == "<2>.json"


def test_a_word_and_a_number_are_not_random() -> None:
    assert Names().plain("part-00000.parquet of facade") == "part-00000.parquet of facade"


@pytest.mark.parametrize(
    "text",
    [
        "one/process/1 return #1: killed before [retry]",
        "one/batch.my-own/2 handle_batch my-own #3: asleep after [next run, traffic]",
        "one/ack/1 create a folder/with #2: blanks #1: answer lost [give up]",
        "one/ack/1 COMMIT #2: killed after, then two/process/1 return #1: asleep after [lapse]",
    ],
)
def test_a_case_is_read_back_from_its_text(text: str) -> None:
    assert str(Case.parse(text)) == text


def test_without_brackets_the_recovery_is_a_retry() -> None:
    case = Case.parse("one/process/1 return #1: error")
    assert (case.recovery, case.traffic) == (Recovery.RETRY, False)
    assert case.strikes[0].fault is Fault.ERROR


@pytest.mark.parametrize(
    "text",
    [
        "",
        "one/process/1 return",
        "one/process/1 return #0: error",
        "one/process/1 return #1: killed",
        "one/process/1 return #1: error [never]",
    ],
)
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Case.parse(text)


def test_a_strike_that_is_none_is_told_what_there_is() -> None:
    with pytest.raises(ValueError, match="killed before, killed halfway"):
        Strike.parse("one/process/1 return #1: hit")
