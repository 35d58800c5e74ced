"""Charts that are drawn on the spot: bars, lines and tables of three columns, 84 pixels a side.

A chart of 84 by 84 pixels has nine placeholder tokens in a model whose tokens are 28 pixels wide.
"""

from __future__ import annotations

import io
from functools import cache
from typing import Any, Final, Literal, TypeAlias, TypedDict

from PIL import Image, ImageDraw, ImageFont

Form: TypeAlias = Literal["bars", "line", "table"]

SIDE: Final = 84
FORMS: Final[tuple[Form, ...]] = ("bars", "line", "table")
LARGEST: Final = 9
"""Largest value of a column; the smallest is 1."""
_COLUMN: Final = SIDE // 3
_FLOOR: Final = 70
"""The y of value 0."""
_UNIT: Final = 5
"""Height of 1."""
_MARKED: Final = (3, 6, 9)
"""Values with a line and a number, from which bars and points are read."""


class Chart(TypedDict):
    """What a chart shows, and its style."""

    form: Form
    title: str
    columns: dict[str, int]
    """Name of a column → its value, from left to right."""
    colour: str
    """Colour of bars, line or cells, as Pillow names it."""
    background: str


def draw(chart: Chart) -> bytes:
    """Return the chart as a PNG file; equal charts give equal files."""
    image = Image.new("RGB", (SIDE, SIDE), chart["background"])
    pen = ImageDraw.Draw(image)
    pen.text((4, 2), chart["title"], fill="black", font=_font(11))
    middles = [_COLUMN // 2 + _COLUMN * number for number in range(len(chart["columns"]))]
    for x, name in zip(middles, chart["columns"], strict=True):
        pen.text((x, _FLOOR + 1), name, fill="black", font=_font(11), anchor="ma")
    if chart["form"] != "table":
        _draw_scale(pen)
    values = list(chart["columns"].values())
    _DRAW[chart["form"]](pen, list(zip(middles, values, strict=True)), chart["colour"])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _draw_scale(pen: ImageDraw.ImageDraw) -> None:
    for value in _MARKED:
        y = _FLOOR - _UNIT * value
        pen.line((6, y, SIDE, y), fill="silver")
        pen.text((0, y), str(value), fill="black", font=_font(8), anchor="lm")


def _draw_bars(pen: ImageDraw.ImageDraw, points: list[tuple[int, int]], colour: str) -> None:
    for x, value in points:
        pen.rectangle((x - 8, _FLOOR - _UNIT * value, x + 8, _FLOOR), fill=colour)


def _draw_line(pen: ImageDraw.ImageDraw, points: list[tuple[int, int]], colour: str) -> None:
    heights = [(x, _FLOOR - _UNIT * value) for x, value in points]
    pen.line(heights, fill=colour, width=2)
    for x, y in heights:
        pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)


def _draw_table(pen: ImageDraw.ImageDraw, points: list[tuple[int, int]], colour: str) -> None:
    for x, value in points:
        pen.rectangle((x - 13, 32, x + 13, _FLOOR - 2), outline=colour, width=2)
        pen.text((x, 50), str(value), fill=colour, font=_font(16), anchor="mm")


_DRAW: Final[dict[Form, Any]] = {"bars": _draw_bars, "line": _draw_line, "table": _draw_table}


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)  # the font that Pillow brings
