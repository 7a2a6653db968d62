"""Chooses the tests that run a line, most specific first, from the contexts of coverage.py."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

from coverage import CoverageData

#: At most this many tests are chosen for a mutant.
MOST = 150


class TestChoice:
    """Which tests run which lines of a package.

    :param file: Data of coverage.py, with a context for each test and relative paths.
    :raises coverage.CoverageException: If there is none.
    """

    __test__ = False

    def __init__(self, file: Path) -> None:
        data = CoverageData(str(file), read_only=True)
        data.read()
        self._tests: dict[str, dict[int, set[str]]] = {}
        self._breadth: Counter[str] = Counter()
        for path in data.measured_files():
            lines: dict[int, set[str]] = defaultdict(set)
            for line, contexts in data.contexts_by_lineno(path).items():
                for context in filter(None, contexts):
                    lines[line].add(context.rpartition("|")[0])
            self._tests[path] = lines
            for tests in lines.values():
                self._breadth.update(tests)

    def tests_of(self, path: str, place: range, function: range) -> list[str]:
        """Returns the tests that run a function: first those that run a place in it, of these the
        ones that run the fewest lines of the package.

        :param path: The module, from the project's root.
        :param place: The lines of the place.
        :param function: The lines of the function's body.
        :returns: Node ids; none if the function runs only in processes that tests start.
        """
        lines = self._tests.get(path, {})
        here, near = (
            {test for line in span for test in lines.get(line, ())} for span in (place, function)
        )
        chosen = sorted(here | near, key=lambda test: (test not in here, self._breadth[test], test))
        return chosen[:MOST]
