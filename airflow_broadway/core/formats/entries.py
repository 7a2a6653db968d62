"""Reads and writes entries as lines of JSON: one message's verdict per line."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import MAX_REASON, Action, Verdict
from airflow_broadway.core.text import cut

#: Quotes a string as JSON.
_quoted = json.encoder.encode_basestring_ascii
#: A shared encoder: ``json.dumps`` with separators creates one per call.
_encode = json.JSONEncoder(separators=(",", ":")).encode


def dump_entry(entry: Entry, *, source: int | None = None, settled: bool = False) -> str:
    """Returns an entry as a line, without its newline.

    :param source: In a batch of several generations: the message's generation, as an index into
        the plan's ``generations``.
    :param settled: Whether a callback settled it immediately, so that it needs no settlement; its
        body is omitted then.
    """
    # Formatted by hand: there may be a line per message, and creating an encoder for each would
    # dominate the cost.
    message_id, receipt, verdict, attempt, payload, properties = entry
    action, delay, reason, stage, exception = verdict
    line = f'{{"id":{_quoted(message_id)},"action":"{action.value}","attempt":{attempt}'
    if receipt:
        line += f',"receipt":{_quoted(receipt)}'
    if delay:
        line += f',"delay":{round(delay, 3)!r}' if isfinite(delay) else f',"delay":{_encode(delay)}'
    if reason:
        line += f',"reason":{_quoted(cut(reason, MAX_REASON))}'
    if stage:
        line += f',"stage":{_quoted(stage)}'
    if exception:
        line += f',"exception":{_quoted(exception)}'
    if payload is not None and not settled:
        line += f',"payload":"{base64.b64encode(payload).decode("ascii")}"'
    if properties is not None and not settled:
        line += f',"properties":{_quoted(properties)}'
    if source is not None:
        line += f',"source":{source}'
    return line + (',"settled":true}' if settled else "}")


def entry_of_row(row: Mapping[str, Any], verdict: Verdict) -> Entry:
    """Returns the entry of a staged message.

    :param row: Its columns for settlement.
    """
    return Entry(
        row["message_id"],
        row["_receipt"] or "",
        verdict,
        row["attempt"],
        row.get("_payload"),
        row.get("_properties"),
    )


class EntryLine(NamedTuple):
    """A parsed line; see :func:`dump_entry`."""

    entry: Entry
    source: int | None
    settled: bool


def load_line(line: str) -> EntryLine:
    """Reads what :func:`dump_entry` wrote."""
    value = json.loads(line)
    payload = value.get("payload")
    verdict = Verdict(
        Action(value["action"]),
        value.get("delay", 0.0),
        value.get("reason", ""),
        value.get("stage", ""),
        value.get("exception", ""),
    )
    entry = Entry(
        value["id"],
        value.get("receipt", ""),
        verdict,
        value.get("attempt", 1),
        None if payload is None else base64.b64decode(payload),
        value.get("properties"),
    )
    return EntryLine(entry, value.get("source"), value.get("settled", False))
