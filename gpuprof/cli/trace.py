"""``gpuprof trace``: make traces of requests, and look at them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import typer

import gpuprof
from gpuprof.cli.options import Verbs, output_option
from gpuprof.cli.output import Format, print_rows, say_note
from gpuprof.domain.plural import count_of
from gpuprof.domain.table import make_columns
from gpuprof.domain.validation import Positive
from gpuprof.errors import InputError
from gpuprof.pipeline.settings import ARRIVALS, Names, Rates, Settings, option

app = Verbs(help="Make and inspect request traces.")
#: Looks like a space, at which no line is broken.
_BLANK = "\u2800"
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = make_columns(
    "model requests rate_rps:requests/s peak_rps gap_scv:SCV_of_gaps longest_gap_s sparkline:over_time"
)


class ArrivalProcessOptions(Settings):
    """Arrival process of the requests."""

    title: ClassVar[str] = "Arrival process"

    rates_rps: Rates = option({}, "Rate as MODEL=REQUESTS_PER_S; may be repeated.", "--rate", repeated=True)
    slo_file: Path | None = option(None, "CSV file of demands that names models and rates.")
    arrivals: str = option("poisson", ARRIVALS)
    duration_s: Positive = option(60.0, "Length of the trace: 60s, 5m, 1d.", "--duration", unit="s")
    azure: Path | None = option(None, "File of a day of Azure Functions (2019 or 2021) to take the requests from.")
    models: Names = option((), "Names for the busiest functions of the day, the busiest first.")

    def list_rates(self) -> dict[str, float]:
        """Return requests per second by model. Raises `InputError` when no rate is given."""
        from gpuprof.domain.demand import name_demand, read_demands

        demands = () if self.slo_file is None else read_demands(self.slo_file)
        rates = {name_demand(demand).model: demand.rate_rps for demand in demands} | dict(self.rates_rps)
        if not rates:
            raise InputError("nothing says what to record", "give --rate MODEL=REQUESTS_PER_S, or --slo-file")
        if "" in rates and len(rates) > 1:
            raise InputError("a rate without a model cannot stand beside others", "write MODEL=REQUESTS_PER_S")
        return rates


@app.command(short_help="Write a trace.")
def make(
    process: ArrivalProcessOptions,
    output: Annotated[Path, output_option("File to write the trace to, CSV.")] = Path("trace.csv"),
    seed: Annotated[int, typer.Option(help="Seed of the trace.", min=0)] = 0,
) -> None:
    """Write a trace of an arrival process, or of a recorded day of Azure Functions."""
    if process.models and process.azure is None:
        raise InputError("--models names functions of --azure", "name models by --rate MODEL=REQUESTS_PER_S")
    if process.azure is None:
        rates_rps, duration_s = process.list_rates(), process.duration_s
        result = gpuprof.record_trace(rates_rps, arrivals=process.arrivals, duration_s=duration_s, seed=seed)
    elif process.rates_rps or process.slo_file or not process.models:
        raise InputError("--azure takes its requests from the file", "name the models with --models, and no rates")
    else:
        result = gpuprof.read_azure_trace(process.azure, process.models, seed=seed)
    result.write(output)
    trace = result.trace
    requests = f"{count_of(trace.requests, 'request')} of {count_of(len(trace.times), 'model')}"
    say_note(f"wrote {requests} over {trace.duration_s:g} s to {output}")


@app.command(short_help="Print the rates of a trace.")
def show(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="CSV file of time_s,model.")],
    chosen: Format = Format.TABLE,
) -> None:
    """Print rate, peak, burstiness and gaps of each model, and its rate over time."""
    result = gpuprof.show_trace(trace_file)
    if chosen is not Format.TABLE:
        print_rows(result.rows(), _COLUMNS[:-1], chosen)
        return
    rows = [{**row, "sparkline": _draw_sparkline(row["counts"]).replace(" ", _BLANK)} for row in result.rows()]
    print_rows(rows, _COLUMNS, chosen)


def _draw_sparkline(values: Sequence[float]) -> str:
    """Return a character for each value, from zero (lowest bar) to the largest; a zero shows as a blank."""
    top = max(values, default=0.0)
    return "".join(" " if value <= 0 else _BARS[min(7, int(8 * value / top))] for value in values)
