from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from airflow_broadway.staging.names import MAX_NAME, encode_name


@given(st.text(max_size=60))
def test_any_id_becomes_one_portable_segment(text):
    name = encode_name(text)
    assert re.fullmatch(r"[A-Za-z0-9!-][A-Za-z0-9!_.-]*", name)
    assert len(name) <= MAX_NAME


@example(["r:" * 300, "r:" * 300 + "x"])
@given(st.lists(st.text(alphabet="aé:_.!/", max_size=200), max_size=20, unique=True))
def test_different_ids_never_share_a_folder(texts):
    assert len({encode_name(text) for text in texts}) == len(texts)


def test_scheduled_run_id_stays_readable():
    name = encode_name("scheduled__2026-01-01T00:05:00+00:00")
    assert name == "scheduled__2026-01-01T00!3A05!3A00!2B00!3A00"


def test_reserved_names_are_never_those_of_a_run():
    assert not encode_name("_open").startswith("_")
    assert not encode_name(".broadway-root.json").startswith(".")
    assert encode_name("..") == "!2E."


def test_name_over_150_characters_is_cut_and_hashed():
    assert MAX_NAME == 150
    assert encode_name("r" * 150) == "r" * 150
    assert re.fullmatch(r"r{116}!![0-9a-f]{32}", encode_name("r" * 151))
    # An escape counts as what is written
    assert encode_name("r" * 147 + ":") == "r" * 147 + "!3A"
    assert "!!" in encode_name("r" * 148 + ":")
