"""Strikes the pipelines over one broker, and prints the result; part of ``make faults``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from airflow_broadway.testing.crashes.campaign import Sums
from tests.crashes.campaigns import campaigns, plans_of
from tests.crashes.pipelines import PIPELINES
from tests.crashes.subjects import SUBJECTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crashes", description=__doc__)
    parser.add_argument("--broker", choices=sorted(SUBJECTS), default="sqlite")
    parser.add_argument("--pipeline", choices=sorted(PIPELINES), action="append")
    parser.add_argument("--share", type=float, help="of the cases, 0 to 1; else what takes minutes")
    parser.add_argument("--pairs", type=int, default=0, help="of strikes, with --share")
    parser.add_argument("--restarts", type=int, default=0, help="of the broker; of each pipeline")
    parser.add_argument("--jobs", type=int, help="else 2, and 4 where brokers are waited for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", default="", help="just this case of --pipeline, as it is reported"
    )
    parser.add_argument("--report", type=Path, help="where the sums are written, as JSON")
    args = parser.parse_args()
    plans = plans_of(args.broker)
    jobs = args.jobs or (2 if args.broker.startswith("sqlite") else 4)
    if args.share is not None:
        plans = [plan._replace(share=args.share, pairs=args.pairs) for plan in plans]
    wanted = args.pipeline or PIPELINES
    plans = [plan._replace(restarts=args.restarts) for plan in plans if plan.pipeline in wanted]
    reports = []
    every = campaigns(args.broker, plans, jobs=jobs, seed=args.seed, only=args.only)
    for plan, found in every:
        for sums in found:
            tell(args.broker, plan.pipeline, sums)
            reports.append(as_json(args.broker, plan.pipeline, sums))
    if args.report:
        args.report.write_text(json.dumps(reports))
    return int(any(report["failures"] or report["unsteady"] for report in reports))


def tell(broker: str, pipeline: str, sums: Sums) -> None:
    """Say what came of a campaign, and the first cases that did not come out well."""
    counts = sums.counts
    print(
        f"{broker}, {pipeline}: {len(sums.points)} points, {sums.cases} cases, {sums.runs} runs,"
        f" {counts['lost']} lost, {counts['unmarked']} unmarked, {counts['left']} left over,"
        f" {counts['missing']} rows missing, {counts['repeated']} repeated,"
        f" {counts['other']} other mistakes, in {sums.seconds:.0f} s",
        flush=True,
    )
    for point in sums.unsteady:
        print(f"  not made in every run: {point}")
    for failure in sums.failures[:20]:
        lines = [*failure.account.lines[:5], str(failure.folder)]
        print(f"  {failure.case}\n    " + "\n    ".join(lines))


def as_json(broker: str, pipeline: str, sums: Sums) -> dict[str, Any]:
    """Returns its entry in the report."""
    return {
        "broker": broker,
        "pipeline": pipeline,
        "points": len(sums.points),
        "cases": sums.cases,
        "runs": sums.runs,
        **{name: sums.counts[name] for name in ("lost", "missing", "repeated", "unmarked", "left")},
        "mistakes": sums.counts["other"],
        "unsteady": [str(point) for point in sums.unsteady],
        "failures": [[str(failure.case), *failure.account.lines] for failure in sums.failures],
    }


if __name__ == "__main__":
    sys.exit(main())
