"""Number of routers for the requests of a plan."""

from __future__ import annotations

import math
import tomllib
from functools import cache

from gpuprof.domain.catalogue import datasets
from gpuprof.domain.deployment import DeploymentMap
from gpuprof.rules.host_work import host_work_of_plan


@cache
def _read_assumed_rps() -> float:
    """Return the requests per second of a router from the package's data."""
    content = tomllib.loads((datasets() / "router.toml").read_text(encoding="utf-8"))
    return float(content["requests_per_s"])


def router_capacity_rps(deployment: DeploymentMap) -> tuple[float, bool]:
    """Return the capacity of a router in requests per second, and whether it was measured by ``profile``.

    A measured capacity is a lower bound: it follows from the CPU time of router, machine process and client for a
    request.
    """
    host = host_work_of_plan(deployment.planned_with)
    measured_ms = host.host_ms_busy or host.host_ms
    if measured_ms > 0.0:
        return 1000.0 / measured_ms, True
    return _read_assumed_rps(), False


def describe_routers(deployment: DeploymentMap) -> str | None:
    """Return a note on the number of routers that the planned requests need; None where a single router suffices."""
    rate_rps = math.fsum(replica.rate_rps for *_, replica in deployment.places())
    capacity_rps, is_measured = router_capacity_rps(deployment)
    count = math.ceil(rate_rps / capacity_rps - 1e-9)
    if count <= 1:
        return None
    basis = "as profile measured" if is_measured else "assumed from datasets/router.toml"
    return (
        f"{rate_rps:,.0f} requests/s need {count:,} routers: one carries about {capacity_rps:,.0f} ({basis}); serve "
        f"parts of the demands from {count:,} maps, each with a router of its own"
    )
