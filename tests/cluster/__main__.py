"""``make cluster``: flights through an Airflow of several hosts, counted from outside.

Hosts are namespaces of this machine: PostgreSQL, RabbitMQ and an S3 server, a control host, and two
Celery workers that share nothing but the bucket and the DAGs.  build/cluster.json has the report.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from scripts.airflow_api import LocalAirflowError
from scripts.load_flights import add_arguments
from tests.cluster.cases import CASES, run_case
from tests.cluster.cluster import DAG_ID, FOLDER, run_cluster
from tests.cluster.hosts import HostMissing, enter
from tests.cluster.services import ServiceMissing


def main() -> int:
    """Runs the cases; returns 1 if a message was lost, or repeated without a mark."""
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    add_arguments(parser, messages=20_000)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    cases = [case for case in CASES if options.case in case.name]
    if not cases:
        parser.error(f"no case's name contains {options.case!r}")
    results: list[dict[str, Any]] = []
    try:
        network = enter()
        with run_cluster(network) as cluster:
            cluster.wait_for_dag(DAG_ID)
            for case in cases:
                if case.network and not network.kind.is_separate:
                    print(f"left out, for hosts share a network: {case.name}")
                    continue
                results.append(run_case(cluster, case, options.messages, options.seed))
                print(
                    ", ".join(f"{key}: {value}" for key, value in results[-1].items()), flush=True
                )
    except (HostMissing, ServiceMissing, LocalAirflowError) as error:
        print(f"The cluster stopped: {error}", file=sys.stderr)
        return 2
    finally:
        FOLDER.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
    return int(any(r["lost"] or r["unmarked"] or r["runs"][-1] != "success" for r in results))


if __name__ == "__main__":
    sys.exit(main())
