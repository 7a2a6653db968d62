"""``make faults``: kill tasks at random instants, and count every message; build/faults.json."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time

from scripts.airflow_env import ROOT, home_of
from tests.faults.brokers import BROKERS
from tests.faults.found import Found
from tests.faults.runs import Case, run_case

BUILD = ROOT / "build"


def main() -> int:
    """Run the cases; returns 1 if a message was lost, or repeated without a mark."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--broker", choices=sorted(BROKERS), action="append", help="only this one")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=20_130)
    given = parser.parse_args()
    found = []
    for broker in given.broker or BROKERS:
        folder = BUILD / "faults" / broker
        shutil.rmtree(folder, ignore_errors=True)
        case = Case(
            broker=broker,
            messages=given.messages,
            kills=given.kills,
            seed=given.seed,
            folder=folder,
            home=home_of(ROOT, "airflow-faults"),
            tell=lambda line: print(line, flush=True),
        )
        print(f"{case.name}: {case.messages} messages, {case.kills} kills", flush=True)
        started = time.monotonic()
        found.append(run_case(case))
        _tell(found[-1], time.monotonic() - started)
        _write(found)
    return int(not all(each.good for each in found))


def _tell(found: Found, seconds: float) -> None:
    told = found.to_json()
    print(
        f"{told['name']}: {told['lost']} lost, {told['duplicates']} handled again, of these"
        f" {told['unmarked']} unmarked; {told['kills']} kills ({dict(found.killed)}) in"
        f" {seconds:.0f} s"
    )
    if found.lost:
        print(f"  lost: {found.lost[:20]}")
    for mistake in found.mistakes:
        print(f"  {mistake}")


def _write(found: list[Found]) -> None:
    path = BUILD / "faults.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cases": [each.to_json() for each in found]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
