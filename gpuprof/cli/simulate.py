"""``gpuprof simulate``: predict the clients' view of a map, without a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuprof.cli.options import MapFileArgument, OptionalDbOption, output_option
from gpuprof.cli.output import Format, progress, say_note
from gpuprof.cli.simulation_output import show_comparison, show_outcome
from gpuprof.cli.verdict_output import NoFailOption, VerboseOption
from gpuprof.errors import InputError
from gpuprof.pipeline.simulation_settings import Fidelity, Rescheduling, ServiceSettings, SimulatedTraffic


def simulate(
    traffic: SimulatedTraffic,
    service: ServiceSettings,
    rescheduling: Rescheduling,
    fidelity: Fidelity,
    map_file: MapFileArgument = Path("map.json"),
    db: OptionalDbOption = None,
    estimator: Annotated[
        str | None, typer.Option(help="Estimator of the times; default: the times in the map.")
    ] = None,
    output: Annotated[
        Path | None, output_option("File to write everything to, as JSON; verdicts alone as .md, or JUnit's .xml.")
    ] = None,
    verbose: VerboseOption = False,
    no_fail: NoFailOption = False,
    chosen: Format = Format.TABLE,
) -> None:
    """Replay requests against MAP: whether each SLO is kept, goodput and p99, and why it is missed; -v prints all."""
    from gpuprof.pipeline.simulate import simulate as simulate_map

    is_rescheduled = "period_s" in rescheduling.model_fields_set
    if rescheduling.policies and not is_rescheduled:
        raise InputError("--policy says how to reschedule", "add --reschedule 60s")
    with progress() as bar:
        task = bar.add_task("simulating", total=100)
        result = simulate_map(
            map_file,
            traffic,
            service=service,
            rescheduling=rescheduling if is_rescheduled else None,
            fidelity=fidelity,
            db=db,
            estimator=estimator,
            progress=lambda step: bar.update(task, completed=step.done),
            note=say_note,
        )
    if output is not None:
        result.write(output)
    if result.is_comparison:
        show_comparison(result, chosen)
    else:
        show_outcome(result, chosen, verbose)
        if not no_fail:
            result.require_kept()
