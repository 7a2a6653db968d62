"""The messages in the queues: flights, and attacks on pages that show them.

Each of those tries to set ``window.owned`` in the page, or to break out of where it is shown.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

from scripts.load_flights import flights, load
from tests.browser.site import Site

#: How many flights the demo drains.
FLIGHTS = 2_000

#: The first half of every message id in these queues.
ID = "\"><script>window.owned='id'</script>"

HOSTILE = (
    "<script>window.owned='script'</script>",
    '"><img src=x onerror="window.owned=\'img\'">',
    "'><svg/onload=window.owned='svg'>",
    "</td></table></main><iframe srcdoc=\"<script>parent.owned='frame'</script>\">",
    "--></style></title></textarea><script>window.owned='end'</script>",
    "javascript:window.owned='link'",
    "{{ 7 * 7191 }}{% raw %}${7*7191}",
    "http://127.0.0.1:1/<a href=//evil.example>",
    "<base href=//evil.example/><form action=//evil.example><button>Send",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "&lt;script&gt;window.owned='twice'&lt;/script&gt;",
    "\u202egnp.exe\u2066 \x00 \x1b[31m \ud7ff \ufffe",
    "x" * 5_000,
    "../../../../etc/passwd",
    "a\r\nSet-Cookie: owned=1",
)


def fill_hostile(site: Site, name: str) -> None:
    """Send hostile messages to a queue, and harmless ones: each good, failing, and failing late."""
    queue = site.queue(name)
    queue.send([b'{"n": 0}'])
    with closing(sqlite3.connect(queue.path)) as file, file:
        file.execute("UPDATE queues SET tag = ? WHERE name = ?", (ID, name))
    queue.close()
    queue = site.queue(name)
    for kind in ("", "bad: ", "late: "):
        queue.send([((kind + text).encode(), {text[:100]: text}) for text in HOSTILE])
    queue.send([b'{"n": %d, "needle": "haystack-%d"}' % (n, n) for n in range(1, 30)])
    queue.send([b"bad: \xff\xfe\x00not text", bytes(range(256)), b"y" * 2_000_000])
    queue.close()
    with closing(sqlite3.connect(queue.path)) as file, file:
        # Ids grow with the clock; tests name these messages by their numbers.
        [(before,)] = file.execute("SELECT min(id) - 1 FROM messages")
        for table in ("messages", "bodies"):
            file.execute(f"UPDATE {table} SET id = id - ?", (before,))


def fill_flights(site: Site) -> int:
    """Sends flights to the demo's queue; returns how many of them never departed."""
    sent = list(flights(FLIGHTS))
    load(site.queue("flights"), sent)
    return sum(flight["dep_delay"] is None for flight in sent)
