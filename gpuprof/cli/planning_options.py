"""Options that ``gpuprof place`` and ``gpuprof compare`` share, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import say_note

if TYPE_CHECKING:
    from gpuprof.placement.problem import Options, Problem


@dataclass(frozen=True)
class Asked:
    """Which demands are placed, and onto which devices."""

    slo_file: Annotated[Path, typer.Option(help="CSV with model,rate_rps,slo_ms.")] = Path("slo.csv")
    gpus: Annotated[str | None, typer.Option(help="Devices: a100-80:8,v100; without a count as many as needed.")] = None
    fleet: Annotated[Path | None, typer.Option(help="fleet.toml with devices, counts and prices.")] = None
    db: Annotated[Path | None, typer.Option(help="Kernel database.")] = None

    def problem(self, options: Options, overhead_ms: float | None = None) -> Problem:
        """Return them as a problem; the overhead of a request is the measured one unless given.

        Raises
        ------
        InputError
            For a file, device or model that is wrong or unknown.
        """
        from gpuprof.pipeline.problem import build_problem

        return build_problem(self.slo_file, self.gpus, self.fleet, self.db, options, overhead_ms, say_note)


@dataclass(frozen=True)
class Rules:
    """What a map must keep, and how large its replicas may be."""

    confidence: Annotated[
        float | None, typer.Option(help="Plan on the upper end of the estimates' intervals, 0.9 for 90%.")
    ] = None
    latency_budget: Annotated[
        float | None, typer.Option(help="Instead of queueing: a batch may take this fraction of the SLO.")
    ] = None
    max_batch: Annotated[int, typer.Option(help="Largest batch size.")] = 256
    max_processes: Annotated[
        int | None, typer.Option(help="Most processes of one replica; three in a MIG instance, else one.")
    ] = None
    overhead_ms: Annotated[
        float | None, typer.Option(help="Time of a request outside its replica; as profile measured it unless given.")
    ] = None

    def options(self, time_limit_s: float | None, seed: int) -> Options:
        """Return what every policy is told of them, and of how it is to search.

        Raises
        ------
        InputError
            When a number is out of its range.
        """
        from gpuprof.placement.problem import Options

        return Options(
            confidence=self.confidence,
            latency_budget=self.latency_budget,
            max_batch=self.max_batch,
            max_processes=self.max_processes,
            overhead_ms=self.overhead_ms or 0.0,
            time_limit_s=time_limit_s,
            seed=seed,
        )
