"""``make mutants``: break custody, settlement, staging and stages in one place each, and count the
changes that the tests see.

:data:`TESTS` run once without a change, to see which lines each runs.  Then those that run a
mutant's function are run against it.

``tests/mutants/killed.txt`` names those that were killed: a change of the tests that lets one of
them live is refused.  ``--record`` adds what is killed now.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tests.mutants.choice import TestChoice
from tests.mutants.operators import Mutant, mutants_of

PACKAGE = "airflow_broadway"
ROOT = Path(__file__).resolve().parents[2]
#: A copy of the package, in which modules are changed.
COPY = ROOT / "build/mutants"
#: Data of coverage.py: which tests run which lines.
COVERAGE = ROOT / "build/mutants.coverage"
KILLED = Path(__file__).with_name("killed.txt")
#: Seconds after which tests that do not end have seen the change.
TIMEOUT = 600.0
#: Tests that are run against mutants.
TESTS = [
    *(f"tests/unit/{room}" for room in ("cli", "core", "operators", "plugin", "producers", "runs")),
    *(f"tests/unit/{room}" for room in ("spark", "staging", "submit", "testing")),
    *("tests/conformance", "tests/integration/test_staging_client.py"),
    "tests/faults/test_sqlite_files.py",
    *(f"tests/contract/test_{name}.py" for name in ("folder", "sqlite", "sqs", "sinks")),
]


class Target(NamedTuple):
    """Modules, and how many mutants are made of them.

    :param modules: Patterns below the package.
    """

    name: str
    modules: Sequence[str]
    wanted: int


TARGETS = [
    Target("custody", ["core/custody/*.py"], 50),
    Target("stages", ["core/stages/*.py"], 60),
    Target("formats", ["core/formats/*.py"], 30),
    Target("settlement", ["staging/settling/*.py", "runs/settle.py", "runs/sweep.py"], 40),
    Target("staging", ["staging/*.py"], 40),
    Target("engine", ["producers/engine/*.py", "producers/sqlite/*.py"], 40),
]


def main() -> int:
    """Runs the mutants; returns 1 if one lives that was killed before."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    names = [target.name for target in TARGETS]
    parser.add_argument("--only", choices=names, action="append", help="only these targets")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    parser.add_argument("--record", action="store_true", help="write those killed to killed.txt")
    parser.add_argument(
        "--measured", action="store_true", help="take the lines from the last run of this commit"
    )
    options = parser.parse_args()
    before = set(KILLED.read_text().splitlines()) if KILLED.exists() else set()
    _copy_package()
    killed: set[str] = set()
    lived: list[str] = []

    mutants = [
        mutant
        for target in TARGETS
        if not options.only or target.name in options.only
        for mutant in choose_mutants(target, before)
    ]
    if options.list:
        print(*(mutant.id for mutant in mutants), sep="\n")
        return 0
    if not options.measured:
        measure()
    tests_of = choose_tests(mutants)
    for name in sorted(before - tests_of.keys()) if not options.only else ():
        print(f"no longer made: {name}")

    for mutant in mutants:
        began = time.monotonic()
        tests = tests_of[mutant.id]
        killed_now = not passes(tests, mutant)
        if killed_now and mutant.id not in before and not passes(tests):
            sys.exit(f"Tests fail without the mutant {mutant.id}: {' '.join(tests)}")
        (killed.add if killed_now else lived.append)(mutant.id)
        if options.record:
            KILLED.write_text("".join(f"{name}\n" for name in sorted(before | killed)))
        verdict = "killed" if killed_now else "LIVES"
        print(f"{verdict} {time.monotonic() - began:4.0f} s  {mutant.id}", flush=True)
    again = sorted(before & set(lived))
    print(f"{len(killed)} of {len(killed) + len(lived)} killed; {len(again)} of these were before")
    for name in again:
        print(f"  was killed: {name}")
    return int(bool(again))


def choose_mutants(target: Target, before: set[str]) -> Iterator[Mutant]:
    """Chooses a target's mutants: those that were killed before and still can be made, and of the
    others, by their hashes, as many as it is to have.
    """
    paths = sorted({path for module in target.modules for path in (ROOT / PACKAGE).glob(module)})
    mutants = [
        mutant
        for path in paths
        for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text())
    ]
    mutants.sort(key=lambda mutant: hashlib.sha256(mutant.id.encode()).hexdigest())
    known = [mutant for mutant in mutants if mutant.id in before]
    others = [mutant for mutant in mutants if mutant.id not in before]
    yield from known
    yield from others[: max(0, target.wanted - len(known))]


def measure() -> None:
    """Runs :data:`TESTS`, and records the lines of the package that each runs.

    :raises SystemExit: If one fails.
    """
    options = ["--cov", PACKAGE, "--cov-context=test", "--cov-report="]
    if not run_tests(*TESTS, *options, COVERAGE_FILE=str(COVERAGE)):
        sys.exit("The tests fail without a mutant.")


def run_tests(
    *arguments: str, out: int | None = None, timeout: float | None = None, **more: str
) -> bool:
    """Runs pytest in the copy of the package, and ends all processes that it leaves.

    :param out: Where its output goes; default: to this process's.
    :param timeout: Seconds that it has.
    :param more: Environment variables.
    :returns: Whether all tests pass, and end.
    """
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    environment = {**os.environ, "PYTHONPATH": str(COPY), **more}
    process = subprocess.Popen(
        [*line, *arguments],
        cwd=COPY,
        env=environment,
        stdout=out,
        stderr=out,
        start_new_session=True,
    )
    try:
        return process.wait(timeout) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def choose_tests(mutants: Sequence[Mutant]) -> dict[str, list[str]]:
    """Chooses the tests of each mutant, by its id.

    :raises SystemExit: If pytest does not find one of them.
    """
    choice = TestChoice(COVERAGE)
    chosen = {
        mutant.id: choice.tests_of(mutant.path, mutant.place, mutant.function)
        or [nearest_tests(mutant.path)]
        for mutant in mutants
    }
    listed = COPY / "chosen.txt"
    listed.write_text("".join(f"{test}\n" for test in sorted({*chain(*chosen.values())})))
    if not run_tests("--collect-only", f"@{listed}", out=subprocess.DEVNULL):
        sys.exit(f"Not all tests of {listed} are found: see pytest --collect-only @{listed}")
    return chosen


def nearest_tests(path: str) -> str:
    """Returns the folder of unit tests of a module, or of the nearest package that has one."""
    folder = Path("tests/unit") / Path(path).parent.relative_to(PACKAGE)
    return str(next(near for near in (folder, *folder.parents) if (ROOT / near).is_dir()))


def passes(tests: Sequence[str], mutant: Mutant | None = None) -> bool:
    """Runs tests, against a mutant if one is given; returns whether all pass, and end."""
    if mutant is not None:
        (COPY / mutant.path).write_text(mutant.source)
    try:
        return run_tests("-x", "--timeout", "60", *tests, out=subprocess.DEVNULL, timeout=TIMEOUT)
    finally:
        if mutant is not None:
            shutil.copy2(ROOT / mutant.path, COPY / mutant.path)


def _copy_package() -> None:
    """Copy what is tested, and its tests, to where it may be changed."""
    shutil.rmtree(COPY, ignore_errors=True)
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in tracked.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)


if __name__ == "__main__":
    sys.exit(main())
