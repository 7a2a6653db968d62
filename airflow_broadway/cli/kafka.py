"""``airflow-broadway kafka``: a group as it is, what is wrong with it, and the cure."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.adapters.dag_folders import add_dag_folders
from airflow_broadway.adapters.staging import open_existing_store, open_store
from airflow_broadway.cli.output import CommandError, say, say_json
from airflow_broadway.cli.replay import read_reference
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.reference import load_ref, make_ref
from airflow_broadway.core.text import many, table
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.kafka import group as groups
from airflow_broadway.producers.kafka.group import ERROR, NOTE, Group, Partition

__all__ = ["kafka"]

_HEADS = ("topic", "partition", "start", "base", "end", "lag", "claimed", "to retry", "done beyond")


def kafka(given: argparse.Namespace) -> int:
    """Carry out one of the commands."""
    producer, env = _opened(given)
    code: int = _ACTIONS[given.action](producer, env, given)
    return code


def _show(producer: KafkaProducer, env: ProducerEnv, given: argparse.Namespace) -> int:
    found = groups.look(producer, env)
    if given.json:
        say_json(_json(found))
        return 0
    _print_head(found)
    say(*table(_HEADS, map(_row, found.partitions)))
    if found.claims:
        heads = ("held by", "run", "partition", "offsets", "until")
        rows = (
            (
                each.generation,
                each.run or None,
                f"{each.topic}-{each.partition}",
                each.offsets,
                each.until if each.live else f"{each.until} (over)",
            )
            for each in found.claims
        )
        say("", *table(heads, rows))
    if found.findings:
        say("", *(f"{each.level}: {each.text}" for each in found.findings))
    return 0


def _check(producer: KafkaProducer, env: ProducerEnv, given: argparse.Namespace) -> int:
    """1 if there is an error or a warning."""
    found = groups.look(producer, env)
    if given.json:
        say_json(_json(found))
    else:
        _print_head(found)
        order = sorted(found.findings, key=lambda each: (each.level != ERROR, each.level == NOTE))
        say(*(f"{each.level}: {each.text}" for each in order))
        if not _grave(found):
            say("The next run may begin.")
    return int(_grave(found))


def _adopt(producer: KafkaProducer, env: ProducerEnv, given: argparse.Namespace) -> int:
    _confirmed(producer, given)
    places = groups.adopt(producer, env)
    names = [f"{topic}-{partition}" for topic, partition in places]
    if given.json:
        say_json({"group": producer.group_id, "adopted": names})
    elif names:
        say(
            f"This staging folder keeps {many(len(names), 'partition')} of the group"
            f" {producer.group_id!r} now: {', '.join(names)}."
        )
    else:
        say(f"No partition of the group {producer.group_id!r} is kept by another staging folder.")
    return 0


def _reset(producer: KafkaProducer, env: ProducerEnv, given: argparse.Namespace) -> int:
    _confirmed(producer, given)
    if given.to is not None:
        try:
            producer = replace(producer, offset_reset_policy=given.to)
        except OptionsError as error:
            raise CommandError(f"--to: {error}") from None
    groups.reset(producer, env)
    found = groups.look(producer, env)
    if given.json:
        say_json(_json(found))
        return 0
    say(f"The group {producer.group_id!r} begins anew, by {producer.offset_reset_policy}.", "")
    say(*table(_HEADS, map(_row, found.partitions)))
    return 0


def _confirmed(producer: KafkaProducer, given: argparse.Namespace) -> None:
    if given.group != producer.group_id:
        raise CommandError(
            f"the pipeline's group is {producer.group_id!r}, and --group names {given.group!r}:"
            " nothing was changed"
        )


# -- what is printed -------------------------------------------------------------------------------


def _print_head(found: Group) -> None:
    waits = sum(each.lag or 0 for each in found.partitions)
    say(f"The group {found.group!r} at {found.brokers}: lag {waits:,}.", "")


def _row(each: Partition) -> tuple[object, ...]:
    numbers = each.start, each.base, each.end, each.lag, each.claimed, each.held, each.done
    return (each.topic, each.partition, *numbers)


def _grave(found: Group) -> bool:
    return any(each.level != NOTE for each in found.findings)


def _json(found: Group) -> dict[str, Any]:
    return {
        **found._asdict(),
        "partitions": [each._asdict() for each in found.partitions],
        "claims": [each._asdict() for each in found.claims],
        "findings": [each._asdict() for each in found.findings],
    }


# -- what is looked at -----------------------------------------------------------------------------


def _opened(given: argparse.Namespace) -> tuple[KafkaProducer, ProducerEnv]:
    """The producer that the arguments name, and where its tables are.

    :raises CommandError: If they name none of Kafka.
    """
    add_dag_folders()
    pipeline = load_ref(make_ref(read_reference(given.pipeline)), RunInfo())
    producer = pipeline.producer
    if not isinstance(producer, KafkaProducer):
        raise CommandError(
            f"the producer of {given.pipeline} is {type(producer).__name__}, not KafkaProducer"
        )
    for name in [producer.group_id, *producer.topics]:
        if "{{" in name:
            raise CommandError(
                f"{given.pipeline} has the template {name!r}: give --pipeline as JSON, with"
                ' {"class": …, "options": {"producer": {"group_id": …, "topics": […]}}}'
            )
    if given.conn_id:
        producer = replace(producer, conn_id=given.conn_id)
    writes = given.action in ("adopt", "reset")
    store = (open_store if writes else open_existing_store)(given.staging)
    return producer, ProducerEnv(
        pipeline=pipeline.name,
        connections=AirflowConnections(),
        staging=f"{store.uri.rstrip('/')}/{pipeline.name}",
    )


_ACTIONS = {"show": _show, "check": _check, "adopt": _adopt, "reset": _reset}
