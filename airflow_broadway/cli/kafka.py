"""``airflow-broadway kafka``: a group as it is, and the cure of what is wrong with it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from airflow_broadway.cli.opening import opened
from airflow_broadway.cli.output import CommandError, say, say_json
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.text import many, table
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.kafka import group as groups
from airflow_broadway.producers.kafka.group import Group, Partition

__all__ = ["kafka"]

_HEADS = ("topic", "partition", "start", "base", "end", "lag", "claimed", "to retry", "done beyond")


def kafka(given: argparse.Namespace) -> int:
    """Carry out one of the commands."""
    producer, env = opened(
        given,
        KafkaProducer,
        lambda found: [found.group_id, *found.topics],
        options='{"group_id": …, "topics": […]}',
        writes=given.action in ("adopt", "reset"),
    )
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


def _json(found: Group) -> dict[str, Any]:
    return {
        **found._asdict(),
        "partitions": [each._asdict() for each in found.partitions],
        "claims": [each._asdict() for each in found.claims],
        "findings": [each._asdict() for each in found.findings],
    }


_ACTIONS = {"show": _show, "adopt": _adopt, "reset": _reset}
