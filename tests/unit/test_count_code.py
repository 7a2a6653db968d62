"""``scripts/count_code.py``: what counts as a code line."""

import pytest

from scripts.count_code import count_code

MODULE = '''"""A module.

Two paragraphs."""

import os  # counts

# no code
class Place:
    """A class."""

    text = """a string
    of two lines"""


def name(
    place,
):
    """A docstring."""
    "no docstring"
    return os.fspath(
        place
    )
'''


@pytest.mark.parametrize(
    ("source", "lines"), [(MODULE, 11), ("", 0), ("# comment\n", 0), ('"""text"""\n', 0)]
)
def test_blank_lines_comments_and_docstrings_do_not_count(source: str, lines: int) -> None:
    assert count_code(source) == lines
