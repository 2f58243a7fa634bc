"""``gpuprof simulate``: what clients of a map would see, without a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import CsvOption, JsonOption, chosen_format, progress, say_note
from gpuprof.cli.output_path import output_option
from gpuprof.cli.shared_options import MapFileArgument
from gpuprof.cli.simulation_options import ArrivalOptions, FidelityOptions, RescheduleOptions, ServiceOptions
from gpuprof.cli.simulation_output import show_comparison, show_outcome
from gpuprof.cli.verdict_output import NoFailOption, VerboseOption


@with_groups
def simulate(
    traffic: ArrivalOptions,
    service: ServiceOptions,
    following: RescheduleOptions,
    fidelity: FidelityOptions,
    map_file: MapFileArgument = Path("map.json"),
    output: Annotated[
        Path | None, output_option("File to write everything to, as JSON; verdicts alone as .md, or JUnit's .xml.")
    ] = None,
    verbose: VerboseOption = False,
    no_fail: NoFailOption = False,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Replay requests against MAP: whether each SLO is kept, goodput and p99, and why it is missed; -v prints all."""
    from gpuprof.pipeline.simulate import simulate as simulate_map
    from gpuprof.pipeline.simulation_settings import Fidelity

    chosen = chosen_format(as_json, as_csv)
    with progress() as bar:
        task = bar.add_task("simulating", total=100)
        result = simulate_map(
            map_file,
            traffic.simulated_traffic(),
            service=service.service_settings(),
            rescheduling=following.rescheduling(),
            fidelity=Fidelity(fidelity.interference, fidelity.sample),
            db=following.db,
            estimator=fidelity.estimator,
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
