"""``airflow-broadway check``: reports what a pipeline's next run would refuse or warn of."""

from __future__ import annotations

import argparse
from typing import Final

from airflow_broadway.adapters.staging import env_outside_run
from airflow_broadway.cli.opening import connected, pipeline_of
from airflow_broadway.cli.output import Result
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable

_ORDER: Final = ("error", "warning", "note")


def check(args: argparse.Namespace) -> Result:
    """Reports the findings, errors first; the exit code is 1 if there is an error.

    :raises ProducerUnavailable: If the broker cannot be reached.
    """
    pipeline = pipeline_of(args.pipeline)
    producer = connected(pipeline.producer, args.pipeline, args.conn_id)
    env = env_outside_run(pipeline.name, args.staging)
    findings = sorted(
        dict.fromkeys(finding for shard in producer.shards() for finding in _check(shard, env)),
        key=lambda finding: _ORDER.index(finding.level),
    )
    failed = any(finding.level == "error" for finding in findings)
    lines = [f"{finding.level}: {finding.text}" for finding in findings]
    if not failed:
        lines.append(f"A run of {pipeline.name} can begin.")
    return Result([finding._asdict() for finding in findings], lines, int(failed))


def _check(producer: Producer, env: ProducerEnv) -> list[Finding]:
    try:
        return producer.check(env)
    except ProducerUnavailable:
        raise
    except ProducerError as error:
        return [Finding("error", str(error))]
