"""``airflow-broadway check``: what the next run of a pipeline would refuse or warn of."""

from __future__ import annotations

import argparse
from typing import Final

from airflow_broadway.adapters.staging import staging_root
from airflow_broadway.cli.opening import connected, pipeline_of, producer_env
from airflow_broadway.cli.output import say, say_json
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable

_ORDER: Final = ("error", "warning", "note")


def check(given: argparse.Namespace) -> int:
    """Prints the findings, errors first; returns 1 if there is an error.

    :raises ProducerUnavailable: If the broker cannot be reached.
    """
    pipeline = pipeline_of(given.reference)
    producer = connected(pipeline.producer, given.reference, given.conn_id)
    env = producer_env(pipeline.name, staging_root(given.staging))
    findings = sorted(
        dict.fromkeys(found for shard in producer.shards() for found in _checked(shard, env)),
        key=lambda finding: _ORDER.index(finding.level),
    )
    failed = any(finding.level == "error" for finding in findings)
    if given.json:
        say_json([finding._asdict() for finding in findings])
        return int(failed)
    lines = [f"{finding.level}: {finding.text}" for finding in findings]
    say(*lines, *([] if failed else [f"A run of {pipeline.name} can begin."]))
    return int(failed)


def _checked(producer: Producer, env: ProducerEnv) -> list[Finding]:
    try:
        return producer.check(env)
    except ProducerUnavailable:
        raise
    except ProducerError as error:
        return [Finding("error", str(error))]
