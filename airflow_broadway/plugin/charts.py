"""Small charts as inline SVG, rendered on the server, with a text alternative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from markupsafe import Markup

#: The size of a chart in its own units, and the minimum height of a bar above 0.
WIDTH: Final = 160
HEIGHT: Final = 36
_LEAST: Final = 1.5
#: The free share of a bar's slot.
_GAP: Final = 0.25


def bars(
    title: str,
    values: Sequence[float | None],
    names: Sequence[str],
    fmt: Callable[[float | None], str],
    *,
    slots: int,
    maximum: float | None = None,
) -> Markup:
    """Draws a bar for each value, newest at the right; a dot for unknown values.

    :param names: The label of each bar, such as a run's id.
    :param fmt: Formats a value for people.
    :param slots: The number of bars for which there is room.
    :param maximum: The value that fills the height; the largest value by default.
    """
    known = [value for value in values if value is not None]
    top = maximum if maximum is not None else max(known, default=0.0)
    step = WIDTH / slots
    begin = WIDTH - step * len(values)
    elements = [
        _draw_bar(begin + step * place, step, value, top, f"{name}: {_format_value(value, fmt)}")
        for place, (value, name) in enumerate(zip(values, names, strict=True))
    ]
    return Markup(
        '<svg class="chart" role="img" viewBox="0 0 {w} {h}" preserveAspectRatio="none"'
        ' aria-label="{label}"><line class="base" x1="0" y1="{y}" x2="{w}" y2="{y}"/>{drawn}</svg>'
    ).format(
        w=WIDTH,
        h=HEIGHT,
        y=HEIGHT - 0.5,
        label=_label(title, values, fmt),
        drawn=Markup("").join(elements),
    )


def _draw_bar(x: float, step: float, value: float | None, top: float, title: str) -> Markup:
    width = step * (1 - _GAP)
    if value is None:
        return Markup(
            '<circle class="unknown" cx="{}" cy="{}" r="1.5"><title>{}</title></circle>'
        ).format(_r(x + width / 2), HEIGHT - 4, title)
    share = min(1.0, value / top) if top > 0 else 0.0
    height = max(_LEAST, share * (HEIGHT - 2)) if value > 0 else 0.0
    # A background rectangle, so that bars without height also have a tooltip.
    return Markup(
        '<g><title>{}</title><rect class="place" x="{}" y="0" width="{}" height="{}"/>'
        '<rect class="bar" x="{}" y="{}" width="{}" height="{}"/></g>'
    ).format(title, _r(x), _r(step), HEIGHT, _r(x), _r(HEIGHT - 1 - height), _r(width), _r(height))


def _label(title: str, values: Sequence[float | None], fmt: Callable[[float | None], str]) -> str:
    """Returns the text alternative of a chart."""
    known = [value for value in values if value is not None]
    if not known:
        return f"{title}: not known of any run."
    newest = _format_value(values[-1], fmt)
    scope = f"of the last {len(values)} runs" if len(values) > 1 else "of the last run"
    text = f"{title} {scope}: newest {newest}, lowest {fmt(min(known))}, highest {fmt(max(known))}"
    missing = len(values) - len(known)
    return f"{text}, not known of {missing}." if missing else f"{text}."


def _format_value(value: float | None, fmt: Callable[[float | None], str]) -> str:
    return "not known" if value is None else fmt(value)


def _r(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
