"""Line and point charts as SVG text: numbers in, one `<svg>` element out, without dependencies.

A chart is drawn once wide and once narrow, and the page shows the one that fits, so that letters
keep their size on a phone. Series differ in colour, marker and dashes, so that a reader who misses
one of these can still tell them apart.
"""

import dataclasses
import math
from collections.abc import Sequence

from mirrordp._show import escaped

# Okabe and Ito's palette, which can be told apart under every common colour blindness.
PALETTE = ("#555555", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_INK, _FAINT = "#33404d", "#d9dee3"


@dataclasses.dataclass(frozen=True)
class Series:
    """The points of one kind, in the order in which a line goes through them.

    Attributes:
        label: the name in the legend.
        x: abscissae.
        y: ordinates; a point that is not finite is left out.
        low: lower ends of the band or the error bars, or None.
        high: upper ends.
        band: whether low and high are drawn as a band, not as a bar at each point.
        look: a number that decides colour, marker and dashes.
        markers: whether points have markers.
        solid: whether the line has no dashes, for a chart of one series.
        names: a word beside each point, or None.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    band: bool = True
    look: int = 0
    markers: bool = True
    solid: bool = False
    names: Sequence[str] | None = None

    @property
    def colour(self) -> str:
        """The colour of the series."""
        return PALETTE[self.look % len(PALETTE)]

    @property
    def dashes(self) -> str:
        """The dash pattern of the line; empty for a whole line."""
        if self.solid:
            return ""
        return _DASHES[(self.look // len(PALETTE) + self.look) % len(_DASHES)]


def both_sizes(series: Sequence[Series], **options) -> str:
    """Draws the chart wide and narrow; the style sheet hides the one that does not fit."""
    wide = chart(series, width=760, height=330, **options)
    narrow = chart(series, width=350, height=290, **options)
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def chart(
    series: Sequence[Series],
    *,
    describe: str,
    x_label: str,
    y_label: str,
    width: int = 760,
    height: int = 330,
    log_x: bool = False,
    from_zero: bool = False,
) -> str:
    """Draws one chart.

    Args:
        series: what to draw, later ones above earlier ones.
        describe: the chart in a sentence, for readers who cannot see it.
        x_label: the text below the horizontal axis.
        y_label: the text above the vertical axis.
        width: the width in pixels.
        height: the height in pixels.
        log_x: whether the horizontal axis is logarithmic; all x must be positive.
        from_zero: whether the vertical axis begins at zero.
    """
    xs = [x for one in series for x in one.x]
    ys = [y for one in series for ends in (one.y, one.low or (), one.high or ()) for y in ends]
    ys = [y for y in ys if math.isfinite(y)]
    if not xs or not ys:
        return '<p class="quiet">There is nothing to draw.</p>'
    x_axis = _Axis.around(xs, count=max(3, width // 110), log=log_x)
    y_axis = _Axis.around([*ys, 0.0] if from_zero else ys, count=5)
    left = 14 + 8 * max(len(text) for text in y_axis.labels)
    # Half of the last label is to the right of the axis.
    top, right, bottom = 30, max(18, 4 * len(x_axis.labels[-1])), 46
    to_x = x_axis.scale(left, width - right)
    to_y = y_axis.scale(height - bottom, top)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escaped(describe)}" xmlns="http://www.w3.org/2000/svg">',
        f'<text x="0" y="14" fill="{_INK}">{escaped(y_label)}</text>',
    ]
    for value, label in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = to_y(value)
        parts.append(
            f'<path d="M{left} {y:.1f}H{width - right}" stroke="{_FAINT}"/>'
            f'<text x="{left - 7}" y="{y + 4:.1f}" text-anchor="end" fill="{_INK}">{label}</text>'
        )
    for value, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = to_x(value)
        parts.append(
            f'<path d="M{x:.1f} {height - bottom}v5" stroke="{_INK}"/>'
            f'<text x="{x:.1f}" y="{height - bottom + 19}" text-anchor="middle" fill="{_INK}">'
            f"{label}</text>"
        )
    parts.append(
        f'<path d="M{left} {height - bottom}H{width - right}" stroke="{_INK}"/>'
        f'<text x="{(left + width - right) / 2:.0f}" y="{height - 6}" text-anchor="middle" '
        f'fill="{_INK}">{escaped(x_label)}</text>'
    )
    for one in series:
        parts += _drawn(one, to_x, to_y, markers_every=math.ceil(len(one.x) / (width // 60)))
        parts += _named(one, to_x, to_y, middle=(left + width - right) / 2)
    return "".join((*parts, "</svg>"))


def bars(
    rows: Sequence[tuple[str, float, float, float]], *, describe: str, x_label: str, width: int
) -> str:
    """Draws one line per name: a value, and a bar between two ends.

    Args:
        rows: name, value, and the ends of the bar.
        describe: the chart in a sentence, for readers who cannot see it.
        x_label: the text below the horizontal axis.
        width: the width in pixels.
    """
    axis = _Axis.around([0.0, *(x for _, *ends in rows for x in ends)], count=max(3, width // 130))
    longest = max(8, width // 19)
    names = [shortened(name, longest) for name, *_ in rows]
    left = 14 + 8 * max(map(len, names))
    right = max(18, 4 * len(axis.labels[-1]))
    height = 24 * len(rows) + 60
    bottom = height - 46
    to_x = axis.scale(left, width - right)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escaped(describe)}" xmlns="http://www.w3.org/2000/svg">'
    ]
    for value, label in zip(axis.ticks, axis.labels, strict=True):
        x = to_x(value)
        stroke = _INK if value == 0 else _FAINT
        parts.append(
            f'<path d="M{x:.1f} 6V{bottom}" stroke="{stroke}"/><text x="{x:.1f}" y="{bottom + 19}" '
            f'text-anchor="middle" fill="{_INK}">{label}</text>'
        )
    for place, (name, (_, value, low, high)) in enumerate(zip(names, rows, strict=True)):
        y = 20 + 24 * place
        parts.append(
            f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" fill="{_INK}">'
            f"{escaped(name)}</text>"
            f'<path d="M{to_x(low):.1f} {y}H{to_x(high):.1f}" stroke="{PALETTE[2]}" '
            f'stroke-width="3"/>{marker(2, to_x(value), y)}'
        )
    parts.append(
        f'<text x="{(left + width - right) / 2:.0f}" y="{height - 6}" text-anchor="middle" '
        f'fill="{_INK}">{escaped(x_label)}</text></svg>'
    )
    return "".join(parts)


def shortened(text: str, longest: int) -> str:
    """Returns text without its middle if it is too long: a name's end may be what it differs in."""
    if len(text) <= longest:
        return text
    end = (longest - 1) // 2
    return f"{text[: longest - 1 - end]}…{text[len(text) - end :]}"


def _drawn(one: Series, to_x, to_y, markers_every: int) -> list[str]:
    points = [
        (to_x(x), to_y(y), index)
        for index, (x, y) in enumerate(zip(one.x, one.y, strict=True))
        if math.isfinite(y)
    ]
    parts = []
    if one.low is not None and one.high is not None:
        ends = [(x, to_y(one.low[i]), to_y(one.high[i])) for x, _, i in points]
        ends = [end for end in ends if all(map(math.isfinite, end))]
        if one.band and len(ends) > 1:
            there = "L".join(f"{x:.1f} {low:.1f}" for x, low, _ in ends)
            back = "L".join(f"{x:.1f} {high:.1f}" for x, _, high in reversed(ends))
            parts.append(f'<path d="M{there}L{back}Z" fill="{one.colour}" opacity=".22"/>')
        elif not one.band:
            bars = "".join(f"M{x:.1f} {low:.1f}V{high:.1f}" for x, low, high in ends)
            parts.append(f'<path d="{bars}" stroke="{one.colour}" stroke-width="2"/>')
    if len(points) > 1:
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in points)
        dashes = f' stroke-dasharray="{one.dashes}"' if one.dashes else ""
        parts.append(
            f'<path d="M{line}" fill="none" stroke="{one.colour}" stroke-width="2.4"{dashes}/>'
        )
    if one.markers:
        parts += [
            marker(one.look, x, y)
            for place, (x, y, _) in enumerate(points)
            if place % markers_every == 0 or place == len(points) - 1
        ]
    return parts


def _named(one: Series, to_x, to_y, middle: float) -> list[str]:
    """Writes the names of the points, each on the side that has room."""
    parts = []
    for x, y, name in zip(one.x, one.y, one.names or [""] * len(one.x), strict=True):
        if name and math.isfinite(y):
            side, anchor = (7, "start") if to_x(x) < middle else (-7, "end")
            parts.append(
                f'<text x="{to_x(x) + side:.1f}" y="{to_y(y) - 7:.1f}" font-size="11" '
                f'text-anchor="{anchor}" fill="{_INK}">{escaped(name)}</text>'
            )
    return parts


def marker(look: int, x: float, y: float) -> str:
    """Draws a small square, triangle, circle, diamond, downward triangle or cross."""
    shapes = (
        "M-4.5 -4.5h9v9h-9Z",
        "M0 -5.5L5.2 4H-5.2Z",
        "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0",
        "M0 -6L6 0L0 6L-6 0Z",
        "M0 5.5L5.2 -4H-5.2Z",
        "M-2 -6h4v4h4v4h-4v4h-4v-4h-4v-4h4Z",
    )
    return (
        f'<path transform="translate({x:.1f} {y:.1f})" d="{shapes[look % len(shapes)]}" '
        f'fill="{PALETTE[look % len(PALETTE)]}" stroke="#fff"/>'
    )


def legend(series: Sequence[Series]) -> str:
    """Lists the names of the series, each with its line and marker."""
    items = []
    for one in series:
        dashes = f' stroke-dasharray="{one.dashes}"' if one.dashes else ""
        point = marker(one.look, 17, 8) if one.markers else ""
        items.append(
            '<li><svg width="34" height="16" viewBox="0 0 34 16" aria-hidden="true">'
            f'<path d="M1 8H33" stroke="{one.colour}" stroke-width="2.4"{dashes}/>'
            f"{point}</svg><span>{escaped(one.label)}</span></li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


@dataclasses.dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], count: int, log: bool = False) -> "_Axis":
        low, high = min(values), max(values)
        if log:
            low, high = low / 1.3, high * 1.3
            ticks = [
                m * 10.0**e
                for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
                for m in (1, 2, 5)
            ]
            ticks = [tick for tick in ticks if low <= tick <= high]
            while len(ticks) > count:
                ticks = ticks[::2]
            return cls(low, high, tuple(ticks), tuple(f"{tick:g}" for tick in ticks), log=True)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            pad = abs(low) / 10 or 1.0
            low, high = low - pad, high + pad
        # The step is 1, 2 or 5 times a power of ten, the least that gives few enough ticks.
        rough = (high - low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = tuple(step * i for i in range(first, last + 1))
        digits = max(0, -math.floor(math.log10(step)))
        largest = max(abs(first), abs(last)) * step
        plain = 1e-4 < largest < 1e7
        labels = tuple(f"{t:,.{digits}f}" if plain else f"{t:.3g}" for t in ticks)
        return cls(ticks[0], ticks[-1], ticks, labels)

    def scale(self, start: float, stop: float):
        """Maps the axis's range onto pixels."""
        f = math.log if self.log else float
        low, high = f(self.low), f(self.high)
        return lambda value: start + (f(value) - low) / (high - low) * (stop - start)
