"""Random arrivals of a simulation, with separate random numbers for each model of a map."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpuprof.domain.arrival_process import ArrivalProcess, ArrivalStream
from gpuprof.domain.deployment import DeploymentMap


def arrival_streams(
    deployment: DeploymentMap, arrivals: Mapping[str, ArrivalProcess], seed: int
) -> list[ArrivalStream | None]:
    """Return a stream for each model of the map, in its order; None for a model without arrivals."""
    # The second child draws the service times (`gpuprof.simulator.engine`).
    first, _ = np.random.SeedSequence(seed).spawn(2)
    return [
        arrivals[model].stream(np.random.Generator(np.random.PCG64(child))) if model in arrivals else None
        for model, child in zip(deployment.models, first.spawn(len(deployment.models)), strict=True)
    ]
