"""Mutation tests of the model: without any one of its guards, the search finds a violation."""

from __future__ import annotations

import pytest

from tests.model.checker import explore
from tests.model.mutants import MUTANTS
from tests.model.protocol import Run
from tests.model.recovery import Recovery

MOST = 150_000


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.drop)
def test_removing_a_guard_violates_an_invariant(mutant):
    run = Run(mutant.custody, **mutant.options, drop=mutant.drop)

    result = explore(run, max_states=MOST, then=Recovery(run)).broken

    assert result is not None, f"nothing shows that {mutant.place} {mutant.guard}"
    assert result.promise == mutant.promise, str(result)
