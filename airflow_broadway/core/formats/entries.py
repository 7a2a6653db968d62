"""Entries as lines of JSON: the verdict on one message each."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import MAX_REASON, Action, Verdict
from airflow_broadway.core.text import cut

#: A text as JSON has it.
_quoted = json.encoder.encode_basestring_ascii
#: An encoder made once: ``json.dumps`` with separators makes one at each call.
_encode = json.JSONEncoder(separators=(",", ":")).encode


def dump_entry(entry: Entry, *, source: int | None = None, settled: bool = False) -> str:
    """An entry as a line, without its newline.

    :param source: In a batch of several generations: whose message it is, as an index into the
        plan's ``generations``.
    :param settled: Whether a callback settled it at once, so that nothing is left to do: then its
        body is left out.
    """
    # Written by hand: there may be as many lines as messages, and most of the cost of each would be
    # to make an encoder.
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
    if payload is not None and not settled:
        line += f',"payload":"{base64.b64encode(payload).decode("ascii")}"'
    if properties is not None and not settled:
        line += f',"properties":{_quoted(properties)}'
    if source is not None:
        line += f',"source":{source}'
    return line + (',"settled":true}' if settled else "}")


class EntryLine(NamedTuple):
    """What a line says; see :func:`dump_entry`."""

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
