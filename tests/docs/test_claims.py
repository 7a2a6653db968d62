"""The documents' promises, and the tests that show them.

``claims/<document>.toml`` has an entry for each promise: the words of the document (``says``) and
the tests (``shown_by``).  Words that are rewritten and tests that are renamed make this fail, so
that nobody changes the one without a look at the other.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CLAIMS = Path(__file__).parent / "claims"


class Claim(NamedTuple):
    """One promise.

    :param document: Its path, from the root.
    """

    document: Path
    says: str
    shown_by: tuple[str, ...]


def _all() -> list[Claim]:
    return [
        _claim(path.stem, entry)
        for path in sorted(CLAIMS.glob("*.toml"))
        for entry in tomllib.loads(path.read_text("utf-8"))["claim"]
    ]


def _claim(document: str, entry: dict[str, Any]) -> Claim:
    assert set(entry) == {"says", "shown_by"}, entry
    folder = ROOT if document == "README" else ROOT / "docs"
    return Claim(folder / f"{document}.md", entry["says"], tuple(entry["shown_by"]))


FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def _words(document: Path) -> str:
    return _plain(document.read_text("utf-8"))


def _plain(text: str) -> str:
    """A text as one line, its links without what they lead to."""
    return re.sub(r"\[([^][]*)\]\([^()]*\)", r"\1", " ".join(text.split()))


@cache
def _tests(path: Path) -> set[str]:
    """The tests of a file, those of a class as ``Class::test``."""
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {prefix + function.name for function in inner if isinstance(function, FUNCTION)}
    return names


@pytest.mark.parametrize(
    "claim", _all(), ids=lambda claim: f"{claim.document.stem}: {claim.says[:60]}"
)
def test_a_claim_is_in_its_document_and_has_tests(claim):
    assert _plain(claim.says) in _words(claim.document)
    assert claim.shown_by
    for shown_by in claim.shown_by:
        path, _, name = shown_by.partition("::")
        assert name in _tests(ROOT / path), shown_by
