"""``gpuprof trace``: make traces of requests, and look at them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import Column, CsvOption, Format, JsonOption, chosen_format, number, print_rows, say
from gpuprof.cli.verb_help import VerbCommand
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.simulator.trace import Trace

app = typer.Typer(no_args_is_help=True, help="Make traces of requests, and look at them.")
_COLUMNS = (
    Column("model", "model", right=False),
    Column("requests", "requests"),
    Column("rate_rps", "requests/s", number(4)),
    Column("peak_rps", "peak/s", number(4)),
    Column("gap_scv", "SCV of gaps", number()),
    Column("longest_gap_s", "longest gap s", number()),
    Column("sparkline", "over time", right=False),
)


@dataclass(frozen=True)
class Process:
    """By which process requests arrive."""

    rate: Annotated[list[str] | None, typer.Option(help="MODEL=REQUESTS_PER_S; may be repeated.")] = None
    slo_file: Annotated[Path | None, typer.Option(help="Models and rates of this slo.csv.")] = None
    arrivals: Annotated[
        str, typer.Option(help="constant, poisson, gamma:SCV, bursts:RATIO,BURST,CALM, diurnal:PEAK,PERIOD.")
    ] = "poisson"
    duration: Annotated[str, typer.Option(help="Length: 60s, 5m, 1d.")] = "60s"

    def trace(self, seed: int) -> Trace:
        """Return what it makes come.

        Raises
        ------
        InputError
            When nothing says what comes, or a rate, the process or the duration cannot be read.
        """
        from gpuprof.domain.arrival_text import parse_arrivals
        from gpuprof.domain.duration import parse_duration
        from gpuprof.simulator.trace import record

        processes = {model: parse_arrivals(self.arrivals, value) for model, value in self._rates_rps().items()}
        return record(processes, parse_duration(self.duration, "--duration"), seed)

    def _rates_rps(self) -> dict[str, float]:
        from gpuprof.domain.demand import read_demands
        from gpuprof.simulator.load import parse_rates

        rates, alone = parse_rates(self.rate or [])
        if self.slo_file is not None:
            rates = {demand.model: demand.rate_rps for demand in read_demands(self.slo_file)} | rates
        if alone is not None:
            rates[""] = alone
        if not rates:
            raise InputError("nothing says what to record", "give --rate MODEL=REQUESTS_PER_S, --slo-file or --azure")
        if "" in rates and len(rates) > 1:
            raise InputError("a rate without a model cannot stand beside others", "write MODEL=REQUESTS_PER_S")
        return rates


@dataclass(frozen=True)
class Day:
    """Which functions of a recorded day are taken instead."""

    azure: Annotated[Path | None, typer.Option(help="Instead: a file of Azure Functions, 2019 or 2021.")] = None
    models: Annotated[str | None, typer.Option(help="Names for its busiest functions, busiest first: a,b,c.")] = None
    functions: Annotated[int, typer.Option(help="Without names: how many functions.", min=1)] = 10

    def trace(self, path: Path, seed: int) -> Trace:
        """Return the requests of the busiest functions of ``path``.

        Raises
        ------
        InputError
            When the file cannot be read, or has fewer functions than names are given.
        """
        from gpuprof.simulator.azure import read_azure
        from gpuprof.simulator.trace import Trace

        names = self.models.split(",") if self.models else None
        trace = read_azure(path, len(names) if names else self.functions, seed)
        if names is None:
            return trace
        if len(trace.times) < len(names):
            raise InputError(
                f"{path} has {len(trace.times)} functions that are called but {len(names)} names are given"
            )
        return Trace(dict(zip(names, trace.times.values(), strict=True)), trace.duration_s)


@app.command(cls=VerbCommand)
@with_groups
def make(
    process: Process,
    day: Day,
    output: Annotated[Path, typer.Option("-o", "--output", help="The trace, CSV.")] = Path("trace.csv"),
    seed: Annotated[int, typer.Option(help="Same seed, same trace.", min=0)] = 0,
) -> None:
    """Write a trace: of an arrival process, or of a day of Azure Functions."""
    from gpuprof.simulator.trace import write_trace

    if day.azure is not None and (process.rate or process.slo_file):
        raise InputError("--azure says when requests come: --rate and --slo-file cannot change that")
    trace = process.trace(seed) if day.azure is None else day.trace(day.azure, seed)
    if not trace.requests:
        raise InputError("the trace would hold no request", "ask for a longer duration or a higher rate")
    write_trace(trace, output)
    say(f"wrote {trace.requests:,} requests of {len(trace.times)} model(s) over {trace.duration_s:g} s to {output}")


@app.command()
def show(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="CSV of time_s,model.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Picture, .svg or .png.")] = None,
    bins: Annotated[int, typer.Option(help="Parts that the time is cut into.", min=2, max=2000)] = 60,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Print rate, peak, burstiness and gaps of each model, and draw the rate over time."""
    from gpuprof.report.sparkline import sparkline
    from gpuprof.simulator.trace import read_trace

    chosen = chosen_format(as_json, as_csv)
    trace = read_trace(trace_file)
    width_s = trace.duration_s / bins
    rows = [
        {**row, "sparkline": sparkline(counts.tolist())}
        if chosen is Format.TABLE
        else {**row, "counts": counts.tolist()}
        for row, counts in zip(trace.statistics(width_s), trace.counts(bins).values(), strict=True)
    ]
    if output is not None:
        _draw(trace, bins, output)
    print_rows(rows, _COLUMNS if chosen is Format.TABLE else _COLUMNS[:-1], chosen)


def _draw(trace: Trace, bins: int, output: Path) -> None:
    from gpuprof.report.figures import rate_figure
    from gpuprof.report.picture import write_picture

    width_s = trace.duration_s / bins
    times = [(i + 0.5) * width_s for i in range(bins)]
    rates = {model or "all": [float(n) / width_s for n in counts] for model, counts in trace.counts(bins).items()}
    write_picture(rate_figure(times, rates), output)
    say(f"drew {output}")
