"""Colours: the eight of Okabe and Ito, which people with any colour vision tell apart, fitted to two backgrounds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: Yellow is not seen on white and black not on black: there they are grey and white.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b", "#000000")
DARK = ("#5ab0e8", "#ff8a3d", "#2fc79b", "#e79cc6", "#f0b93a", "#8fd0f5", "#b4b4b4", "#ffffff")
COLORS = len(LIGHT)

THEMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "light": {"paper": "#ffffff", "ink": "#1b1f24", "faint": "#57606a", "grid": "#e3e6ea"}
        | {f"c{i}": color for i, color in enumerate(LIGHT)},
        "dark": {"paper": "#14171c", "ink": "#e8eaed", "faint": "#a9b1ba", "grid": "#2c323a"}
        | {f"c{i}": color for i, color in enumerate(DARK)},
    }
)

_TEXT = "font-family:system-ui,'Segoe UI','DejaVu Sans',Arial,sans-serif;font-size:12px"


def style(values: Mapping[str, str]) -> str:
    """Return the CSS of the classes that charts use; ``values`` has a colour, or a CSS variable, for each name."""
    rules = [
        f".ink{{fill:{values['ink']};{_TEXT}}}",
        f".faint{{fill:{values['faint']};{_TEXT}}}",
        f".title{{fill:{values['ink']};{_TEXT};font-size:14px;font-weight:600}}",
        f".grid{{stroke:{values['grid']};stroke-width:1}}",
        f".axis{{stroke:{values['faint']};stroke-width:1}}",
        f".frame{{fill:none;stroke:{values['faint']};stroke-width:1}}",
        f".strip{{fill:{values['ink']};fill-opacity:.1;stroke:{values['ink']};stroke-width:1}}",
        ".area{fill:none;pointer-events:all}",
        f".inbox{{fill:{values['paper']};{_TEXT};font-size:11px}}.onbox{{fill:{values['ink']};{_TEXT};font-size:11px}}",
    ]
    for i in range(COLORS):
        rules.append(f".f{i}{{fill:{values[f'c{i}']}}}.s{i}{{stroke:{values[f'c{i}']};fill:none;stroke-width:2}}")
    return "".join(rules)


def variables() -> dict[str, str]:
    """Return a CSS variable for each colour, for pages that change with the theme."""
    return {name: f"var(--{name})" for name in THEMES["light"]}


def declarations(theme: str) -> str:
    """Return the CSS declarations of the variables in a theme."""
    return "".join(f"--{name}:{color};" for name, color in THEMES[theme].items())


def shade_of(color: int) -> float:
    """Return how much of its colour a box of the series of this number has: paler in each round of the palette."""
    return 0.7 ** (color // COLORS)
