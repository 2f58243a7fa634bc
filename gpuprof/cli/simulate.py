"""``gpuprof simulate``: what clients of a map would see, without a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import (
    CsvOption,
    Format,
    JsonOption,
    chosen_format,
    progress,
    say,
)
from gpuprof.cli.simulation_output import show_outcome
from gpuprof.errors import InputError, unknown_name

if TYPE_CHECKING:
    from gpuprof.cli.rescheduling import Loop
    from gpuprof.deployment import DeploymentMap
    from gpuprof.simulator.arrivals import Arriving
    from gpuprof.simulator.cluster import Options
    from gpuprof.simulator.interference import Interference
    from gpuprof.simulator.merged_queues import MergedQueues
    from gpuprof.simulator.network import NetworkDelay
    from gpuprof.simulator.outcome import Outcome
    from gpuprof.simulator.reschedule import Timetable
    from gpuprof.simulator.trace import Trace

#: Above this a simulation of every request takes minutes, and a sample is taken instead.
WHOLE_REQUESTS = 3e8
#: A trace ends with its last request, which is to be simulated too.
_AFTER_THE_LAST_S = 1e-6


def simulate(
    map_file: Annotated[Path, typer.Argument(metavar="MAP", help="Deployment map.")] = Path("map.json"),
    trace: Annotated[Path | None, typer.Option(help="Replay this CSV of time_s,model.")] = None,
    rate: Annotated[
        list[str] | None, typer.Option(help="MODEL=REQUESTS_PER_S, or requests/s of all; else the map's own.")
    ] = None,
    rate_scale: Annotated[float, typer.Option(help="Times the rates.", min=1e-6)] = 1.0,
    arrivals: Annotated[
        str, typer.Option(help="constant, poisson, gamma:SCV, bursts:RATIO,BURST,CALM, diurnal:PEAK,PERIOD.")
    ] = "poisson",
    duration: Annotated[str | None, typer.Option(help="How long requests arrive: 60s, 5m, 1d.")] = None,
    warmup: Annotated[str | None, typer.Option(help="Time before requests count.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same result.", min=0)] = 0,
    routing: Annotated[str, typer.Option(help="Choice among replicas: fastest or round-robin.")] = "fastest",
    refuse: Annotated[bool, typer.Option(help="Refuse what cannot be answered in time, as the server does.")] = True,
    batch_timeout: Annotated[
        str | None,
        typer.Option(help="Every batch waits so long to fill, whatever its SLO: 100ms; else as the map says."),
    ] = None,
    router_ms: Annotated[float, typer.Option(help="Time of the router for a request.", min=0.0)] = 0.0,
    overhead_ms: Annotated[
        float | None, typer.Option(help="Time of a request outside router and replica; else the map's own.", min=0.0)
    ] = None,
    host_ms: Annotated[
        float | None,
        typer.Option(help="CPU time of router and clients for a request; else the map's own.", min=0.0),
    ] = None,
    network: Annotated[str, typer.Option(help="none, thesis, or a CSV of payload_bytes,latency_ms to fit.")] = "none",
    payload_bytes: Annotated[float, typer.Option(help="Size of a request on the network.", min=0.0)] = 602112.0,
    answer_bytes: Annotated[float, typer.Option(help="Size of an answer on the network.", min=0.0)] = 4000.0,
    fail: Annotated[
        list[str] | None, typer.Option(help="node0@30s, node0/1@30s or node0/1@30s+10s; may be repeated.")
    ] = None,
    interference: Annotated[
        bool, typer.Option("--interference", help="Slow batches by what really runs beside, not by all neighbours.")
    ] = False,
    every: Annotated[
        str | None, typer.Option("--reschedule", help="Place anew this often, for the rates seen since: 60s.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy of --reschedule, else the map's own; several, with commas, are compared.")
    ] = None,
    headroom: Annotated[float, typer.Option(help="Times the rates that --reschedule sees.", min=0.1)] = 1.2,
    load_time: Annotated[str, typer.Option(help="Of a model into a new replica.")] = "5s",
    mig_time: Annotated[str, typer.Option(help="Of giving a GPU another MIG layout.")] = "10s",
    db: Annotated[Path | None, typer.Option(help="Kernel database, for --reschedule and --interference.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="Approximate: so many replicas of a model; 0: never approximate.", min=0)
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Also write everything here, as JSON.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Replay requests against MAP: goodput, percentiles, latency by stage, utilisation, and why SLOs were missed."""
    from dataclasses import replace
    from functools import partial

    from gpuprof.cli.interference import interference_of
    from gpuprof.cli.rescheduling import Loop, named_policies
    from gpuprof.deployment import read_map
    from gpuprof.host_work import recorded_overhead_ms, recorded_work
    from gpuprof.simulator.cluster import Options
    from gpuprof.simulator.duration import parse_duration
    from gpuprof.simulator.failures import parse_failure
    from gpuprof.simulator.merged_queues import merged_queues
    from gpuprof.simulator.reschedule import MoveCosts

    chosen = chosen_format(as_json, as_csv)
    asked = read_map(map_file)
    queues = merged_queues(asked)
    deployment = queues.deployment
    if queues.queue_of:
        if every is not None:
            raise InputError("--reschedule places models anew, which a map with merges hides", "place without --merge")
        say(f"gpuprof: merged models are simulated as one queue, held to their tightest SLO: {', '.join(asked.merges)}")
    load, trace_s = _load(asked, queues, trace, rate or [], rate_scale, arrivals)
    seconds, warmup_s = _span(duration, warmup, trace_s)
    outside_ms = recorded_overhead_ms(deployment.inputs) if overhead_ms is None else overhead_ms
    host = recorded_work(deployment.inputs)
    host = host if host_ms is None else replace(host, host_ms=host_ms)
    to_ms, back_ms = (_network(network).ms(size) for size in (payload_bytes, answer_bytes))
    legs = dict.fromkeys(deployment.models, (outside_ms + to_ms, back_ms))
    failures = tuple(parse_failure(text, deployment) for text in fail or [])
    timeout_ms = None if batch_timeout is None else 1000.0 * parse_duration(batch_timeout, "--batch-timeout")
    options = Options(
        seconds, warmup_s, seed, routing, refuse, router_ms, legs, failures, batch_timeout_ms=timeout_ms, host=host
    )
    if every is None:
        if policy is not None:
            raise InputError("--policy says how to reschedule", "add --reschedule 60s")
        outcome = _run(deployment, load, options, sample, interference_of(deployment, db) if interference else None)
    else:
        if sample or interference:
            raise InputError("--reschedule goes with neither --sample nor --interference", "leave them out")
        costs = MoveCosts(parse_duration(load_time, "--load-time"), parse_duration(mig_time, "--mig-time"))
        loop = Loop(parse_duration(every, "--reschedule"), headroom, costs, db)
        run = partial(_follow, deployment, load, options, loop)
        names = named_policies(policy)
        if len(names) > 1:
            _compare({name: run(name) for name in names}, output, chosen)
            return
        _, outcome = run(names[0] if names else None)
    if output is not None:
        _write(outcome.document(), output)
    show_outcome(outcome, chosen)


def _follow(
    deployment: DeploymentMap, load: Mapping[str, Arriving], options: Options, loop: Loop, policy: str | None
) -> tuple[Timetable, Outcome]:
    from gpuprof.cli.rescheduling import follow

    return follow(deployment, load, options, loop, policy, lambda map_, asked: _run(map_, load, asked, 0))


def _compare(runs: Mapping[str, tuple[Timetable, Outcome]], output: Path | None, chosen: Format) -> None:
    """Print a line a policy; the file gets the whole outcome of each."""
    from gpuprof.cli.rescheduling import print_comparison
    from gpuprof.simulator.autoscaling import autoscaling

    if output is not None:
        _write({name: outcome.document() for name, (_, outcome) in runs.items()}, output)
    print_comparison([autoscaling(name, *run) for name, run in runs.items()], chosen)


def _load(
    asked: DeploymentMap, queues: MergedQueues, trace: Path | None, rate: list[str], scale: float, form: str
) -> tuple[Mapping[str, Arriving], float | None]:
    from gpuprof.simulator.load import arrivals_of_rates, arrivals_of_trace, parse_rates
    from gpuprof.simulator.trace import read_trace

    if trace is None:
        rates, total = parse_rates(rate)
        if unknown := [name for name in rates if name not in asked.models]:
            raise unknown_name("model", unknown[0], list(asked.models))
        return arrivals_of_rates(queues.deployment, queues.rates(asked, rates), total, scale, form), None
    if rate or scale != 1.0:
        raise InputError("--trace says when requests come: --rate and --rate-scale cannot change that")
    read = read_trace(trace)
    _tell_gap(read)
    return arrivals_of_trace(queues.deployment, queues.trace(read)), read.duration_s + _AFTER_THE_LAST_S


def _tell_gap(trace: Trace) -> None:
    gap = trace.longest_gap_s()
    if gap > max(60.0, 0.1 * trace.duration_s):
        say(f"the trace has a gap of {gap:.3g} s without any request")


def _span(duration: str | None, warmup: str | None, trace_s: float | None) -> tuple[float, float]:
    """Return how long requests arrive and how long the first of them do not count, in seconds."""
    from gpuprof.simulator.duration import parse_duration

    seconds = parse_duration(duration, "--duration") if duration else trace_s or 60.0
    warmup_s = parse_duration(warmup, "--warmup") if warmup else 0.0
    if warmup_s >= seconds:
        raise InputError(f"--warmup must be shorter than the duration of {seconds:g} s but got {warmup}")
    return seconds, warmup_s


def _network(text: str) -> NetworkDelay:
    from gpuprof.simulator.network import LOCAL, THESIS, read_measurements

    return {"none": LOCAL, "thesis": THESIS}.get(text) or read_measurements(Path(text))


def _run(
    deployment: DeploymentMap,
    load: Mapping[str, Arriving],
    options: Options,
    sample: int | None,
    interference: Interference | None = None,
) -> Outcome:
    from gpuprof.simulator.compiled import HAS_NUMBA, is_compiled
    from gpuprof.simulator.engine import simulate as simulate_whole
    from gpuprof.simulator.sampling import Sampling, expected_requests, simulate_sampled

    expected = expected_requests(load, options.duration_s)
    if not HAS_NUMBA and expected > 1e6:
        minutes = expected / 5e4 / 60
        say(f"numba is not installed: {expected:.2g} requests take about {minutes:.0f} min (pip install numba)")
    elif HAS_NUMBA and not is_compiled():
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
