"""``explain``: why a model got its batch size, share and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.estimate import Estimator
from gpuprof.domain.validation import Positive
from gpuprof.errors import InputError, unknown_name
from gpuprof.pipeline.arguments import MapArgument, locate_files, map_folder, resolve_map
from gpuprof.pipeline.problem import default_limit_s
from gpuprof.pipeline.recorded_problem import find_policy_name, restore_policy, restore_problem
from gpuprof.pipeline.result import NoteCallback, NoteList, Progress, ProgressCallback, Result, say_nothing
from gpuprof.pipeline.settings import Settings, option
from gpuprof.placement.explanation import (
    Alternative,
    NeighbourEffect,
    ReplicaLocation,
    WhatIf,
    find_alternatives,
    list_neighbour_effects,
    locate_replicas,
    run_what_ifs,
)
from gpuprof.placement.segment import PooledSegments, Segments
from gpuprof.placement.unplaced_reasons import explain_unplaced

_ALTERNATIVE = ("tail_ms", "replicas", "cost", "chosen", "source", "at_upper_end")


@dataclass(frozen=True, kw_only=True)
class ExplainResult(Result):
    """The placement of a model in a map, its alternatives, and the effect of changed demands."""

    model: str
    deployment: DeploymentMap
    places: tuple[ReplicaLocation, ...]
    neighbours: tuple[NeighbourEffect, ...]
    alternatives: tuple[Alternative, ...]
    what_ifs: tuple[WhatIf, ...]
    planner: str  #: The policy of the changed plans: the map's, or the default where the map's is not installed.

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each possible share of the model, cheapest first."""
        return [
            {
                "device": alternative.segment.device,
                "share": str(alternative.segment.share),
                **{name: getattr(alternative.segment, name) for name in ("batch", "processes", "capacity_rps")},
                **{name: getattr(alternative, name) for name in _ALTERNATIVE},
            }
            for alternative in self.alternatives
        ]

    def place_rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each replica of the model: its place and its neighbours."""
        return [{**asdict(place), "beside": ", ".join(place.beside) or "nobody"} for place in self.places]

    def neighbour_rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each neighbour of the model's replicas: the slow-down by it and the figure's source."""
        return [
            {
                **asdict(neighbour),
                "interval_ms": neighbour.interval_ms and list(neighbour.interval_ms),
                "added_pct": 100.0 * neighbour.added_ms / neighbour.alone_ms,
            }
            for neighbour in self.neighbours
        ]

    def what_if_rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each changed demand: what the map's policy plans for it."""
        return [
            {
                "change": what_if.change,
                "gpus": what_if.gpus,
                "shares": "; ".join(f"{count} × {share}" for share, count in what_if.shares) or "none",
                "missing_rps": what_if.missing_rps,
            }
            for what_if in self.what_ifs
        ]


class ExplainOptions(Settings):
    """Estimator, database and search."""

    title: ClassVar[str] = "Estimator and search"

    db: Path | None = option(None, "Kernel database that the map was planned from.")
    estimator: str | Estimator | None = option(
        None, "Estimator to use in place of the one that the map was planned with."
    )
    time_limit_s: Positive | None = option(
        None,
        "Time for each of the three new plans; default: 5s and 0.03s for each demand where a limit ended "
        "the map's own search.",
        "--time-limit",
        unit="s",
    )


def explain(
    deployment: MapArgument = Path("map.json"),
    model: str = "",
    options: ExplainOptions | None = None,
    *,
    progress: ProgressCallback = say_nothing,
    note: NoteCallback = say_nothing,
    **fields: Any,
) -> ExplainResult:
    """Explain a model's alternatives, and the effect of 10% more rate or a 10% shorter SLO.

    Raises `InputError` when the map lacks the model, or the database lacks data of the plan.

    Parameters
    ----------
    model : str
        A model of the map; optional for a map with a single model.
    options : ExplainOptions, optional
        Fields may be given as keywords instead.

    Examples
    --------
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> quick = gpuprof.ProfileSettings(time_limit_s=0.2)
    >>> done = gpuprof.profile([file], batches=(1, 2), shares=("100",), device="cpu", db="db", settings=quick)
    >>> demand = gpuprof.Demand("mlp", rate_rps=1.0, slo=gpuprof.Slo(10000.0))
    >>> plan = gpuprof.place([demand], fleet="cpu:1", db="db")
    >>> why = gpuprof.explain(plan.deployment, "mlp", db="db")
    >>> frame = why.to_frame()  # a row for each share that it could have had
    >>> frame["replicas"].tolist()[-1], int(frame["chosen"].sum())
    (1, 1)
    """
    chosen = ExplainOptions.collect(options, fields)
    notes, resolved = NoteList(note), resolve_map(deployment)
    if not model and len(resolved.models) == 1:
        model = next(iter(resolved.models))
    if not model:
        raise InputError("the map has several models", f"name one: {', '.join(sorted(resolved.models))}")
    if model in resolved.chains:
        raise InputError(f"{model} is a chain", f"name a step: {', '.join(resolved.chains[model].steps)}")
    if model not in resolved.models:
        raise unknown_name("model of the map", model, sorted(resolved.models))
    problem = restore_problem(locate_files(resolved, map_folder(deployment)), chosen.db, notes.add, chosen.estimator)
    neighbours = list_neighbour_effects(problem, resolved, model)
    alternatives = tuple(find_alternatives(problem, resolved, model))
    if not alternatives:
        segments = Segments(problem) if problem.options.latency_budget is not None else PooledSegments(problem)
        reason = explain_unplaced(problem, segments, problem.demand(model))
        notes.add(f"{model}: under no share is its SLO known to be kept: {reason}")
    what_ifs: list[WhatIf] = []
    time_limit_s = chosen.time_limit_s
    if time_limit_s is None and resolved.planned_with.stopped_by is not None:
        time_limit_s = default_limit_s(len(problem.demands))
    limited = replace(problem, options=replace(problem.options, time_limit_s=time_limit_s))
    for what_if in run_what_ifs(limited, restore_policy(resolved), model):
        what_ifs.append(what_if)
        progress(Progress(f"planned {what_if.change}", len(what_ifs), 3))
    if any(what_if.stopped for what_if in what_ifs):
        notes.add(f"the time limit of {time_limit_s:g} s ended new plans early (--time-limit gives them longer)")
    return ExplainResult(
        model=model,
        deployment=resolved,
        places=tuple(locate_replicas(resolved, model)),
        neighbours=neighbours,
        alternatives=alternatives,
        what_ifs=tuple(what_ifs),
        planner=find_policy_name(resolved),
        notes=notes.all(),
    )
