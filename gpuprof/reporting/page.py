"""One self-contained HTML page, whose content security policy forbids it to load anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from gpuprof.reporting.chart import Chart
from gpuprof.reporting.document import Section, Table
from gpuprof.reporting.palette import declarations, style, variables
from gpuprof.reporting.svg import inline

#: A report can be mailed and opened from a disk: nothing in it can send anything, whatever a model is called.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

#: Pixels of a drawing in a window of 400, and of one that needs the width of the page.
_NARROW, _BROAD = 370, 760

_CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,'Segoe UI','DejaVu Sans',Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px}
header{display:flex;justify-content:space-between;align-items:center;gap:16px}
h1{font-size:24px;margin:0}h2{font-size:19px;margin:36px 0 4px;border-top:1px solid var(--grid);padding-top:20px}
p{color:var(--faint);margin:4px 0 12px}
nav{columns:12em;margin-top:10px}
nav a{display:block;color:var(--c0);overflow-wrap:anywhere;line-height:1.7}
td a{color:var(--c0)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(520px,100%),1fr));gap:18px;align-items:start}
figure{margin:0;max-width:760px;border:1px solid var(--grid);border-radius:8px;padding:8px}
.broad{grid-column:1/-1;max-width:none}
figcaption{color:var(--faint);font-size:13px;padding:0 6px 4px}
svg{display:block;width:100%;height:auto}
.key{cursor:pointer}.key:focus-visible .area{stroke:var(--ink)}
.key[aria-pressed=false]{opacity:.35}.key[aria-pressed=false] text{text-decoration:line-through}
.off{display:none}.dim{opacity:.12}
.tag{font-size:12px;font-weight:400;border:1px solid var(--faint);border-radius:9px;padding:1px 8px;margin-left:8px;
white-space:nowrap;vertical-align:middle}
details{margin-top:14px;border-top:1px solid var(--grid);padding-top:10px}
summary{cursor:pointer;font-size:17px;font-weight:600}
[data-tip]:hover{opacity:1;stroke:var(--ink);stroke-width:1.5}
table{border-collapse:collapse;margin:14px 0;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
th,td{padding:4px 14px 4px 0;text-align:right;border-bottom:1px solid var(--grid)}
th:first-child,td:first-child,.text{text-align:left}
button{background:var(--paper);color:var(--ink);border:1px solid var(--faint);border-radius:6px;padding:5px 12px;
font:inherit;cursor:pointer}
#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--paper);border-radius:6px;padding:5px 9px;
font-size:13px;max-width:420px;visibility:hidden;z-index:9}
.narrow{display:none}
@media(max-width:600px){main{padding:12px}figure{padding:2px}.wide{display:none}.narrow{display:block}
h1{font-size:20px}#tip{max-width:92vw}thead{display:none}tbody{display:block}
tr{display:grid;grid-template-columns:repeat(auto-fill,minmax(84px,1fr));gap:4px 10px;padding:8px 0;
border-bottom:1px solid var(--grid)}
td,td:first-child{display:block;border:0;padding:0;text-align:left;overflow-wrap:anywhere}
td:first-child{grid-column:1/-1;font-weight:600}
td::before{content:attr(data-heading);display:block;color:var(--faint);font-size:12px;font-weight:400}}
@media print{button{display:none}}
"""

_HINT = (
    "<p>Click a key of a legend to hide its series or show it again; with Shift, to show it alone. "
    "Point at a mark for its figures.</p>"
)

#: Without it the page shows everything all the same: tips are <title> elements, which the script takes out so that
#: the browser's own do not stand beside its.
_SCRIPT = """
(function () {
  "use strict";
  var tip = document.getElementById("tip");
  document.querySelectorAll("[data-tip] > title").forEach(function (title) { title.remove(); });
  document.addEventListener("pointermove", function (event) {
    var mark = event.target.closest ? event.target.closest("[data-tip]") : null;
    tip.style.visibility = mark ? "visible" : "hidden";
    if (!mark) { return; }
    tip.textContent = mark.getAttribute("data-tip");
    var left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    var above = event.clientY - tip.offsetHeight - 10;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = (above > 4 ? above : event.clientY + 18) + "px";
  });
  function each(root, what, act) { Array.prototype.forEach.call(root.querySelectorAll(what), act); }
  function marks(key, act) { each(key.ownerSVGElement, '[data-series="' + key.dataset.key + '"]', act); }
  function press(key, on) {
    key.setAttribute("aria-pressed", on);
    marks(key, function (mark) { mark.classList.toggle("off", !on); });
  }
  function choose(key, alone) {
    var keys = key.ownerSVGElement.querySelectorAll(".key");
    var others = Array.prototype.filter.call(keys, function (one) { return one !== key; });
    if (!alone) { press(key, key.getAttribute("aria-pressed") !== "true"); return; }
    var only = others.every(function (one) { return one.getAttribute("aria-pressed") !== "true"; });
    others.forEach(function (one) { press(one, only); });
    press(key, true);
  }
  each(document, ".key", function (key) {
    key.addEventListener("click", function (event) { choose(key, event.shiftKey || event.altKey); });
    key.addEventListener("keydown", function (event) {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(key, event.shiftKey); }
    });
    function dim(on) {
      each(key.ownerSVGElement, "[data-series]", function (mark) {
        mark.classList.toggle("dim", on && mark.dataset.series !== key.dataset.key);
      });
    }
    key.addEventListener("pointerenter", function () { dim(true); });
    key.addEventListener("pointerleave", function () { dim(false); });
  });
  function unfold() {
    var part = location.hash && document.getElementById(location.hash.slice(1));
    if (part && part.tagName === "DETAILS") { part.open = true; part.scrollIntoView(); }
  }
  window.addEventListener("hashchange", unfold);
  unfold();
  document.getElementById("theme").addEventListener("click", function () {
    var root = document.documentElement;
    var dark = root.dataset.theme ? root.dataset.theme === "dark" :
      window.matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
"""


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the page; light or dark as the reader's system is, until the button says otherwise."""
    links = "".join(f'<a href="#s{i}">{escape(one.title)}</a>' for i, one in enumerate(sections))
    anchors = {one.title: f"s{i}" for i, one in enumerate(sections)}
    body = "".join(_render_section(i, one, anchors) for i, one in enumerate(sections))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<style>{_render_themes()}{style(variables())}{_CSS}</style></head><body><main>"
        f'<header><h1>{escape(title)}</h1><button id="theme" type="button">light / dark</button></header>'
        f"<nav>{links}</nav>{_HINT if any(len(chart.legend()) > 1 for one in sections for chart in one.charts) else ''}"
        f'{body}</main><div id="tip" role="status"></div><script>{_SCRIPT}</script></body></html>\n'
    )


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
    kind = ' class="broad"' if chart.width > _BROAD else ""
    note = f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else ""
    return f"<figure{kind}>{_draw_twice(chart)}{note}</figure>"


def _draw_twice(chart: Chart) -> str:
    """Return a chart for wide windows and one for telephones, of which a page shows the one that fits.

    Shrunk to a telephone, letters of the wide one could not be read.
    """
    if chart.width <= _NARROW:
        return inline(chart)
    return inline(chart, "wide") + inline(replace(chart, width=_NARROW), "narrow")


def _render_table(table: Table, anchors: Mapping[str, str]) -> str:
    """Return a table whose first cells lead to the parts of the page that are called so.

    Each cell carries its heading: a narrow window shows a row as a block of its own, cells below one another.
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
    """Return whether a column holds numbers, which stand below one another by their last digit."""
    return all(cell == "–" or (cell.lstrip("-–")[:1].isdigit() and " " not in cell) for cell in cells)


def _render_cell(text: str, anchors: Mapping[str, str]) -> str:
    return f'<a href="#{anchors[text]}">{escape(text)}</a>' if text in anchors else escape(text)
