"""Imports what only the test's own process has."""

from __future__ import annotations

import sys

if "pytest" not in sys.modules:
    import a_module_that_only_the_worker_has  # type: ignore[import-not-found] # noqa: F401

from figures_pipeline import Figures  # type: ignore[import-not-found]


class Unshippable(Figures):  # type: ignore[misc]
    """The same elsewhere."""
