"""Counts code lines: all lines except blank lines, comments and docstrings.

``python -m scripts.count_code`` prints the counts of the package's folders, of tests and scripts;
``--below FOLDER`` prints the counts of a folder's subfolders.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "airflow_broadway"
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count_code(source: str) -> int:
    """Returns the code lines of a module."""
    docstrings = set(_docstring_lines(ast.parse(source)))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def _docstring_lines(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if first is not None and ast.get_docstring(node, clean=False) is not None:
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def count_folder(folder: Path) -> tuple[int, int]:
    """Returns the code lines and the number of the modules below a folder, or of one module."""
    modules = [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    return sum(count_code(module.read_text(encoding="utf-8")) for module in modules), len(modules)


def rooms_below(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns the counts of each folder directly below one, and of its own modules together."""
    rooms = {
        f"{entry.relative_to(ROOT)}/": count_folder(entry)
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and any(entry.rglob("*.py"))
    }
    own = [count_folder(module)[0] for module in sorted(folder.glob("*.py"))]
    rooms[f"{folder.relative_to(ROOT)}/*.py"] = sum(own), len(own)
    return rooms


def rooms_of_project() -> dict[str, tuple[int, int]]:
    """Returns the counts of the package's rooms, of each broker, and of tests and scripts."""
    producers = PACKAGE / "producers"
    rooms = rooms_below(PACKAGE) | rooms_below(producers)
    del rooms[f"{producers.relative_to(ROOT)}/"]
    rooms["package"] = count_folder(PACKAGE)
    tests, scripts = count_folder(ROOT / "tests"), count_folder(ROOT / "scripts")
    rooms["tests and scripts"] = tests[0] + scripts[0], tests[1] + scripts[1]
    return rooms


def main() -> int:
    """Prints the counts; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m scripts.count_code", description=__doc__)
    parser.add_argument("--below", type=Path, help="the folder whose rooms are counted")
    below = parser.parse_args().below
    rooms = rooms_below(below.resolve()) if below else rooms_of_project()
    width = max(map(len, rooms))
    print(f"{'code lines':<{width}} {'lines':>7} {'files':>6}")
    for name, (code, modules) in rooms.items():
        print(f"{name:<{width}} {code:>7,} {modules:>6,}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
