"""Checksums of lines and seals detect changes."""

from __future__ import annotations

import json

import pytest

from airflow_broadway.core.errors import StagingDamaged
from airflow_broadway.core.formats.sums import Summing, check_seal, checked, sealed


def test_seal_survives_similar_text():
    text = sealed({"a": 'x "seal": "" y', "b": [1]}, sort_keys=True)
    check_seal(text, "file")
    assert json.loads(text)["a"] == 'x "seal": "" y'
    for damaged in (text.replace("[1]", "[2]"), text.replace("x ", "")):
        with pytest.raises(StagingDamaged):
            check_seal(damaged, "file")


def test_lines_are_counted_before_compared():
    summing = Summing()
    lines = list(summing.through(["a", "b\u2028", ""]))
    assert list(checked(lines, summing.to_json(), "f")) == lines
    with pytest.raises(StagingDamaged, match="f holds 2 lines, and 3 were written"):
        list(checked(lines[:2], summing.to_json(), "f"))
    with pytest.raises(StagingDamaged, match="f is not as it was written"):
        list(checked(["a", "c", ""], summing.to_json(), "f"))
    with pytest.raises(StagingDamaged, match="f is not text"):
        list(checked(map(bytes.decode, [b"\xff"]), summing.to_json(), "f"))
