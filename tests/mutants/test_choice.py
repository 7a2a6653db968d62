"""The tests that meet a mutant are those that run its function, the most specific ones first."""

from __future__ import annotations

import pytest
from coverage import CoverageData

from tests.mutants.__main__ import nearest_tests
from tests.mutants.choice import TestChoice


@pytest.fixture
def choice(tmp_path):
    file = tmp_path / "coverage"
    data = CoverageData(str(file))
    for test, lines in {
        "tests/test_whole.py::test_run[a|b]": {"a.py": [3, 4, 5], "b.py": [1, 2]},
        "tests/test_a.py::test_end": {"a.py": [3, 5]},
        "tests/test_a.py::test_start": {"a.py": [3, 4]},
        "tests/test_b.py::test_b": {"b.py": [1]},
    }.items():
        data.set_context(f"{test}|run")
        data.add_lines(lines)
    data.set_context("")
    data.add_lines({"a.py": [1, 2]})
    data.write()
    return TestChoice(file)


def test_tests_that_run_the_place_come_first_and_of_these_the_most_specific(choice):
    assert choice.tests_of("a.py", range(4, 5), range(3, 6)) == [
        "tests/test_a.py::test_start",
        "tests/test_whole.py::test_run[a|b]",
        "tests/test_a.py::test_end",
    ]


def test_lines_outside_a_test_choose_none(choice):
    assert choice.tests_of("a.py", range(1, 2), range(1, 3)) == []
    assert choice.tests_of("c.py", range(1, 2), range(1, 3)) == []


@pytest.mark.parametrize(
    ("module", "folder"),
    [
        ("core/custody/report.py", "tests/unit/core/custody"),
        ("staging/settling/journal.py", "tests/unit/staging"),
    ],
)
def test_nearest_tests_are_those_of_the_module_or_its_package(module, folder):
    assert nearest_tests(f"airflow_broadway/{module}") == folder
