"""Renders pages as HTML: templates, filters, and the variables of every page.

A route ends with ``return await show_page(request, "run.html", run=run, …)``.  A template also has
these variables:

``root``        the path of the pages, such as ``/broadway``: ``{{ root }}/dags/…``
``airflow``     the path of Airflow's UI, such as ``""``: ``{{ airflow }}/dags/…``
``static(n)``   the URL of a static file
``csrf``        the token for a form's field ``csrf``; empty without a login
``now``         the time of rendering

Filters: ``time`` (a ``<time>``), ``count``, ``size``, ``seconds``, ``path`` (an id as a path
segment), ``web`` (an http link), ``oneline`` (untrusted text).  Everything is escaped; there is no
``|safe``.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from airflow_broadway.core import text as text_format
from airflow_broadway.core.text import printable
from airflow_broadway.plugin.access import csrf_of

if TYPE_CHECKING:
    from fastapi import Request

_HERE: Final = Path(__file__).parent
#: The folder of static files.
STATIC: Final = _HERE / "static"


def page(request: Request, name: str, *, status: int = 200, **variables: Any) -> HTMLResponse:
    """Renders a template as a page, or as a part of one."""
    root = request.scope.get("root_path", "")
    text = (
        _environment()
        .get_template(name)
        .render(
            variables,
            root=root,
            airflow=root.removesuffix("/broadway"),
            static=lambda file: f"{root}/static/{file}?v={version(file)}",
            csrf=csrf_of(request),
            now=datetime.now(UTC),
        )
    )
    # A sender's text may contain a lone surrogate, which UTF-8 cannot encode.
    return HTMLResponse(text.encode("utf-8", "backslashreplace"), status)


async def show_page(request: Request, name: str, **variables: Any) -> HTMLResponse:
    """Renders a template like :func:`page`, in a thread: other requests are answered meanwhile."""
    return await run_in_threadpool(page, request, name, **variables)


@cache
def version(file: str) -> str:
    """Returns a static file's version, so that browsers can cache it."""
    return sha256((STATIC / file).read_bytes()).hexdigest()[:12]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(time=timestamp, count=count, rate=rate, size=size, seconds=seconds)
    environment.filters.update(path=path_part, web=web, oneline=printable)
    environment.filters.update(shorten=shorten, sentence=sentence)
    return environment


# -- filters ---------------------------------------------------------------------------------------


def timestamp(value: datetime | str | None) -> str:
    """Formats a timestamp in UTC; broadway.js adds the local time as its title."""
    if not value:
        return "–"
    at = datetime.fromisoformat(value) if isinstance(value, str) else value
    at = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        at.isoformat(), at.strftime("%Y-%m-%d %H:%M:%S")
    )


def count(value: float | None) -> str:
    """Formats a number with separators; an unknown one as a dash."""
    if value is None:
        return "–"
    return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def rate(value: float) -> str:
    """Formats a rate per second; a slow one per minute."""
    if value >= 10:
        return f"{count(value)}/s"
    return f"{value:.1f}/s" if value >= 1 else f"{value * 60:.1f}/min"


def shorten(text: str, limit: int) -> str:
    """Returns a text on one line of at most ``limit`` characters."""
    return text_format.shorten(printable(text), limit)


def sentence(text: str) -> str:
    """Returns an error text as a sentence, with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def size(value: float | None) -> str:
    """Formats bytes in a suitable unit."""
    if value is None:
        return "–"
    step = 0
    while value >= 1024 and step < len(_SIZES) - 1:
        value, step = value / 1024, step + 1
    return f"{value:.0f} {_SIZES[step]}" if step == 0 else f"{value:.1f} {_SIZES[step]}"


def seconds(value: float | None) -> str:
    """Formats a duration in its two largest units."""
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


def path_part(value: str) -> str:
    """Returns an id as one path segment."""
    return quote(value, safe="", errors="backslashreplace")


def web(value: str | None) -> str | None:
    """Returns an http or https URL; ``None`` for others, such as ``javascript:``."""
    try:
        scheme = urlsplit(value or "").scheme
    except ValueError:  # such as http://[
        return None
    return value if scheme in ("http", "https") else None
