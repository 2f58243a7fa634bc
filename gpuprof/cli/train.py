"""``gpuprof train``: fit the regressors that estimate unprofiled models."""

from __future__ import annotations

from gpuprof.cli.output import Format, make_columns, print_rows, say_note, show_progress
from gpuprof.pipeline.train import TrainOptions

_COLUMNS = make_columns(
    "device architectures ops points:models_×_batches latency_factor:latency_within_×/÷ "
    "memory_factor:memory_within_×/÷ creq_factor:Creq_within_×/÷",
)


def train(options: TrainOptions, chosen: Format = Format.TABLE) -> None:
    """Fit regressors to the measured ops and models of a device; estimate uses them from then on."""
    from gpuprof.pipeline.train import train as fit

    with show_progress() as show:
        result = fit(options, progress=show)
    print_rows(result.rows(), _COLUMNS, chosen)
    say_note(*result.notes)
