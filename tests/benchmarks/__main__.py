"""``make bench``: runs all benchmarks; prints a table and writes ``build/bench.json``.

Absolute figures depend on the machine and the day; compare the ratios, each between two figures of
one run.  ``ARGS="--only core,sqlite"`` runs some parts, ``--quick`` runs all with small sizes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.benchmarks import flights
from tests.nothing_left import nothing_left_behind

RESULT = Path("build/bench.json")

Part = Callable[[], list[dict[str, Any]]]


def parts(quick: bool, seconds: float) -> dict[str, Part]:
    """Returns the parts by name, in order.

    :param seconds: The duration of ``warm.live``'s load.
    """
    sizes = {"10k": flights.SIZES["10k"]} if quick else flights.SIZES
    return {
        "core": lambda: import_module("tests.benchmarks.core").bench_core(),
        "sqlite": lambda: import_module("tests.benchmarks.sqlite").bench_sqlite(),
        "failing": lambda: import_module("tests.benchmarks.failures").bench_failing(),
        "crashes": lambda: import_module("tests.benchmarks.crashes").bench_crashes(
            **({"messages": 5_000, "kills": 3, "tries": 1} if quick else {})
        ),
        "staging": lambda: import_module("tests.benchmarks.staging").bench_staging(),
        "archive": lambda: import_module("tests.benchmarks.archive").bench_archive(
            **(
                {"messages": 20_000, "interval": 100_000, "flights": 10_000, "tries": 1}
                if quick
                else {}
            )
        ),
        "view": lambda: import_module("tests.benchmarks.view").bench_view(
            **({"batches": 1_000, "tries": 1} if quick else {})
        ),
        "s3": lambda: import_module("tests.benchmarks.s3").bench_s3(
            **({"sizes": ((10_000, 1_000),)} if quick else {})
        ),
        "sinks": lambda: import_module("tests.benchmarks.sinks").bench_sinks(
            **({"rows": 10_000, "tries": 1} if quick else {})
        ),
        "spark": lambda: import_module("tests.benchmarks.spark").bench_spark(),
        "rabbitmq": lambda: import_module("tests.benchmarks.rabbitmq").bench_rabbitmq(
            **({"sizes": {}, "tries": 1} if quick else {})
        ),
        "sqs": lambda: import_module("tests.benchmarks.sqs").bench_sqs(
            **({"messages": 1_000, "tries": 1} if quick else {})
        ),
        "kafka": lambda: import_module("tests.benchmarks.kafka").bench_kafka(
            **({"sizes": {}, "tries": 1} if quick else {})
        ),
        "pubsub": lambda: import_module("tests.benchmarks.pubsub").bench_pubsub(
            **({"messages": 10_000, "tries": 1} if quick else {})
        ),
        "warm": lambda: import_module("tests.benchmarks.warm").bench_warm(
            **({"tries": 1} if quick else {})
        ),
        "warm.live": lambda: import_module("tests.benchmarks.warm").bench_live(seconds),
        "stages": lambda: flights.bench_stages(sizes),
        "keys": flights.bench_keys,
        "runs": lambda: flights.bench_runs(sizes, tries=1 if quick else 3),
    }


def main() -> int:
    """Runs the parts and writes the result; returns 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", help="comma-separated names of parts")
    parser.add_argument("--quick", action="store_true", help="smallest sizes, one try")
    parser.add_argument("--seconds", type=float, default=60.0, help="load of warm.live")
    args = parser.parse_args()
    known = parts(args.quick, args.seconds)
    chosen = args.only.split(",") if args.only else list(known)
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(known)}")
    figures: list[dict[str, Any]] = []
    failed = []
    print(f"{'figure':<44}{'value':>14}  {'unit':<8}{'ratio':>8}  of")
    for name in chosen:
        started = time.monotonic()
        try:
            part_figures = known[name]()
        except Exception as error:
            failed.append(name)
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        for figure in part_figures:
            print(_row(figure), flush=True)
        figures += part_figures
        print(f"  ({name}: {time.monotonic() - started:.0f} s)", flush=True)
    _compare(figures)
    RESULT.parent.mkdir(exist_ok=True)
    environment = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "failed": failed,
    }
    RESULT.write_text(json.dumps({**environment, "figures": figures}, indent=1) + "\n")
    print(f"{RESULT}: {len(figures)} figures")
    return 1 if failed else 0


def _compare(figures: list[dict[str, Any]]) -> None:
    """Adds the ratios between figures of different parts."""
    values = {figure["name"]: figure["value"] for figure in figures}
    for figure in figures:
        of = flights.COMPARED.get(figure["name"])
        if of in values and "ratio" not in figure:
            figure |= {"ratio": round(figure["value"] / values[of], 3), "of": of}
            print(_row(figure), flush=True)


def _row(figure: dict[str, Any]) -> str:
    ratio = f"{figure['ratio']:>8.3f}  {figure['of']}" if "ratio" in figure else ""
    return f"{figure['name']:<44}{figure['value']:>14,}  {figure['unit']:<8}{ratio}"


if __name__ == "__main__":
    with nothing_left_behind():
        sys.exit(main())
