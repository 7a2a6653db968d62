"""An API server with the plugin's pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.plugin.site import Site, mounted


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The pages over an empty staging root."""
    staging = tmp_path / "staging"
    staging.mkdir()
    with mounted(staging, monkeypatch) as made:
        yield made
