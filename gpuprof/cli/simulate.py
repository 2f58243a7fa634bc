"""``gpuprof simulate``: what clients of a map would see, without a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.option_groups import with_groups
from gpuprof.cli.output import CsvOption, Format, JsonOption, chosen_format, progress, say, say_note
from gpuprof.cli.simulation_options import Fidelity, Following, Served, Traffic
from gpuprof.cli.simulation_output import show_comparison, show_outcome
from gpuprof.errors import InputError

if TYPE_CHECKING:
    from gpuprof.domain.arrival_process import ArrivalProcess
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.pipeline.rescheduling import Loop
    from gpuprof.simulator.cluster import SimulationOptions
    from gpuprof.simulator.interference import Interference
    from gpuprof.simulator.merged_queues import MergedQueues
    from gpuprof.simulator.outcome import SimulationOutcome
    from gpuprof.simulator.reschedule import Timetable

#: Above this a simulation of every request takes minutes, and a sample is taken instead.
WHOLE_REQUESTS = 3e8


@with_groups
def simulate(
    traffic: Traffic,
    served: Served,
    following: Following,
    fidelity: Fidelity,
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map.")] = Path("map.json"),
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write everything here, as JSON.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Replay requests against MAP: goodput, percentiles, latency by stage, utilisation, and why SLOs were missed."""
    from gpuprof.domain.deployment import read_map
    from gpuprof.pipeline.interference import make_interference
    from gpuprof.pipeline.rescheduling import named_policies
    from gpuprof.simulator.merged_queues import merged_queues

    chosen = chosen_format(as_json, as_csv)
    loop = following.loop()
    asked = read_map(map_file)
    queues = merged_queues(asked)
    deployment = queues.deployment
    _check_merged(queues, asked, loop)
    load, trace_s = traffic.load(asked, queues)
    options = served.options(deployment, traffic, load, trace_s)
    if loop is None:
        measured = make_interference(deployment, following.db) if fidelity.interference else None
        outcome = _run(deployment, load, options, fidelity.sample, measured)
    else:
        if fidelity.sample or fidelity.interference:
            raise InputError("--reschedule goes with neither --sample nor --interference", "leave them out")
        names: list[str | None] = [*named_policies(following.policy)] or [None]
        runs = {name: _follow(deployment, load, options, loop, name) for name in names}
        if len(runs) > 1:
            _compare({str(name): run for name, run in runs.items()}, output, chosen)
            return
        _, outcome = runs[names[0]]
    if output is not None:
        _write(outcome.document(), output)
    show_outcome(outcome, chosen)


def _check_merged(queues: MergedQueues, asked: DeploymentMap, loop: Loop | None) -> None:
    if not queues.queue_of:
        return
    if loop is not None:
        raise InputError("--reschedule places models anew, which a map with merges hides", "place without --merge")
    say(f"gpuprof: merged models are simulated as one queue, held to their tightest SLO: {', '.join(asked.merges)}")


def _follow(
    deployment: DeploymentMap,
    load: Mapping[str, ArrivalProcess],
    options: SimulationOptions,
    loop: Loop,
    policy: str | None,
) -> tuple[Timetable, SimulationOutcome]:
    from gpuprof.pipeline.rescheduling import follow

    return follow(deployment, load, options, loop, policy, lambda map_, asked: _run(map_, load, asked, 0), say_note)


def _compare(runs: Mapping[str, tuple[Timetable, SimulationOutcome]], output: Path | None, chosen: Format) -> None:
    """Print a line a policy; the file gets the whole outcome of each."""
    from gpuprof.simulator.autoscaling import autoscaling

    if output is not None:
        _write({name: outcome.document() for name, (_, outcome) in runs.items()}, output)
    show_comparison([autoscaling(name, *run) for name, run in runs.items()], chosen)


def _run(
    deployment: DeploymentMap,
    load: Mapping[str, ArrivalProcess],
    options: SimulationOptions,
    sample: int | None,
    interference: Interference | None = None,
) -> SimulationOutcome:
    from gpuprof.simulator.compiled import is_compiled
    from gpuprof.simulator.engine import simulate as simulate_whole
    from gpuprof.simulator.sampling import Sampling, expected_requests, simulate_sampled

    expected = expected_requests(load, options.duration_s)
    if not is_compiled():
        say("compiling the simulator for this machine, once: half a minute")
    with progress() as bar:
        task = bar.add_task("simulating", total=100)

        def told(fraction: float) -> None:
            bar.update(task, completed=round(100 * fraction))

        if sample or (sample is None and expected > WHOLE_REQUESTS):
            if interference is not None:
                raise InputError("interference cannot be sampled", "simulate a shorter time with --sample 0")
            if not sample:
                say(f"{expected:.3g} requests: taking a sample (--sample 0 simulates all of them)")
            return simulate_sampled(deployment, load, options, Sampling(replicas=sample or 16), told)
        return simulate_whole(deployment, load, options, told, interference)


def _write(document: Mapping[str, object], path: Path) -> None:
    import json

    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None
