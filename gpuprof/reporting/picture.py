"""Writes charts as SVG or PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpuprof.errors import InputError, UnavailableError, install_hint, refuse_unwritable
from gpuprof.reporting.chart import Chart
from gpuprof.reporting.svg import standalone

_ZOOM = 2.0  # of PNGs, so that they are sharp in print


def write_picture(charts: Chart | Sequence[Chart], path: Path, columns: int = 1) -> None:
    """Write a chart, or several in so many columns, in the format that the name ends in, ``.svg`` or ``.png``.

    Raises `InputError` for another ending, or a file that cannot be written; `UnavailableError` for a PNG without
    resvg-py.
    """
    svg = standalone([charts] if isinstance(charts, Chart) else charts, "light", columns)
    if path.suffix == ".svg":
        content = svg.encode()
    elif path.suffix == ".png":
        content = _png(svg)
    else:
        raise InputError(f"a picture is .svg or .png but got {path.name!r}", "name it so")
    with refuse_unwritable(path):
        path.write_bytes(content)


def _png(svg: str) -> bytes:
    try:
        import resvg_py
    except ImportError:
        raise UnavailableError("a PNG needs resvg-py", f"{install_hint('report')}, or write an .svg") from None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=_ZOOM))
