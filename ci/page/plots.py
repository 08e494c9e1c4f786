"""Plots over steps as inline SVG: small, the same bytes for the same numbers, no style and no script inside.

drawsvg writes the shapes; colours come from the page's style sheet by class (`s0`, `s1`, ...), so that a plot follows
dark mode and a strict Content-Security-Policy. It does not escape attributes: only our own words go into those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

import drawsvg

from ci.shown import Number, finite

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 24
"""Room for the labels of the axes."""
LABELS = 6
"""At most so many on the axis."""
COLOURS = 6


@dataclass(frozen=True)
class Series:
    """A line: its name in the legend, and a value per step. dashed: what is right, against what was found."""

    name: str
    values: tuple[Number, ...]
    dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """A plot with its words: `missing` are the values that a logarithmic axis cannot show."""

    title: str
    svg: str
    legend: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]


def draw(title: str, series: Sequence[Series], limit: float | None = None, along: str = "step") -> Plot | None:
    """Values over steps, or over what `along` says, on a logarithmic axis; None where no value can be shown on one.

    limit: the values are errors, and this is what is allowed: a line to mark. An error of 0 is not missing.
    """
    points = [_positive(each.values) for each in series]
    found = [value for values in points for value in values if value is not None]
    if not found:
        return None
    if limit is not None:
        found.append(limit)
    low, high = _decades(min(found), max(found))
    steps = max(len(each.values) for each in series)
    drawing = drawsvg.Drawing(WIDTH, HEIGHT)

    def y(value: float) -> float:
        share = (math.log10(value) - low) / (high - low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def x(position: int) -> float:
        return round(LEFT + (position + 0.5) * (WIDTH - LEFT - RIGHT) / steps, 1)

    grid = drawsvg.Path(class_="grid")
    labels = _labels(low, high)
    for value, _ in labels:
        grid.M(LEFT, y(value)).H(WIDTH - RIGHT)
    drawing.append(grid)
    for value, word in labels:
        drawing.append(drawsvg.Text(word, None, LEFT - 6, y(value) + 4, class_="y"))
    every = math.ceil(steps / 12)
    for position in range(0, steps, every):
        drawing.append(
            drawsvg.Text(
                f"{along} {position + 1}" if steps <= 6 else str(position + 1),
                None,
                x(position),
                HEIGHT - 6,
                class_="x",
            )
        )
    if limit is not None:
        drawing.append(drawsvg.Path(class_="limit").M(LEFT, y(limit)).H(WIDTH - RIGHT))
    legend = []
    for number, (each, shown) in enumerate(zip(series, points, strict=True)):
        kind = f"s{number % COLOURS}" + (" dashed" if each.dashed else "")
        legend.append((kind, each.name))
        line, dots = drawsvg.Path(class_=f"line {kind}"), drawsvg.Path(class_=f"dots {kind}")
        pen_down = False
        for position, point in enumerate(shown):
            if point is None:
                pen_down = False
                continue
            place = x(position), y(point)
            (line.L if pen_down else line.M)(*place)
            dots.M(*place).h(0)
            pen_down = True
        if any(point is not None for point in shown):
            drawing.append(line)
            drawing.append(dots)
    return Plot(title, _text(drawing), tuple(legend), () if limit is not None else tuple(_missing(series, along)))


def _positive(values: Sequence[Number]) -> list[float | None]:
    return [number if number is not None and number > 0 else None for number in map(finite, values)]


def _missing(series: Sequence[Series], along: str) -> list[str]:
    """What is not on the axis, in words."""
    said = []
    for each in series:
        absent: dict[str, list[str]] = {}
        for position, value in enumerate(each.values, 1):
            number = finite(value)
            if number is None or number <= 0:
                word = "None" if value is None else str(value) if number is None else f"{number:.6g}"
                absent.setdefault(word, []).append(str(position))
        said += [f"{each.name}: {word} in {along} {' '.join(steps)}" for word, steps in absent.items()]
    return said


def _decades(smallest: float, largest: float) -> tuple[float, float]:
    """The axis' ends as powers of ten: at least one decade, so that noise does not look like a step."""
    low, high = math.log10(smallest), math.log10(largest)
    if high - low < 1:
        middle = (low + high) / 2
        return middle - 0.55, middle + 0.55
    room = 0.06 * (high - low)
    return low - room, high + room


def _labels(low: float, high: float) -> list[tuple[float, str]]:
    """Round values between the ends: powers of ten where there are enough, else 1, 2 and 5 times them."""
    powers = range(math.ceil(low), math.floor(high) + 1)
    if len(powers) >= 3:
        every = math.ceil(len(powers) / LABELS)
        return [(10.0**power, _word(10.0**power)) for power in powers if (power - powers[0]) % every == 0]
    fine = [factor * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for factor in (1, 2, 5)]
    return [(value, _word(value)) for value in fine if low <= math.log10(value) <= high]


def _word(value: float) -> str:
    return f"{value:g}" if 1e-3 <= value < 1e6 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _text(drawing: drawsvg.Drawing) -> str:
    stream = StringIO()
    drawing.as_svg(stream, skip_js=True, skip_css=True)
    return stream.getvalue().partition("?>")[2].replace("\n", "").replace("<defs></defs>", "")
