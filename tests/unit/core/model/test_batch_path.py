"""The folder of a batch's own: below the root, whatever its parts say."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_broadway.core.model.batch_info import BatchInfo, Trigger

INFO = BatchInfo("default", "k", None, 1, Trigger.SIZE, "b0")
ROOT = "s3a://lake/flights"

PART = st.text(alphabet=st.one_of(st.sampled_from("./=%_\\ :ab"), st.characters(categories=None)))


@pytest.mark.parametrize(
    ("part", "folder"),
    [
        ("dt=2026-01-01", "dt=2026-01-01"),
        ("airport=EWR", "airport=EWR"),
        ("Zürich Süd", "Zürich Süd"),
        ("a/b", "a%2Fb"),
        ("..", "%2E."),
        ("../../finance/payroll", "%2E.%2F..%2Ffinance%2Fpayroll"),
        ("_temporary", "%5Ftemporary"),
        ("_year=2026", "_year=2026"),
        (".year=2026", "%2Eyear=2026"),
        ("at=12:30 = noon", "at=12%3A30 %3D noon"),
        ("100%", "100%25"),
        ("dt=", "dt=__HIVE_DEFAULT_PARTITION__"),
        ("=x", "%3Dx"),
        ("", "%20"),
        ("\ud83d", "%ED%A0%BD"),
    ],
)
def test_part_is_one_folder_name(part, folder):
    assert INFO.path(ROOT, part) == f"{ROOT}/{folder}/batch_id=b0"


def test_root_stays_unchanged():
    assert INFO.path("file:///data/../lake/") == "file:///data/../lake/batch_id=b0"


@given(st.lists(PART, max_size=3))
@example(["..", ".."])
@example(["../../finance/payroll"])
def test_batch_path_is_below_root_with_one_folder_per_part(parts):
    path = INFO.path(ROOT, *parts)
    path.encode()
    below = path.removeprefix(f"{ROOT}/")
    assert below != path
    assert posixpath.normpath(below) == below
    assert len(below.split("/")) == len(parts) + 1
    assert not any(name.startswith(".") for name in below.split("/"))


@given(st.lists(PART, min_size=2, max_size=2, unique=True))
def test_different_parts_give_different_folders(parts):
    first, second = parts
    assert INFO.path(ROOT, first) != INFO.path(ROOT, second)
