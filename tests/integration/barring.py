"""Blocks imports of modules in this process, as if they were not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _BlockedModuleFinder(MetaPathFinder):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def bar(*names: str) -> None:
    """Blocks imports of top-level packages from now on; none may be imported already."""
    loaded = {name.partition(".")[0] for name in sys.modules} & set(names)
    assert not loaded, f"{loaded} are imported already"
    sys.meta_path.insert(0, _BlockedModuleFinder(names))
