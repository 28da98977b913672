"""Small charts as inline SVG. Colours are CSS variables of the page, so that light and dark are its choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_ROW, _LABEL, _WIDTH = 26, 128, 560
_LETTER = 7.2  # wider than the mean letter of the page's 13 px font
_COLOURS = 12
_Point = tuple[float, float]


def _tag(name: str, content: str = "", **attributes: object) -> str:
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(f"{value:.1f}" if isinstance(value, float) else str(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>"


def _text(content: str, x: float, y: float, anchor: str = "start", cls: str = "t") -> str:
    return _tag("text", escape(content), x=x, y=y, text_anchor=anchor, class_=cls)


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    body = _tag("title", escape(label)) + "".join(parts)
    return _tag("svg", body, viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", xmlns="http://www.w3.org/2000/svg")


def ticks(top: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to `top` or just beyond it."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / about
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * 0.999)
    return [step * place for place in range(math.ceil(top / step - 1e-9) + 1)]


def _short(value: float) -> str:
    return f"{value:.3g}"


def colour(place: int) -> str:
    """CSS colour of the `place`-th method; they repeat after twelve."""
    return f"var(--c{place % _COLOURS})"


def label_width(names: Sequence[str]) -> float:
    """Room for the longest name at the left of bars, at most half of the chart."""
    return min(max(_LABEL, *(len(name) * _LETTER + 12 for name in names), 0), _WIDTH / 2)


def interval_bars(rows: Sequence[tuple[str, int, float, float | None, float | None]], top: float, label: str) -> str:
    """Horizontal bars with intervals and a line at 1.

    Args:
        rows: name, number of the colour, value, and the interval's ends where there is one.
        top: largest value on the axis, the same for charts that stand beside each other.
    """
    marks, left = ticks(top), label_width([name for name, *_ in rows])
    plot = _WIDTH - left - 62
    height = len(rows) * _ROW + 28

    def x(value: float) -> float:
        return left + plot * min(value, marks[-1]) / marks[-1]

    parts = []
    for mark in marks:
        parts.append(_tag("line", x1=x(mark), x2=x(mark), y1=4, y2=height - 22, class_="grid"))
        parts.append(_text(_short(mark), x(mark), height - 8, "middle", "small"))
    for place, (name, number, value, low, high) in enumerate(rows):
        y = 6 + place * _ROW
        bar = _tag("rect", x=left, y=y + 3, width=x(value) - left, height=_ROW - 10, rx=2, fill=colour(number))
        tip = f"{name}: {value:.2f}"
        if low is not None and high is not None:
            middle = y + _ROW / 2 - 2
            tip += f", 95 % interval {low:.2f} to {high:.2f}"
            bar += _tag("line", x1=x(low), x2=x(high), y1=middle, y2=middle, class_="whisker")
            for end in (low, high):
                bar += _tag("line", x1=x(end), x2=x(end), y1=middle - 4, y2=middle + 4, class_="whisker")
        parts.append(_tag("g", _tag("title", escape(tip)) + bar))
        parts.append(_text(name, left - 8, y + 16, "end"))
        parts.append(_text(f"{value:.2f}", max(x(value), x(high or 0)) + 6, y + 16, cls="t num"))
    parts.append(_tag("line", x1=x(1), x2=x(1), y1=2, y2=height - 22, class_="one"))
    return _svg(_WIDTH, height, parts, label)


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]], parts_of: Sequence[str], unit: str) -> str:
    """Horizontal bars of parts that add up; `parts_of` gives their order."""
    top = max((sum(max(values[part], 0.0) for part in parts_of) for _, values in rows), default=1.0)
    marks = ticks(top)
    left = label_width([name for name, _ in rows])
    plot, height = _WIDTH - left - 62, len(rows) * _ROW + 28

    def x(value: float) -> float:
        return left + plot * value / marks[-1]

    drawn = []
    for mark in marks:
        drawn.append(_tag("line", x1=x(mark), x2=x(mark), y1=4, y2=height - 22, class_="grid"))
        drawn.append(_text(_short(mark), x(mark), height - 8, "middle", "small"))
    for place, (name, values) in enumerate(rows):
        y, start = 6 + place * _ROW, 0.0
        for number, part in enumerate(parts_of):
            value = max(values[part], 0.0)
            tip = _tag("title", escape(f"{name}, {part}: {value:.1f} {unit}"))
            shape = {"x": x(start), "y": y + 3, "width": x(start + value) - x(start), "height": _ROW - 10}
            drawn.append(_tag("rect", tip, fill=f"var(--p{number})", **shape))
            start += value
        drawn.append(_text(name, left - 8, y + 16, "end"))
        drawn.append(_text(f"{start:.1f}", x(start) + 6, y + 16, cls="t num"))
    return _svg(_WIDTH, height, drawn, f"time by part, {unit}")


def lines(
    curves: Sequence[tuple[str, int, Sequence[_Point], bool]],
    x_label: str,
    y_label: str,
    y_from: float = 0.0,
    y_top: float | None = None,
) -> str:
    """Points joined by lines, `x` being whole numbers.

    Args:
        curves: name, number of the colour, points, and whether it is dashed (computed, not measured).
        y_from: least value on the y axis.
        y_top: largest one; found from the points unless given.
    """
    width, height, left, bottom = _WIDTH, 250, 60, 40
    points = [point for _, _, curve, _ in curves for point in curve]
    last = max((x for x, _ in points), default=1)
    top = y_top if y_top is not None else max((y for _, y in points), default=1.0)
    marks = [y_from + mark for mark in ticks(top - y_from, 4)]

    def at(point: _Point) -> _Point:
        across = (point[0] - 1) / max(last - 1, 1)
        up = (point[1] - y_from) / (marks[-1] - y_from)
        return left + 14 + across * (width - left - 40), height - bottom - up * (height - bottom - 14)

    parts = []
    for mark in marks:
        y = at((1, mark))[1]
        parts.append(_tag("line", x1=left, x2=width - 12, y1=y, y2=y, class_="grid"))
        parts.append(_text(_short(mark), left - 6, y + 4, "end", "small"))
    for place in range(1, int(last) + 1):
        parts.append(_text(str(place), at((place, y_from))[0], height - bottom + 16, "middle", "small"))
    parts.append(_text(x_label, (left + width) / 2, height - 6, "middle", "small"))
    turn = f"translate(14 {(height - bottom) / 2:.0f}) rotate(-90)"
    parts.append(_tag("g", _text(y_label, 0, 0, "middle", "small"), transform=turn))
    for name, number, curve, dashed in curves:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, curve))
        dash = {"stroke_dasharray": "5 4"} if dashed else {}
        parts.append(_tag("polyline", points=path, fill="none", stroke=colour(number), stroke_width=2, **dash))
        for point in [] if dashed else curve:
            x, y = at(point)
            tip = _tag("title", escape(f"{name}, {_short(point[0])}: {point[1]:.2f}"))
            parts.append(_tag("circle", tip, cx=x, cy=y, r=4, fill=colour(number)))
    return _svg(width, height, parts, f"{y_label} by {x_label}")
