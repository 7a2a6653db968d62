"""``make mutants``: break custody, settlement, staging and stages in one place each, and count the
changes that the tests see.

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
from pathlib import Path
from typing import NamedTuple

from tests.mutants.operators import Mutant, mutants_of

PACKAGE = "airflow_broadway"
ROOT = Path(__file__).resolve().parents[2]
#: A copy of the package, in which modules are changed.
COPY = ROOT / "build/mutants"
KILLED = Path(__file__).with_name("killed.txt")
#: Seconds after which tests that do not end have seen the change.
TIMEOUT = 600.0


class Target(NamedTuple):
    """Modules, how many mutants are made of them, and the tests that should kill these.

    :param modules: Patterns below the package.
    """

    name: str
    modules: Sequence[str]
    wanted: int
    tests: Sequence[str]


RUN_TESTS = [
    f"tests/unit/runs/test_{name}.py"
    for name in ("settle", "settle_reads", "sweep", "custody", "ending", "process", "reports")
]
CUSTODY_TESTS = [
    *(f"tests/unit/core/{name}" for name in ("custody", "local", "model", "test_log_context.py")),
    *(f"tests/unit/runs/test_{name}.py" for name in ("identity", "dry_run")),
    *("tests/unit/cli/test_dead_letters.py", "tests/unit/producers/sqlite"),
    *("tests/contract/test_sqlite.py", *RUN_TESTS),
]
FORMAT_TESTS = [
    *("tests/unit/core/formats", "tests/unit/staging", "tests/unit/runs/test_sinks.py"),
    *(f"tests/unit/runs/test_{name}.py" for name in ("isolation", "python_batches")),
]
TARGETS = [
    Target("custody", ["core/custody/*.py"], 50, CUSTODY_TESTS),
    Target("stages", ["core/stages/*.py"], 60, ["tests/unit/core/stages", "tests/unit/core/local"]),
    Target("formats", ["core/formats/*.py"], 30, FORMAT_TESTS),
    Target(
        "settlement",
        ["staging/settling/*.py", "runs/settle.py", "runs/sweep.py"],
        40,
        ["tests/unit/staging/test_settlement.py", *RUN_TESTS, "tests/unit/staging/test_damage.py"],
    ),
    Target("staging", ["staging/*.py"], 40, ["tests/unit/staging", *RUN_TESTS]),
    Target(
        "engine",
        ["producers/engine/*.py", "producers/sqlite/*.py"],
        40,
        ["tests/contract/test_sqlite.py", "tests/unit/producers", "tests/contract/test_sqs.py"],
    ),
]


def main() -> int:
    """Runs the mutants; returns 1 if one lives that was killed before."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    names = [target.name for target in TARGETS]
    parser.add_argument("--only", choices=names, action="append", help="only these targets")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    parser.add_argument("--record", action="store_true", help="write those killed to killed.txt")
    options = parser.parse_args()
    before = set(KILLED.read_text().splitlines()) if KILLED.exists() else set()
    _copy_package()
    killed: set[str] = set()
    lived: list[str] = []

    for target in TARGETS:
        if options.only and target.name not in options.only:
            continue
        mutants = list(choose_mutants(target, before))
        if not options.list and not passes(target.tests):
            sys.exit(f"{target.name}: its tests fail without a mutant: {' '.join(target.tests)}")
        for mutant in mutants:
            if options.list:
                print(f"{target.name}: {mutant.id}")
                continue
            began = time.monotonic()
            found = not passes(target.tests, mutant)
            (killed.add if found else lived.append)(mutant.id)
            if options.record:
                KILLED.write_text("".join(f"{name}\n" for name in sorted(before | killed)))
            verdict = "killed" if found else "LIVES"
            print(f"{verdict} {time.monotonic() - began:4.0f} s  {mutant.id}", flush=True)
    if options.list:
        return 0
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


def passes(tests: Sequence[str], mutant: Mutant | None = None) -> bool:
    """Runs tests, against a mutant if one is given; returns whether all pass, and ends."""
    if mutant is not None:
        (COPY / mutant.path).write_text(mutant.source)
    line = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        [*line, "-m", "not slow", "--timeout", "60"],
        cwd=COPY,
        env={**os.environ, "PYTHONPATH": str(COPY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=TIMEOUT) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):  # also what a killed test has left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
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
