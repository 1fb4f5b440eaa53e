"""Draws charts as inline SVG: lines, bars and a heat map. Colours are CSS classes, so that a page can be dark.

Every chart is one `<svg class="plot">` whose marks have class `mark`; hovering a mark shows its value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

Points = Sequence[tuple[float, float]]

WIDTH: Final = 640
HEIGHT: Final = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 46
_NUM_COLORS: Final = 6


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its title, its kind, and how values are written on it."""

    title: str
    is_log: bool = False
    unit: str = ""
    """`%`, `s`, `B`, `tokens` or nothing."""
    low: float | None = None
    high: float | None = None


def write_value(value: float, unit: str) -> str:
    """Return a value as people write it: 12 %, 350 ms, 1.2k."""
    if unit == "%":
        return f"{value * 100:.0f} %"
    if unit == "s":
        return write_time(value)
    space = f" {{}}{unit}" if unit == "B" else "{}"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{space.format(letter)}"
    return f"{value:.3g}{space.format('')}"


def write_time(value_s: float) -> str:
    """Return a time in the unit that suits it."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if abs(value_s) < limit:
            return f"{value_s * factor:.3g} {unit}"
    return f"{value_s / 3600:.3g} h"


class _Scale:
    """Maps values of an axis to pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        values = [v for v in values if math.isfinite(v) and (v > 0 or not axis.is_log)] or [1.0]
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if axis.is_log:
            low, high = max(low, high * 1e-9), max(high, low * 1.01)
        elif high <= low:
            high = low + 1
        self._is_log, self._start, self._span = axis.is_log, start, end - start
        self._low, self._high = low, high

    def __call__(self, value: float) -> float:
        if self._is_log:
            value = max(value, self._low)
            part = math.log(value / self._low) / math.log(self._high / self._low)
        else:
            part = (value - self._low) / (self._high - self._low)
        return round(self._start + min(1.0, max(0.0, part)) * self._span, 1)

    def ticks(self) -> list[float]:
        """Return round values within the scale."""
        if self._is_log:
            first, last = math.ceil(math.log10(self._low) - 1e-9), math.floor(math.log10(self._high) + 1e-9)
            step = max(1, (last - first) // 6)
            found = [10.0**e for e in range(first, last + 1, step)]
            return found if len(found) > 1 else [self._low, self._high]
        step = 10 ** math.floor(math.log10((self._high - self._low) / 4))
        step *= next(m for m in (1, 2, 5, 10) if (self._high - self._low) / (step * m) <= 5)  # noqa: PLR2004 (ticks)
        first = math.ceil(self._low / step - 1e-9)
        return [i * step for i in range(first, int(self._high / step + 1e-9) + 1)]


def lines(
    series: Mapping[str, Points],
    x: Axis,
    y: Axis,
    *,
    band: tuple[Points, Points] | None = None,
    marks: Mapping[str, float] | None = None,
) -> str:
    """Draw lines, with a legend where there are several.

    Args:
        series: points by name.
        x: the lower axis.
        y: the left axis.
        band: a lower and an upper line with the area between them filled.
        marks: vertical lines, by what stands at them.
    """
    points = [p for one in series.values() for p in one] + [p for edge in band or () for p in edge]
    sx = _Scale(x, [p[0] for p in points] + list((marks or {}).values()), _LEFT, WIDTH - _RIGHT)
    sy = _Scale(y, [p[1] for p in points], HEIGHT - _BOTTOM, _TOP)
    parts = [_axes(x, y, sx, sy)]
    if band is not None:
        edge = [*band[0], *reversed(band[1])]
        parts.append(f'<polygon class="band" points="{_path(edge, sx, sy)}"/>')
    for text, value in (marks or {}).items():
        at = sx(value)
        parts.append(f'<line class="rule" x1="{at}" x2="{at}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text class="note" x="{at + 4}" y="{_TOP + 10}">{escape(text)}</text>')
    for index, (name, one) in enumerate(series.items()):
        color = f"c{index % _NUM_COLORS}"
        title = f"<title>{escape(name)}</title>"
        if len(set(one)) == 1:
            parts.append(
                f'<circle class="mark fill {color}" cx="{sx(one[0][0])}" cy="{sy(one[0][1])}" r="5">{title}</circle>'
            )
        parts.append(f'<polyline class="mark line {color}" points="{_path(one, sx, sy)}">{title}</polyline>')
        step = max(1, len(one) // 24)
        for a, b in one[::step]:
            tip = f"{name}: {write_value(a, x.unit)} → {write_value(b, y.unit)}"
            parts.append(
                f'<circle class="dot {color}" cx="{sx(a)}" cy="{sy(b)}" r="3"><title>{escape(tip)}</title></circle>'
            )
    return _svg(parts) + _legend(list(series))


def stacked_bars(labels: Sequence[str], layers: Mapping[str, Sequence[float]], x_title: str, y: Axis) -> str:
    """Draw one bar per label, its layers on top of each other."""
    totals = [sum(layer[i] for layer in layers.values()) for i in range(len(labels))]
    sy = _Scale(Axis(y.title, unit=y.unit, low=0.0), totals or [1.0], HEIGHT - _BOTTOM, _TOP)
    slot = (WIDTH - _LEFT - _RIGHT) / max(1, len(labels))
    parts = [_axes(Axis(x_title), y, None, sy)]
    for i, label in enumerate(labels):
        left, base = _LEFT + slot * (i + 0.15), 0.0
        for index, (name, layer) in enumerate(layers.items()):
            top, bottom = sy(base + layer[i]), sy(base)
            tip = f"{label}: {name} {write_value(layer[i], y.unit)}"
            parts.append(
                f'<rect class="mark fill c{index}" x="{left:.1f}" y="{top}" width="{slot * 0.7:.1f}" '
                f'height="{max(0.5, bottom - top):.1f}"><title>{escape(tip)}</title></rect>'
            )
            base += layer[i]
        parts.append(
            f'<text class="tick mid" x="{left + slot * 0.35:.1f}" y="{HEIGHT - _BOTTOM + 16}">{escape(label)}</text>'
        )
    return _svg(parts) + _legend(list(layers))


def bars(values: Sequence[tuple[str, float, str]]) -> str:
    """Draw horizontal bars of (label, value, what to write behind it)."""
    row, left = 30, 200
    height = row * len(values) + 8
    high = max((v for _, v, _ in values), default=0) or 1.0
    parts = []
    for i, (label, value, note) in enumerate(values):
        top = 4 + row * i
        width = max(2.0, (WIDTH - left - 130) * value / high)
        parts.append(f'<text class="tick end" x="{left - 8}" y="{top + 18}">{escape(label)}</text>')
        parts.append(
            f'<rect class="mark fill c1" x="{left}" y="{top + 3}" width="{width:.1f}" height="{row - 8}" rx="2"/>'
        )
        parts.append(f'<text class="tick" x="{left + width + 8:.1f}" y="{top + 18}">{escape(note)}</text>')
    return _svg(parts, height)


def heat_map(
    columns: Sequence[str],
    rows: Sequence[str],
    values: Sequence[Sequence[float]],
    titles: tuple[str, str],
    *,
    unit: str,
    chosen: tuple[int, int] | None = None,
) -> str:
    """Draw values [rows][columns] from 0 to their maximum, each written in its cell; frame `chosen` (row, column)."""
    cell_h = 38
    height = cell_h * len(rows) + _TOP + _BOTTOM
    slot = (WIDTH - 90 - _RIGHT) / max(1, len(columns))
    high = 1.0 if unit == "%" else max((v for row in values for v in row), default=0) or 1.0
    parts = [
        f'<text class="title" transform="translate(14 {height / 2 - 12:.0f}) rotate(-90)">{escape(titles[1])}</text>',
        f'<text class="title" x="{WIDTH / 2 + 30:.0f}" y="{height - 8}">{escape(titles[0])}</text>',
    ]
    for j, row in enumerate(values):
        top = _TOP + cell_h * j
        parts.append(f'<text class="tick end" x="82" y="{top + 23}">{escape(rows[j])}</text>')
        for i, value in enumerate(row):
            part = min(1.0, value / high)
            frame = " chosen" if chosen == (j, i) else ""
            ink = "over" if part > 0.55 else "under"  # noqa: PLR2004 (from here on dark text is hard to read)
            left = 90 + slot * i
            parts.append(
                f'<rect class="mark heat{frame}" x="{left + 1.5:.1f}" y="{top + 1.5}" width="{slot - 3:.1f}" '
                f'height="{cell_h - 3}" rx="3" style="--heat:{part * 100:.0f}%"/>'
                f'<text class="cell {ink}" x="{left + slot / 2:.1f}" y="{top + 24}">'
                f"{escape(write_value(value, unit))}</text>"
            )
    for i, label in enumerate(columns):
        at = 90 + slot * (i + 0.5)
        parts.append(f'<text class="tick mid" x="{at:.1f}" y="{height - _BOTTOM + 18}">{escape(label)}</text>')
    return _svg(parts, height)


def _axes(x: Axis, y: Axis, sx: _Scale | None, sy: _Scale) -> str:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for value in sy.ticks():
        at = sy(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 6}" y="{at + 4}">{write_value(value, y.unit)}</text>')
    for value in sx.ticks() if sx is not None else []:
        at = sx(value) if sx is not None else 0.0
        parts.append(f'<text class="tick mid" x="{at}" y="{bottom + 16}">{write_value(value, x.unit)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="title" x="{(_LEFT + right) / 2}" y="{HEIGHT - 8}">{escape(x.title)}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<text class="title" transform="translate(14 {middle}) rotate(-90)">{escape(y.title)}</text>')
    return "".join(parts)


def _path(points: Points, sx: _Scale, sy: _Scale) -> str:
    return " ".join(f"{sx(a)},{sy(b)}" for a, b in points)


def _svg(parts: Sequence[str], height: float = HEIGHT) -> str:
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:  # noqa: PLR2004 (one needs no legend)
        return ""
    items = (f'<span><i class="c{i % _NUM_COLORS}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<div class="legend">{"".join(items)}</div>'
