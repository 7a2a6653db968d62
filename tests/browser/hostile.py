"""Messages that attack whoever shows them.

Each tries to set ``window.owned`` in the page, or to break out of where it is shown.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

from tests.browser.site import Site

__all__ = ["HOSTILE", "ID", "fill"]

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


def fill(site: Site, name: str) -> None:
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
