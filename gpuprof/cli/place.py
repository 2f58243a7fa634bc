"""``gpuprof place``: the cheapest deployment map that keeps the SLOs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import Column, CsvOption, Format, JsonOption, chosen_format, number, print_json, print_rows, say
from gpuprof.cli.share_hint import share_hint
from gpuprof.errors import InfeasibleError

if TYPE_CHECKING:
    from gpuprof.deployment import DeploymentMap

_COLUMNS = (
    Column("node", "node", right=False),
    Column("gpu", "gpu"),
    Column("device", "device", right=False),
    Column("mig", "MIG", right=False),
    Column("model", "model", right=False),
    Column("share_pct", "share %", number()),
    Column("processes", "procs"),
    Column("batch", "batch"),
    Column("rate_rps", "req/s", number(4)),
    Column("latency_ms", "batch ms", number()),
    Column("p99_ms", "p99 ms", number()),
    Column("slo_ms", "SLO ms", number()),
    Column("utilization_pct", "busy %", number(2)),
    Column("goodput_rps", "goodput/s", number(4)),
    Column("source", "from", right=False),
)


def place(
    slo_file: Annotated[Path, typer.Option(help="CSV with model,rate_rps,slo_ms.")] = Path("slo.csv"),
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the map is written.")] = Path("map.json"),
    gpus: Annotated[
        str | None, typer.Option(help="Devices: a100-80:8,v100; without a count as many as needed.")
    ] = None,
    fleet: Annotated[Path | None, typer.Option(help="fleet.toml with devices, counts and prices.")] = None,
    policy: Annotated[str | None, typer.Option(help="Name, or package.module:Class.")] = None,
    policy_option: Annotated[
        list[str] | None, typer.Option("-O", "--policy-option", help="KEY=VALUE of the policy; may be repeated.")
    ] = None,
    previous: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="MAP", help="Map that runs now: of equally good maps, move the fewest replicas."
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Let models that share a device and weights run as one graph where it pays.")
    ] = False,
    best_effort: Annotated[bool, typer.Option(help="Write the map even when some demands cannot be met.")] = False,
    confidence: Annotated[
        float | None, typer.Option(help="Plan on the upper end of the estimates' intervals, 0.9 for 90%.")
    ] = None,
    latency_budget: Annotated[
        float | None, typer.Option(help="Instead of queueing: a batch may take this fraction of the SLO.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Largest batch size.")] = 256,
    max_processes: Annotated[
        int | None, typer.Option(help="Most processes of one replica; three in a MIG instance, else one.")
    ] = None,
    overhead_ms: Annotated[
        float | None, typer.Option(help="Time of a request outside its replica; as profile measured it unless given.")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which the best map so far is taken.")] = None,
    seed: Annotated[int, typer.Option(help="Of policies that draw random numbers.")] = 0,
    created: Annotated[str | None, typer.Option(help="Time to write into the map; none, or SOURCE_DATE_EPOCH.")] = None,
    db: Annotated[Path | None, typer.Option(help="Kernel database.")] = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Decide which replicas run where, so that every SLO is kept at the least cost, and write the map."""
    from gpuprof.cli.planning import build_problem, plan
    from gpuprof.deployment import read_map, write_map
    from gpuprof.placement.policies import DEFAULT, make_policy
    from gpuprof.placement.problem import Options

    chosen = chosen_format(as_json, as_csv)
    options = Options(
        confidence=confidence,
        latency_budget=latency_budget,
        max_batch=max_batch,
        max_processes=max_processes,
        time_limit_s=time_limit,
        seed=seed,
    )
    made = make_policy(policy or DEFAULT, pairs(policy_option or []))
    running = None if previous is None else read_map(previous)
    problem = build_problem(slo_file, gpus, fleet, db, options, overhead_ms)
    deployment = plan(replace(problem, previous=running), made, created)
    if merge and (best_effort or not deployment.unplaced):
        from gpuprof.cli.devices import open_database
        from gpuprof.cli.merge_step import merge_replicas

        outcome = merge_replicas(problem, deployment, output, open_database(db, needed=False))
        deployment = outcome.deployment
        for line in outcome.said:
            say(f"gpuprof: {line}")
    print_map(deployment, chosen)
    for unplaced in deployment.unplaced:
        say(f"gpuprof: {unplaced.model}: {unplaced.rate_rps:g} requests/s cannot be served: {unplaced.reason}")
    if hint := share_hint(problem, deployment):
        say(f"gpuprof: {hint}")
    if not deployment.unplaced or best_effort:
        write_map(deployment, output)
    if deployment.unplaced:
        names = ", ".join(dict.fromkeys(one.model for one in deployment.unplaced))
        fix = f"{output} holds the rest" if best_effort else "--best-effort places the rest"
        raise InfeasibleError(f"not every demand can be met: {names}", fix)


def pairs(options: Sequence[str]) -> dict[str, str]:
    """Return ``KEY=VALUE`` words as a dict; a KEY alone is a flag that is set."""
    return {key: value for key, _, value in (option.partition("=") for option in options)}


def print_map(deployment: DeploymentMap, chosen: Format) -> None:
    """Print the replicas of a map and, for people, what is predicted of the whole."""
    rows = list(_rows(deployment))
    predicted = deployment.predicted
    if chosen is Format.JSON:
        print_json(
            {
                "policy": deployment.policy,
                "predicted": predicted.model_dump(),
                "replicas": rows,
                "unplaced": [one.model_dump() for one in deployment.unplaced],
            }
        )
        return
    print_rows(rows, _COLUMNS, chosen)
    if chosen is Format.TABLE:
        sys.stdout.write(_summary(deployment) + "\n")


def _rows(deployment: DeploymentMap) -> Iterator[dict[str, object]]:
    for node, gpu, partition, replica in deployment.places():
        predicted = replica.predicted
        yield {
            "node": node.name,
            "gpu": gpu.index,
            "device": gpu.device,
            "mig": None if partition.mig is None else f"{partition.mig.profile}@{partition.mig.start}",
            "model": replica.model,
            "share_pct": replica.sm_share_pct,
            "processes": replica.processes,
            "batch": replica.batch,
            "rate_rps": replica.rate_rps,
            "latency_ms": predicted.latency_ms,
            "p99_ms": predicted.p99_ms,
            "slo_ms": min(deployment.models[model].slo_ms for model in replica.rates()),
            "utilization_pct": None if predicted.utilization is None else 100.0 * predicted.utilization,
            "goodput_rps": predicted.goodput_rps,
            "source": predicted.source,
            **({"merged": list(replica.rates())} if replica.merged else {}),
        }


def _summary(deployment: DeploymentMap) -> str:
    predicted, show = deployment.predicted, number(4)
    kinds = Counter(gpu.device for node in deployment.nodes for gpu in node.gpus)
    words = [" + ".join(f"{count} × {name}" for name, count in kinds.items()) or "no devices"]
    if predicted.cost_per_hour is not None:
        words.append(f"{show(predicted.cost_per_hour)} $/h")
    words.append(f"goodput {show(predicted.goodput_rps)} requests/s")
    if predicted.internal_slack is not None and predicted.external_fragmentation is not None:
        words.append(f"idle within shares {100 * predicted.internal_slack:.0f}%")
        words.append(f"outside shares {100 * predicted.external_fragmentation:.0f}%")
    if predicted.lower_bound_gpus is not None:
        words.append(f"at least {predicted.lower_bound_gpus} needed by any map")
    if predicted.lower_bound_cost_per_hour is not None and predicted.cost_per_hour is not None and len(kinds) > 1:
        words.append(f"at least {show(predicted.lower_bound_cost_per_hour)} $/h")
    if predicted.upper_bound_goodput_rps is not None:
        words.append(f"at most {show(predicted.upper_bound_goodput_rps)} requests/s by any map")
    if predicted.moves is not None:
        words.append(f"{predicted.moves} of {sum(1 for _ in deployment.places())} replicas move")
    return f"{deployment.policy}: {', '.join(words)}"
