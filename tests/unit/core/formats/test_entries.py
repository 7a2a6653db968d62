"""Lines of entries files, which are put together by hand."""

from __future__ import annotations

import itertools
import json

from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.formats.entries import dump_entry, load_line

TEXTS = ["", "a", "zażółć \ud83d", 'x\n"\\\u2028', "é" * 3000, "x" * 3000]
DELAYS = [0.0, 1, 1.23456, 1e10, 5e-324, 1e22, float("inf")]


def test_entry_line_is_compact_json_for_any_text():
    for text, delay, payload, source in itertools.product(
        TEXTS, DELAYS, [None, b"", b"\x00\xff"], [None, 0, 3]
    ):
        verdict = Verdict(Action.RETRY, delay, text, "batch" if text else "")
        entry = Entry(text, text, verdict, 3, payload, None if payload is None else text)
        for settled in (False, True):
            line = dump_entry(entry, source=source, settled=settled)

            assert line == json.dumps(json.loads(line), separators=(",", ":"))
            read = load_line(line)
            assert (read.source, read.settled) == (source, settled)
            cut = verdict._replace(delay=round(delay, 3), reason=read.entry.verdict.reason)
            body = (None, None) if settled else (entry.payload, entry.properties)
            assert read.entry == entry._replace(verdict=cut, payload=body[0], properties=body[1])
            assert len(read.entry.verdict.reason.encode()) <= 2048
