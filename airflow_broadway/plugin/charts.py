"""Small charts as inline SVG, made on the server; each says in words what it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from markupsafe import Markup

#: The size of a chart in its own units, and the least height of a bar that is not 0.
WIDTH: Final = 160
HEIGHT: Final = 36
_LEAST: Final = 1.5
#: The part of a bar's place that is free.
_GAP: Final = 0.25


def bars(
    title: str,
    values: Sequence[float | None],
    names: Sequence[str],
    shown: Callable[[float | None], str],
    *,
    places: int,
    most: float | None = None,
) -> Markup:
    """A bar for each value, the newest at the right; a dot where the value is not known.

    :param names: What each bar is of, such as a run's id.
    :param shown: A value as people read it.
    :param places: For how many bars there is room.
    :param most: The value that fills the height; the largest one unless given.
    """
    known = [value for value in values if value is not None]
    top = most if most is not None else max(known, default=0.0)
    step = WIDTH / places
    begin = WIDTH - step * len(values)
    drawn = [
        _bar(begin + step * place, step, value, top, f"{name}: {_said(value, shown)}")
        for place, (value, name) in enumerate(zip(values, names, strict=True))
    ]
    return Markup(
        '<svg class="chart" role="img" viewBox="0 0 {w} {h}" preserveAspectRatio="none"'
        ' aria-label="{label}"><line class="base" x1="0" y1="{y}" x2="{w}" y2="{y}"/>{drawn}</svg>'
    ).format(
        w=WIDTH,
        h=HEIGHT,
        y=HEIGHT - 0.5,
        label=_label(title, values, shown),
        drawn=Markup("").join(drawn),
    )


def _bar(x: float, step: float, value: float | None, top: float, said: str) -> Markup:
    width = step * (1 - _GAP)
    if value is None:
        return Markup(
            '<circle class="unknown" cx="{}" cy="{}" r="1.5"><title>{}</title></circle>'
        ).format(_r(x + width / 2), HEIGHT - 4, said)
    share = min(1.0, value / top) if top > 0 else 0.0
    height = max(_LEAST, share * (HEIGHT - 2)) if value > 0 else 0.0
    # Behind it, so that a pointer finds also a bar of no height.
    return Markup(
        '<g><title>{}</title><rect class="place" x="{}" y="0" width="{}" height="{}"/>'
        '<rect class="bar" x="{}" y="{}" width="{}" height="{}"/></g>'
    ).format(said, _r(x), _r(step), HEIGHT, _r(x), _r(HEIGHT - 1 - height), _r(width), _r(height))


def _label(title: str, values: Sequence[float | None], shown: Callable[[float | None], str]) -> str:
    """The chart in words."""
    known = [value for value in values if value is not None]
    if not known:
        return f"{title}: not known of any run."
    newest = _said(values[-1], shown)
    of = f"of the last {len(values)} runs" if len(values) > 1 else "of the last run"
    text = f"{title} {of}: newest {newest}, lowest {shown(min(known))}, highest {shown(max(known))}"
    missing = len(values) - len(known)
    return f"{text}, not known of {missing}." if missing else f"{text}."


def _said(value: float | None, shown: Callable[[float | None], str]) -> str:
    return "not known" if value is None else shown(value)


def _r(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
