"""``airflow-broadway pubsub``: a subscription as it is, and a seek."""

from __future__ import annotations

import argparse
from contextlib import closing
from datetime import datetime
from typing import Any

from airflow_broadway.cli.opening import opened
from airflow_broadway.cli.output import CommandError, say, say_json
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.text import many, table
from airflow_broadway.producers.engine.receipts import HeldBy
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.pubsub import inspect as subscriptions
from airflow_broadway.producers.pubsub.inspect import Look

__all__ = ["pubsub"]


def pubsub(given: argparse.Namespace) -> int:
    """Carry out one of the commands."""
    producer, env = opened(
        given,
        PubSubProducer,
        lambda found: [found.subscription, found.project_id or ""],
        options='{"subscription": …}',
        writes=False,
    )
    code: int = _ACTIONS[given.action](producer, env, given)
    return code


def _show(producer: PubSubProducer, env: ProducerEnv, given: argparse.Namespace) -> int:
    found = _look(producer, env)
    if given.json:
        say_json(_json(found))
        return 0
    say(*(f"{name}: {value}" for name, value in found.settings.items()), "", _depth(found))
    if found.held:
        heads = ("held by", "messages", "until")
        rows = ((each.folder, each.messages, _until(each, env)) for each in found.held)
        say("", *table(heads, rows))
    if found.findings:
        say("", *(f"{finding.level}: {finding.text}" for finding in found.findings))
    return 0


def _look(producer: PubSubProducer, env: ProducerEnv) -> Look:
    with closing(producer.broker(env)) as broker:
        return subscriptions.look(producer, broker)


def _seek(producer: PubSubProducer, env: ProducerEnv, given: argparse.Namespace) -> int:
    if given.subscription not in (producer.subscription, producer.subscription.split("/")[-1]):
        raise CommandError(
            f"the pipeline's subscription is {producer.subscription!r}, and --subscription names"
            f" {given.subscription!r}: nothing was changed"
        )
    time = _instant(given.time)
    with closing(producer.broker(env)) as broker:
        name = subscriptions.seek(producer, broker, time=time, snapshot=given.snapshot)
    where = given.time or given.snapshot
    if given.json:
        say_json({"subscription": name, "seek": where})
    else:
        say(f"The subscription {name!r} was set to {where}.")
    return 0


def _instant(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise CommandError(
            f"--time {text!r} is no instant with its time zone, such as 2026-01-31T08:00:00+00:00"
        )
    return found


# -- what is printed -------------------------------------------------------------------------------


def _depth(found: Look) -> str:
    depth = found.depth
    if depth is None:
        return "How much waits is not known: Cloud Monitoring cannot be asked."
    age = depth.oldest_age
    oldest = "" if age is None else f"; the oldest was published {age:,.0f} s ago"
    return f"About {many(depth.ready, 'message')} waiting{oldest}."


def _until(held: HeldBy, env: ProducerEnv) -> str:
    over = "" if held.until > env.clock.now() else " (over)"
    return f"{held.until.isoformat(timespec='seconds')}{over}"


def _json(found: Look) -> dict[str, Any]:
    depth = None if found.depth is None else found.depth._asdict()
    return {
        **found._asdict(),
        "depth": depth,
        "held": [each._asdict() for each in found.held],
        "findings": [finding._asdict() for finding in found.findings],
    }


_ACTIONS = {"show": _show, "seek": _seek}
