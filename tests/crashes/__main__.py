"""Runs crash test campaigns of all pipelines over one broker; part of ``make faults``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from airflow_broadway.testing.crashes.campaign import Totals
from tests.crashes.campaigns import campaigns, default_plans
from tests.crashes.pipelines import PIPELINES
from tests.crashes.subjects import SUBJECTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crashes", description=__doc__)
    parser.add_argument("--broker", choices=sorted(SUBJECTS), default="sqlite")
    parser.add_argument("--pipeline", choices=sorted(PIPELINES), action="append")
    parser.add_argument(
        "--share", type=float, help="share of the cases, 0 to 1; default: a few minutes"
    )
    parser.add_argument(
        "--pairs", type=int, default=0, help="number of cases with two faults, with --share"
    )
    parser.add_argument(
        "--restarts", type=int, default=0, help="number of broker restarts per pipeline"
    )
    parser.add_argument(
        "--jobs", type=int, help="concurrent processes; default 2 for SQLite, else 4"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", default="", help="run only this case of --pipeline, as printed in reports"
    )
    parser.add_argument("--report", type=Path, help="the JSON file for the totals")
    args = parser.parse_args()
    plans = default_plans(args.broker)
    jobs = args.jobs or (2 if args.broker.startswith("sqlite") else 4)
    if args.share is not None:
        plans = [plan._replace(share=args.share, pairs=args.pairs) for plan in plans]
    names = args.pipeline or PIPELINES
    plans = [plan._replace(restarts=args.restarts) for plan in plans if plan.pipeline in names]
    reports = []
    results = campaigns(args.broker, plans, jobs=jobs, seed=args.seed, only=args.only)
    for plan, campaign_totals in results:
        for totals in campaign_totals:
            print_totals(args.broker, plan.pipeline, totals)
            reports.append(to_json(args.broker, plan.pipeline, totals))
    if args.report:
        args.report.write_text(json.dumps(reports))
    return int(any(report["failures"] or report["unsteady"] for report in reports))


def print_totals(broker: str, pipeline: str, totals: Totals) -> None:
    """Prints a campaign's totals and its first failed cases."""
    counts = totals.counts
    print(
        f"{broker}, {pipeline}: {len(totals.points)} points, {totals.cases} cases,"
        f" {totals.runs} runs, {counts['lost']} lost, {counts['unmarked']} unmarked,"
        f" {counts['left']} left over, {counts['missing']} rows missing,"
        f" {counts['repeated']} repeated, {counts['other']} other mistakes,"
        f" in {totals.seconds:.0f} s",
        flush=True,
    )
    for point in totals.unsteady:
        print(f"  not made in every run: {point}")
    for failure in totals.failures[:20]:
        lines = [*failure.account.lines[:5], str(failure.folder)]
        print(f"  {failure.case}\n    " + "\n    ".join(lines))


def to_json(broker: str, pipeline: str, totals: Totals) -> dict[str, Any]:
    """Returns a campaign's entry in the report."""
    return {
        "broker": broker,
        "pipeline": pipeline,
        "points": len(totals.points),
        "cases": totals.cases,
        "runs": totals.runs,
        **{
            name: totals.counts[name]
            for name in ("lost", "missing", "repeated", "unmarked", "left")
        },
        "mistakes": totals.counts["other"],
        "unsteady": [str(point) for point in totals.unsteady],
        "failures": [[str(failure.case), *failure.account.lines] for failure in totals.failures],
    }


if __name__ == "__main__":
    sys.exit(main())
