"""``airflow-broadway kafka show``: a group as it is, and what the next run would say."""

from __future__ import annotations

import argparse
from typing import Any

from airflow_broadway.cli.opening import opened
from airflow_broadway.cli.output import say, say_json
from airflow_broadway.core.text import table
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.kafka.inspect import Group, Partition, look

__all__ = ["kafka"]

_HEADS = ("topic", "partition", "committed", "end", "lag", "claimed", "to retry", "done beyond")


def kafka(given: argparse.Namespace) -> int:
    """Shows a group."""
    producer, env = opened(
        given,
        KafkaProducer,
        lambda found: [found.group_id, *found.topics],
        options='{"group_id": …, "topics": […]}',
        writes=False,
    )
    found = look(producer, env)
    if given.json:
        say_json(_json(found))
        return 0
    lag = sum(each.lag for each in found.partitions)
    say(f"The group {found.group!r} at {found.brokers}: lag {lag:,}.", "")
    _show(found)
    return 0


def _show(found: Group) -> None:
    say(*table(_HEADS, map(_row, found.partitions)))
    held = [each for each in found.partitions if each.holder]
    if held:
        heads = ("held by", "partition", "until")
        rows = ((each.holder, f"{each.topic}-{each.partition}", each.until) for each in held)
        say("", *table(heads, rows))
    if found.findings:
        say("", *(f"{each.level}: {each.text}" for each in found.findings))


def _row(each: Partition) -> tuple[object, ...]:
    numbers = each.committed, each.end, each.lag, each.claimed, each.failed, each.done
    return (each.topic, each.partition, *numbers)


def _json(found: Group) -> dict[str, Any]:
    return {
        **found._asdict(),
        "partitions": [each._asdict() for each in found.partitions],
        "findings": [each._asdict() for each in found.findings],
    }
