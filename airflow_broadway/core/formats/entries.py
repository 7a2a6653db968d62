"""Lines of entries files: the verdict on one message each.

Part of the formats of :mod:`airflow_broadway.core.formats.layout`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import MAX_REASON, Action, Verdict
from airflow_broadway.core.text import cut

__all__ = ["EntryLine", "dump_entry", "load_line"]

#: A text as JSON has it.
_quoted = json.encoder.encode_basestring_ascii
#: ``json.dumps`` with separators makes an encoder at each call.
_encode = json.JSONEncoder(separators=(",", ":")).encode


def dump_entry(entry: Entry, *, source: int | None = None, settled: bool = False) -> str:
    """One line of an entries file.

    :param source: In a batch of several generations: whose message it is, the row's ``source``.
    :param settled: A callback settled it at once: it only says that nothing is left to do.
    """
    # By hand: there may be as many as messages, and an encoder made for each costs the most of it.
    message_id, receipt, verdict, attempt, payload, properties = entry
    action, delay, reason, stage = verdict
    line = f'{{"id":{_quoted(message_id)},"action":"{action.value}","attempt":{attempt}'
    if receipt:
        line += f',"receipt":{_quoted(receipt)}'
    if delay:
        line += f',"delay":{round(delay, 3)!r}' if isfinite(delay) else f',"delay":{_encode(delay)}'
    if reason:
        line += f',"reason":{_quoted(cut(reason, MAX_REASON))}'
    if stage:
        line += f',"stage":{_quoted(stage)}'
    if payload is not None:
        line += f',"payload":"{base64.b64encode(payload).decode("ascii")}"'
    if properties is not None:
        line += f',"properties":{_quoted(properties)}'
    if source is not None:
        line += f',"source":{source}'
    return line + (',"settled":true}' if settled else "}")


class EntryLine(NamedTuple):
    """A line of an entries file, whole; see :func:`dump_entry`."""

    entry: Entry
    source: int | None
    settled: bool


def load_line(line: str) -> EntryLine:
    """Read what :func:`dump_entry` wrote."""
    value = json.loads(line)
    return EntryLine(_entry(value), value.get("source"), value.get("settled", False))


def _entry(value: Mapping[str, Any]) -> Entry:
    payload = value.get("payload")
    return Entry(
        value["id"],
        value.get("receipt", ""),
        Verdict(
            Action(value["action"]),
            value.get("delay", 0.0),
            value.get("reason", ""),
            value.get("stage", ""),
        ),
        value.get("attempt", 1),
        None if payload is None else base64.b64decode(payload),
        value.get("properties"),
    )
