"""Writes charts as SVG or PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpuprof.domain.file_access import write_atomically
from gpuprof.errors import InputError, UnavailableError, install_hint, refuse_unwritable
from gpuprof.reporting.chart import Chart
from gpuprof.reporting.svg import standalone

_ZOOM = 2.0  # zoom of PNGs, for sharp prints


def check_picture(path: Path) -> None:
    """Check the file name of a picture before drawing.

    Raises `InputError` for an ending other than .svg and .png, or a missing folder.
    """
    if path.suffix not in (".svg", ".png"):
        raise InputError(f"a picture is .svg or .png but got {path.name!r}", "name it so")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: {path.parent} is no directory")


def write_picture(charts: Chart | Sequence[Chart], path: Path, columns: int = 1) -> None:
    """Write a chart, or several charts in ``columns``, in the format of the file's ending, ``.svg`` or ``.png``.

    Raises `InputError` like `check_picture`, and for a file that cannot be written; `UnavailableError` for a PNG
    without resvg-py.
    """
    check_picture(path)
    svg = standalone([charts] if isinstance(charts, Chart) else charts, "light", columns)
    content = svg.encode() if path.suffix == ".svg" else _png(svg)
    with refuse_unwritable(path):
        write_atomically(path, content)


def _png(svg: str) -> bytes:
    try:
        import resvg_py
    except ImportError:
        raise UnavailableError("a PNG needs resvg-py", f"{install_hint('report')}, or write an .svg") from None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=_ZOOM))
