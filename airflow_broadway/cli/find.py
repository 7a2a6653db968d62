"""``airflow-broadway where``: traces a message by its id."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.cli.output import cut, print_json, print_lines
from airflow_broadway.core.masking import redacted
from airflow_broadway.runs.reading.message import MessagePlace, find_message
from airflow_broadway.runs.reading.runs import iter_runs


def where(args: argparse.Namespace) -> int:
    """Finds a message in all staged runs; returns 1 if no run received it."""
    store = open_existing_store(args.staging)
    runs = iter_runs(store, dag_id=args.dag_id, pipeline=args.pipeline_name)
    places = [story.place for story in find_message(runs, args.message_id)]
    if args.json:
        print_json([asdict(place) for place in places])
    elif not places:
        print_lines(
            f"No staged run under {redacted(store.uri)} has received"
            f" {args.message_id!r}: it still waits in its queue, or retention removed its run."
        )
    else:
        print_lines(*_format_places(places))
    return 0 if places else 1


def _format_places(places: Sequence[MessagePlace]) -> list[str]:
    lines: list[str] = []
    for place in places:
        if lines:
            lines.append("")
        for name, value in asdict(place).items():
            text = "-" if value is None else cut(value)
            lines.append(f"{name.replace('_', ' ') + ':':14} {text}")
    return lines
