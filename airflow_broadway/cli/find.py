"""``airflow-broadway where``: from a message's id to what became of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.cli.output import cut, say, say_json
from airflow_broadway.core.masking import redacted
from airflow_broadway.runs.find import MessagePlace, find_message


def where(given: argparse.Namespace) -> int:
    """Find a message in all staged runs; 1 if none has it."""
    store = open_existing_store(given.staging)
    found = find_message(store, given.message_id, dag_id=given.dag_id, pipeline=given.pipeline_name)
    if given.json:
        say_json([asdict(each) for each in found])
    elif not found:
        say(
            f"No staged run under {redacted(store.uri)} has received"
            f" {given.message_id!r}: it still waits in its queue, or retention removed its run."
        )
    else:
        say(*_text(found))
    return 0 if found else 1


def _text(found: Sequence[MessagePlace]) -> list[str]:
    lines: list[str] = []
    for place in found:
        if lines:
            lines.append("")
        for name, value in asdict(place).items():
            text = "-" if value is None else cut(value)
            lines.append(f"{name.replace('_', ' ') + ':':14} {text}")
    return lines
