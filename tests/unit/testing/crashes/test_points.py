"""Names of calls are the same in every run, and the text of a case can be parsed."""

from __future__ import annotations

import pytest

from airflow_broadway.testing.crashes.case import Case, Recovery
from airflow_broadway.testing.crashes.points import Fault, Injection, TargetNames


def test_random_parts_of_names_are_numbered_by_first_use() -> None:
    first, second = TargetNames(), TargetNames()
    one = [first.normalize(f"{key}/manifest.json") for key in ("0c91f9f8c924", "a1b2c3d4")]
    other = [second.normalize(f"{key}/manifest.json") for key in ("ffffffffffff", "99999999")]

    assert one == other == ["<1>/manifest.json", "<2>/manifest.json"]
    assert first.normalize("a1b2c3d4.json") == "<2>.json"


def test_a_word_and_a_number_are_not_random() -> None:
    assert TargetNames().normalize("part-00000.parquet of facade") == "part-00000.parquet of facade"


@pytest.mark.parametrize(
    "text",
    [
        "one/process/1 return #1: killed before [retry]",
        "one/batch.my-own/2 handle_batch my-own #3: suspended after [next run, traffic]",
        "one/ack/1 create a folder/with #2: blanks #1: response lost [give up]",
        "one/ack/1 COMMIT #2: killed after, then two/process/1 return #1: suspended after [lapse]",
    ],
)
def test_the_text_of_a_case_can_be_parsed(text: str) -> None:
    assert str(Case.parse(text)) == text


def test_without_brackets_the_recovery_is_a_retry() -> None:
    case = Case.parse("one/process/1 return #1: error")
    assert (case.recovery, case.traffic) == (Recovery.RETRY, False)
    assert case.injections[0].fault is Fault.ERROR


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
def test_an_invalid_case_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Case.parse(text)


def test_an_invalid_fault_is_rejected_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="killed before, killed halfway"):
        Injection.parse("one/process/1 return #1: hit")
