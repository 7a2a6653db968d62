"""``make cluster``: runs flights through an Airflow of several hosts and counts them independently.

Hosts are namespaces of this machine: one with PostgreSQL, brokers, an S3 server and a Spark master,
a control host, two Celery workers that share nothing but the bucket and the DAGs, and two Spark
workers.  Writes build/cluster.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from scripts.airflow_api import LocalAirflowError
from scripts.load_flights import add_arguments
from tests.cluster.cases import CASES, Case, run_case
from tests.cluster.cluster import FOLDER, Cluster, run_cluster
from tests.cluster.hosts import HostMissing, Network, enter
from tests.cluster.services import ServiceMissing


def main() -> int:
    """Runs the cases; returns 1 if a message was lost, or duplicated without a mark."""
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    add_arguments(parser, messages=20_000)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    queues = sorted({case.queue for case in CASES})
    parser.add_argument("--queue", choices=queues, action="append", help="only cases of this one")
    options = parser.parse_args()
    wanted = options.queue or queues
    cases = [case for case in CASES if options.case in case.name and case.queue in wanted]
    if not cases:
        parser.error(f"no case's name contains {options.case!r}")
    results: list[dict[str, Any]] = []
    try:
        network = enter()
        with run_cluster(network) as cluster:
            for queue in cluster.queues.values():
                cluster.wait_for_dag(queue.dag_id)
            for case in cases:
                if reason := skip_reason(case, cluster, network):
                    print(f"skipped, because {reason}: {case.queue}, {case.name}", flush=True)
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


def skip_reason(case: Case, cluster: Cluster, network: Network) -> str:
    """Returns why a case cannot run; empty if it can."""
    if case.network and not network.kind.is_separate:
        return "hosts share a network"
    if case.queue not in cluster.queues:
        return "Maven could not resolve its jars"
    return ""


if __name__ == "__main__":
    sys.exit(main())
