"""Pages as HTML: templates, filters, and what every page needs.

A route ends with ``return page(request, "run.html", run=run, …)``.  In a template there are,
besides the facts given:

``root``        where the pages are mounted, such as ``/broadway``: ``{{ root }}/dags/…``
``airflow``     where Airflow's UI is, such as ``""``: ``{{ airflow }}/dags/…``
``static(n)``   the address of a static file
``csrf``        the token for a form's field ``csrf``; empty for who is not logged in
``now``         the instant at which the page is made

Filters: ``instant`` (a ``<time>``), ``count``, ``size``, ``seconds``, ``path`` (an id as a part of
a path), ``web`` (a link, if it is of http), ``oneline`` (anybody's text).  Everything is escaped;
there is no ``|safe``.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from airflow_broadway.core.text import printable
from airflow_broadway.plugin.access import csrf_of

if TYPE_CHECKING:
    from fastapi import Request

_HERE: Final = Path(__file__).parent
#: The folder of static files.
STATIC: Final = _HERE / "static"


def page(request: Request, name: str, *, status: int = 200, **facts: Any) -> HTMLResponse:
    """The page, or part of one, that a template makes of facts."""
    root = request.scope.get("root_path", "")
    text = (
        _environment()
        .get_template(name)
        .render(
            facts,
            root=root,
            airflow=root.removesuffix("/broadway"),
            static=lambda file: f"{root}/static/{file}?v={version(file)}",
            csrf=csrf_of(request),
            now=datetime.now(UTC),
        )
    )
    # A sender's text may hold half a surrogate pair, which UTF-8 does not encode.
    return HTMLResponse(text.encode("utf-8", "backslashreplace"), status)


@cache
def version(file: str) -> str:
    """A static file's version, so that browsers may keep it for long."""
    return sha256((STATIC / file).read_bytes()).hexdigest()[:12]


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(
        instant=instant,
        count=count,
        rate=rate,
        size=size,
        seconds=seconds,
        path=path_part,
        web=web,
        shorten=shorten,
        sentence=sentence,
        oneline=oneline,
    )
    return made


# -- filters ---------------------------------------------------------------------------------------


def instant(value: datetime | str | None) -> str:
    """An instant in UTC; broadway.js adds the local time as its title."""
    if not value:
        return "–"
    at = datetime.fromisoformat(value) if isinstance(value, str) else value
    at = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        at.isoformat(), at.strftime("%Y-%m-%d %H:%M:%S")
    )


def count(value: float | None) -> str:
    """A number with separators; a dash where nothing is known."""
    if value is None:
        return "–"
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def rate(value: float) -> str:
    """So many messages in a second; of slow ones, in a minute."""
    if value >= 10:
        return f"{count(value)}/s"
    return f"{value:.1f}/s" if value >= 1 else f"{value * 60:.1f}/min"


def shorten(text: str, limit: int) -> str:
    """A text on one line, cut to so many characters."""
    line = printable(text)
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def sentence(text: str) -> str:
    """A text as a sentence: errors begin small, and end without a full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def size(value: float | None) -> str:
    """Bytes, in the unit that fits."""
    if value is None:
        return "–"
    step = 0
    while value >= 1024 and step < len(_SIZES) - 1:
        value, step = value / 1024, step + 1
    return f"{value:.0f} {_SIZES[step]}" if step == 0 else f"{value:.1f} {_SIZES[step]}"


def seconds(value: float | None) -> str:
    """A duration, in the two units that count most."""
    if value is None:
        return "–"
    if abs(value) < 0.1:
        return f"{value * 1000:.0f} ms" if value else "0 s"
    if value < 60:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    whole = round(value)
    for name, length, smaller, part in (
        ("d", 86_400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= length:
            return f"{whole // length} {name} {whole % length // part} {smaller}"
    return f"{whole} s"


def oneline(value: str) -> str:
    """Anybody's text on one line, with whatever is not to be seen in it as an escape."""
    return printable(value)


def path_part(value: str) -> str:
    """An id as one part of a path."""
    return quote(value, safe="", errors="backslashreplace")


def web(value: str | None) -> str | None:
    """A link's address, if it is one of http; ``None`` else, so that no script is a link."""
    try:
        scheme = urlsplit(value or "").scheme
    except ValueError:  # such as http://[
        return None
    return value if scheme in ("http", "https") else None
