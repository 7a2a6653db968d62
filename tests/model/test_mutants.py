"""The model has teeth: without any one of its guards, the search finds what goes wrong."""

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

    result = explore(run, most=MOST, then=Recovery(run)).broken

    assert result is not None, f"nothing shows that {mutant.place} {mutant.guard}"
    assert result.promise == mutant.promise, str(result)
