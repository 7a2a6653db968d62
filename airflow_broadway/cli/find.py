"""``airflow-broadway where``: from a message's id to what became of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.cli.output import cut, say, say_json
from airflow_broadway.core.masking import redacted
from airflow_broadway.runs.reading.message import MessagePlace, find_message
from airflow_broadway.runs.reading.runs import iter_runs


def where(given: argparse.Namespace) -> int:
    """Find a message in all staged runs; 1 if none has it."""
    store = open_existing_store(given.staging)
    runs = iter_runs(store, dag_id=given.dag_id, pipeline=given.pipeline_name)
    places = [story.place for story in find_message(runs, given.message_id)]
    if given.json:
        say_json([asdict(place) for place in places])
    elif not places:
        say(
            f"No staged run under {redacted(store.uri)} has received"
            f" {given.message_id!r}: it still waits in its queue, or retention removed its run."
        )
    else:
        say(*_text(places))
    return 0 if places else 1


def _text(places: Sequence[MessagePlace]) -> list[str]:
    lines: list[str] = []
    for place in places:
        if lines:
            lines.append("")
        for name, value in asdict(place).items():
            text = "-" if value is None else cut(value)
            lines.append(f"{name.replace('_', ' ') + ':':14} {text}")
    return lines
