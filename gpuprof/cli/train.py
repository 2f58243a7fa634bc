"""``gpuprof train``: fit the regressors that estimate unprofiled models."""

from __future__ import annotations

from gpuprof.cli.output import Column, Format, print_rows, say_note, show_progress
from gpuprof.domain.number_format import number_formatter
from gpuprof.pipeline.train import TrainOptions

_COLUMNS = (
    Column("device", "device", right=False),
    Column("architectures", "architectures"),
    Column("ops", "ops"),
    Column("points", "models × batches"),
    Column("latency_factor", "latency within ×/÷", number_formatter(3)),
    Column("memory_factor", "memory within ×/÷", number_formatter(3)),
    Column("creq_factor", "Creq within ×/÷", number_formatter(3)),
)


def train(options: TrainOptions, chosen: Format = Format.TABLE) -> None:
    """Fit regressors to the measured ops and models of a device; estimate uses them from then on."""
    from gpuprof.pipeline.train import train as fit

    with show_progress() as show:
        result = fit(options, progress=show)
    print_rows(result.rows(), _COLUMNS, chosen)
    say_note(*result.notes)
