"""Makes mutants of a module: each differs from it in one place, in a way that a test should see."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

#: What a comparison becomes.
COMPARED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
#: Calls that change nothing that a test could see.
_QUIET = {"info", "warning", "error", "debug", "exception", "append_line", "log"}

#: Text is joined as well as numbers are added.
_LITERALS = (ast.Constant, ast.JoinedStr)


class Mutant(NamedTuple):
    """One change of one module.

    :param id: Names it as long as its function has the same text: path, function, change, number.
    :param path: The module, from the project's root.
    :param source: The module's text with the change.
    :param place: The lines that the change is in.
    :param function: The lines of its function's body.
    """

    id: str
    path: str
    source: str
    place: range
    function: range


class _Change(NamedTuple):
    node: ast.expr | ast.stmt
    text: str


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Makes the mutants of a module, in the order of its text.

    :param path: The module, from the project's root.
    :param source: Its text.
    """
    text = _Text(source)
    for function, node in _functions(ast.parse(source)):
        counts: dict[str, int] = {}
        for change in (
            change for part in node.body for inner in ast.walk(part) for change in _at(inner, text)
        ):
            before = " ".join(text.of(change.node).split())[:60]
            name = f"{path}::{function}: {before} -> {' '.join(change.text.split())[:70]}"
            counts[name] = counts.get(name, 0) + 1
            number = f" ({counts[name]})" if counts[name] > 1 else ""
            changed = text.replaced(change.node, change.text)
            yield Mutant(name + number, path, changed, _lines(change.node), _lines(*node.body))


def _lines(*nodes: ast.expr | ast.stmt) -> range:
    """The lines of nodes that follow each other."""
    return range(nodes[0].lineno, (nodes[-1].end_lineno or 0) + 1)


class _Text:
    """A module's text, by the places of its nodes."""

    def __init__(self, source: str) -> None:
        self._source = source.encode()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first = self._starts[node.lineno - 1] + node.col_offset
        return first, self._starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        first, last = self._place(node)
        return self._source[first:last].decode()

    def replaced(self, node: ast.expr | ast.stmt, text: str) -> str:
        """The module with another text in place of a node."""
        first, last = self._place(node)
        return (self._source[:first] + text.encode() + self._source[last:]).decode()


def _functions(module: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module with their qualified names; those in functions are part of them."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield prefix + node.name, node
            elif isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")

    yield from walk(module.body, "")


def _at(node: ast.AST, source: _Text) -> Iterator[_Change]:
    """The changes of one node."""
    text = source.of
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = COMPARED[type(node.ops[0])]
        yield _Change(node, f"({text(node.left)} {operator} {text(node.comparators[0])})")
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield _Change(node, f"({word.join(f'({text(value)})' for value in node.values)})")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _Change(node, f"bool({text(node.operand)})")
    elif isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Name | ast.Call):
        yield _Change(node.test, f"(not {text(node.test)})")
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        sign = "-" if isinstance(node.op, ast.Add) else "+"
        if not isinstance(node.left, _LITERALS) and not isinstance(node.right, _LITERALS):
            yield _Change(node, f"({text(node.left)} {sign} {text(node.right)})")
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield _Change(node, str(not node.value))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name not in _QUIET:
            yield _Change(node, "pass")
    elif isinstance(node, ast.Raise) and node.exc is not None:
        yield _Change(node, "pass")
    elif isinstance(node, ast.Continue):
        yield _Change(node, "break")
    elif isinstance(node, ast.Break):
        yield _Change(node, "continue")
