"""Prints the verdicts of ``load`` and ``simulate``: a table with a line per model, then a sentence per model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import Column, ColumnRole, Format, print_rows, print_text
from gpuprof.domain.number_format import number_formatter

if TYPE_CHECKING:
    from gpuprof.pipeline.verdicts import SloVerdict

VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Print all tables and remarks.")]
NoFailOption = Annotated[bool, typer.Option("--no-fail", help="End with exit code 0 when an SLO was missed, too.")]

_VERDICTS = (
    Column("model", "model", right=False, role=ColumnRole.SUBJECT),
    Column("verdict", "SLO", right=False, role=ColumnRole.SUBJECT),
    Column("in_time_pct", "in time %", number_formatter(4)),
    Column("latency_ms", "p99 ms", number_formatter()),
    Column("predicted_ms", "predicted", number_formatter(), joined=True),
    Column("slo_ms", "SLO ms", number_formatter()),
    Column("rate_rps", "sent/s", number_formatter(4)),
    Column("goodput_rps", "goodput/s", number_formatter(4)),
)


def show_verdicts(verdicts: Sequence[SloVerdict]) -> None:
    """Print the verdicts; predictions only where there are any."""
    print_rows([verdict.record() for verdict in verdicts], _VERDICTS, Format.TABLE)
    for verdict in verdicts:
        if verdict.reason:
            print_text(f"{verdict.model}: {verdict.reason}")
