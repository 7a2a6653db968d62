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
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.benchmarks import flights
from tests.nothing_left import nothing_left_behind

RESULT = Path("build/bench.json")

Part = Callable[..., list[dict[str, Any]]]

#: A function below ``tests.benchmarks`` and its options with ``--quick``, by the part's name.
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "core": ("core.bench_core", {}),
    "sqlite": ("sqlite.bench_sqlite", {}),
    "failing": ("failures.bench_failing", {}),
    "crashes": ("crashes.bench_crashes", {"messages": 5_000, "kills": 3, "tries": 1}),
    "staging": ("staging.bench_staging", {}),
    "archive": (
        "archive.bench_archive",
        {"messages": 20_000, "interval": 100_000, "flights": 10_000, "tries": 1},
    ),
    "view": ("view.bench_view", {"batches": 1_000, "tries": 1}),
    "s3": ("s3.bench_s3", {"sizes": ((10_000, 1_000),)}),
    "sinks": ("sinks.bench_sinks", {"rows": 10_000, "tries": 1}),
    "spark": ("spark.bench_spark", {}),
    "rabbitmq": ("rabbitmq.bench_rabbitmq", {"sizes": {}, "tries": 1}),
    "sqs": ("sqs.bench_sqs", {"messages": 1_000, "tries": 1}),
    "kafka": ("kafka.bench_kafka", {"sizes": {}, "tries": 1}),
    "pubsub": ("pubsub.bench_pubsub", {"messages": 10_000, "tries": 1}),
    "warm": ("warm.bench_warm", {"tries": 1}),
    "warm.connect": ("warm.bench_connect", {"tries": 1}),
    "warm.live": ("warm.bench_live", {}),
    "stages": ("flights.bench_stages", {}),
    "keys": ("flights.bench_keys", {}),
    "runs": ("flights.bench_runs", {"tries": 1}),
}


def parts(quick: bool, seconds: float) -> dict[str, Part]:
    """Returns the parts by name, in order.

    :param seconds: The duration of ``warm.live``'s load.
    """
    sizes = {"10k": flights.SIZES["10k"]} if quick else flights.SIZES
    always: dict[str, dict[str, Any]] = {
        "warm.live": {"seconds": seconds},
        "stages": {"sizes": sizes},
        "runs": {"sizes": sizes, "tries": 3},
    }
    return {
        name: partial(_run, path, {**always.get(name, {}), **(options if quick else {})})
        for name, (path, options) in _PARTS.items()
    }


def _run(path: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    module, _, name = path.partition(".")
    function: Part = getattr(import_module(f"tests.benchmarks.{module}"), name)
    return function(**options)


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
