"""Counts a test's calls of a disk."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.staging.disk import Disk


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The paths for which a disk's method is called from now on."""
    calls: list[str] = []
    method = getattr(Disk, name)

    def call(disk: Disk, path: str, *more: Any) -> Any:
        calls.append(path)
        return method(disk, path, *more)

    monkeypatch.setattr(Disk, name, call)
    return calls
