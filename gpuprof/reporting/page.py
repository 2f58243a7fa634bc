"""One self-contained HTML page, whose content security policy forbids it to load other resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from gpuprof.reporting.chart import Chart
from gpuprof.reporting.document import Section, Table
from gpuprof.reporting.palette import declarations, style, variables
from gpuprof.reporting.svg import inline

#: Reports are mailed and opened from a disk: no content, whatever a model's name, may send data.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_HINT = (
    "<p>Click a key of a legend to hide its series or show it again; with Shift, to show it alone. "
    "Point at a mark for its figures.</p>"
)


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the page, light or dark by the reader's system until the button is used."""
    links = "".join(f'<a href="#s{i}">{escape(section.title)}</a>' for i, section in enumerate(sections))
    anchors = {section.title: f"s{i}" for i, section in enumerate(sections)}
    body = "".join(_render_section(i, section, anchors) for i, section in enumerate(sections))
    hint = _HINT if any(len(chart.legend()) > 1 for section in sections for chart in section.charts) else ""
    # The page is complete without its script. Tooltips are <title> elements; the script removes them, so that the
    # browser's own tooltips do not appear twice.
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<style>{_render_themes()}{style(variables())}\n{_read_part('page.css')}</style></head><body><main>"
        f'<header><h1>{escape(title)}</h1><button id="theme" type="button">light / dark</button></header>'
        f"<nav>{links}</nav>{hint}"
        f'{body}</main><div id="tip" role="status"></div><script>\n{_read_part("page.js")}</script></body></html>\n'
    )


def _read_part(name: str) -> str:
    return (files("gpuprof") / "reporting" / name).read_text(encoding="utf-8")


def _render_themes() -> str:
    light, dark = declarations("light"), declarations("dark")
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media(prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=light]{{color-scheme:light;{light}}}:root[data-theme=dark]{{color-scheme:dark;{dark}}}"
    )


def _render_section(number: int, section: Section, anchors: Mapping[str, str]) -> str:
    figures = "".join(map(_render_figure, section.charts))
    table = "" if section.table is None else _render_table(section.table, anchors)
    tag = f'<span class="tag">{escape(section.source)}</span>' if section.source else ""
    text = f'<p>{escape(section.text)}</p>{table}<div class="charts">{figures}</div>'
    if section.is_folded:
        return f'<details id="s{number}"><summary>{escape(section.title)}{tag}</summary>{text}</details>'
    return f'<section id="s{number}"><h2>{escape(section.title)}{tag}</h2>{text}</section>'


def _render_figure(chart: Chart) -> str:
    note = f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else ""
    return f'<figure><div class="drawing">{inline(chart)}</div>{note}</figure>'


def _render_table(table: Table, anchors: Mapping[str, str]) -> str:
    """Return a table whose first cells link to the sections of the same name.

    Each cell carries its heading: a narrow window shows each row as a block, with its cells below one another.
    """
    sides = ["" if _has_numbers(cells) else ' class="text"' for cells in zip(*table.rows, strict=True)]
    sides = sides or [""] * len(table.headings)
    head = "".join(f"<th{side}>{escape(heading)}</th>" for side, heading in zip(sides, table.headings, strict=True))
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td{side} data-heading="{escape(heading)}">{_render_cell(cell, {} if place else anchors)}</td>'
            for place, (side, heading, cell) in enumerate(zip(sides, table.headings, row, strict=True))
        )
        + "</tr>"
        for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _has_numbers(cells: Sequence[str]) -> bool:
    """Return whether a column holds numbers, which are aligned at their last digit."""
    return all(cell == "–" or (cell.lstrip("-–")[:1].isdigit() and " " not in cell) for cell in cells)


def _render_cell(text: str, anchors: Mapping[str, str]) -> str:
    return f'<a href="#{anchors[text]}">{escape(text)}</a>' if text in anchors else escape(text)
