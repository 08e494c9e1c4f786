"""A badge per backend: the answer in two words, as an SVG that a README can show."""

from __future__ import annotations

from io import StringIO

import drawsvg

from ci.page.answer import answers
from ci.page.history import History

COLOURS = {"yes": "#116329", "partly": "#7a5200", "no": "#a40e26", "unknown": "#57606a"}
WORDS = {"yes": "correct", "partly": "known defects only", "no": "fails", "unknown": "not known"}
LETTER = 6.6
"""Width of a letter at 11 px, in px; fonts differ, and the text is stretched to it."""


def badges(history: History) -> dict[str, str]:
    """File name -> SVG."""
    return {f"badge-{each.backend}.svg": _badge(f"ZeRO on {each.backend}", each.word) for each in answers(history)}


def _badge(label: str, word: str) -> str:
    left, right = (round(len(text) * LETTER + 12) for text in (label, WORDS[word]))
    drawing = drawsvg.Drawing(left + right, 20)
    drawing.append_title(f"{label}: {WORDS[word]}")
    drawing.append(drawsvg.Rectangle(0, 0, left, 20, fill="#30363d"))
    drawing.append(drawsvg.Rectangle(left, 0, right, 20, fill=COLOURS[word]))
    for text, middle, width in ((label, left / 2, left), (WORDS[word], left + right / 2, right)):
        drawing.append(
            drawsvg.Text(
                text,
                11,
                middle,
                14,
                fill="#fff",
                text_anchor="middle",
                font_family="Verdana,DejaVu Sans,sans-serif",
                textLength=width - 12,
            )
        )
    stream = StringIO()
    drawing.as_svg(stream, skip_js=True, skip_css=True)
    return stream.getvalue()
