"""A plot of predicted against measured figures, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from gpuprof.estimators.learned.evaluation import Prediction

_SIDE, _LEFT, _TOP, _GAP = 320, 70, 40, 60
_COLOURS = ("#1b6ca8", "#d1495b", "#3c8d5a", "#8a5fb0", "#c98b1b", "#4b4f58", "#2aa1a1", "#a34f1c")


def svg(predictions: Sequence[Prediction], panels: Sequence[tuple[str, str, str]]) -> str:
    """Return an SVG document with a panel, both axes logarithmic, for each (setting, quantity, predictor).

    The diagonal is a perfect prediction, the lines beside it are 10% off.
    """
    width = _LEFT + len(panels) * (_SIDE + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_TOP + _SIDE + 60}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    models = sorted({one.model for one in predictions})
    colour = {model: _COLOURS[i % len(_COLOURS)] for i, model in enumerate(models)}
    for number, panel in enumerate(panels):
        shown = [one for one in predictions if (one.setting, one.quantity, one.predictor) == panel]
        if shown:
            parts += _panel(shown, _LEFT + number * (_SIDE + _GAP), f"{panel[1]}: {panel[0]}, {panel[2]}", colour)
    return "\n".join([*parts, "</svg>", ""])


def _panel(shown: Sequence[Prediction], left: float, title: str, colour: dict[str, str]) -> list[str]:
    values = [value for one in shown for value in (one.measured, one.predicted) if value > 0.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    span = max(1, high - low)

    def at(value: float) -> float:
        return (math.log10(value) - low) / span * _SIDE

    bottom = _TOP + _SIDE
    parts = [
        f'<text x="{left}" y="{_TOP - 14}">{escape(title)}</text>',
        f'<rect x="{left}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#999"/>',
        *(_diagonal(left, bottom, factor, span) for factor in (1.0, 1.1, 1 / 1.1)),
    ]
    for power in range(low, high + 1):
        shift = (power - low) / span * _SIDE
        parts.append(f'<text x="{left + shift:.1f}" y="{bottom + 16}" text-anchor="middle">1e{power}</text>')
        parts.append(f'<text x="{left - 6}" y="{bottom - shift + 4:.1f}" text-anchor="end">1e{power}</text>')
    parts.append(f'<text x="{left + _SIDE / 2}" y="{bottom + 36}" text-anchor="middle">measured</text>')
    for one in shown:
        parts.append(
            f'<circle cx="{left + at(one.measured):.1f}" cy="{bottom - at(max(one.predicted, 1e-300)):.1f}" r="3" '
            f'fill="{colour[one.model]}" fill-opacity="0.6"><title>{escape(one.model)} batch {one.batch}: '
            f"measured {one.measured:.4g}, predicted {one.predicted:.4g}</title></circle>"
        )
    return parts


def _diagonal(left: float, bottom: float, factor: float, span: int) -> str:
    shift = math.log10(factor) / span * _SIDE
    dash = "" if factor == 1.0 else ' stroke-dasharray="4 4"'
    x1, x2 = left + max(0.0, -shift), left + _SIDE - max(0.0, shift)
    y1, y2 = bottom - max(0.0, shift), bottom - _SIDE + max(0.0, -shift)
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#555"{dash}/>'
