"""An API server with the plugin's pages."""

from __future__ import annotations

import pytest

from tests.unit.plugin.site import mounted


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The pages over an empty staging root."""
    staging = tmp_path / "staging"
    staging.mkdir()
    with mounted(staging, monkeypatch) as pages:
        yield pages
