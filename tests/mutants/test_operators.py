"""Mutants: one change in one place of a module that still compiles."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from tests.mutants.__main__ import TARGETS, choose_mutants
from tests.mutants.operators import mutants_of


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("return a < b", "return (a <= b)"),
        ("return a and b or c", "return ((a and b) and (c))"),
        ("if not a: b()", "if bool(a): b()"),
        ("a.settle(b)", "pass"),
        ("raise ValueError(a)", "pass"),
        ("a = f(b=True)", "a = f(b=False)"),
        ("c = a + b", "c = (a - b)"),
    ],
)
def test_a_mutant_changes_a_line(line, changed):
    source = dedent(f"""
        class Queue:
            def take(self, a, b, c):
                {line}
    """)

    sources = {mutant.source for mutant in mutants_of("queue.py", source)}

    assert source.replace(line, changed) in sources


def test_log_calls_and_joined_text_are_not_mutated():
    source = "def f(a):\n    log.info(a)\n    return a + ' s'\n"

    assert list(mutants_of("f.py", source)) == []


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_mutants_compile_and_have_unique_names(target):
    mutants = list(choose_mutants(target, set()))

    for mutant in mutants:
        ast.parse(mutant.source)
    assert len({mutant.id for mutant in mutants}) == len(mutants) == target.wanted
