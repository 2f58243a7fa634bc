"""Maps over random databases in which runs failed: none may ask for what failed, or for what that dominates.

    python -m bench.failed_configurations [--databases N] [--first SEED] [--policies a,b] [--limit SECONDS]

Each database has three models on one kind of GPU, in batches, shares and processes, some of which ran out of memory,
some of which gave wrong outputs. Every policy plans from it by every estimator that answers from a database, and by one
that knows a time for anything. The maps are judged by the rows alone, without gpuprof's own rule of what failed: a
replica may ask for no larger batch and no more processes with no more memory (or, unless memory was short, no more
compute) than a row that failed, unless it ran itself.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import gpuprof
from gpuprof.domain.catalogue import device as named_device
from gpuprof.domain.deployment import DeploymentMap, share_of
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import PREDICTED, Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import GpuprofError
from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run
from gpuprof.placement.policies import policy_names

ESTIMATORS = ("database", "measured", "usher", f"{__name__ if __name__ != '__main__' else __spec__.name}:Anything")
MEMORY, OUTPUTS = "out of memory", "wrong outputs under its share"
_MODELS, _BATCHES, _PERCENTS = ("a", "b", "c"), (1, 2, 4, 8, 16), (25.0, 50.0, 100.0)
_PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb")
_LIMIT_S = 0.2
_FIXED = 3


@dataclass(frozen=True)
class Anything:
    """Knows a time and a little memory for anything: what failed is kept from maps by others."""

    database: KernelDb | None = None

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return a time that grows with the batch and falls with the share."""
        time = (1.0 + 0.5 * batch) * processes / device.fraction(share) ** 0.7
        memory = Figure(2.0**28, PREDICTED)
        figure = Figure(time, PREDICTED, 0.9 * time, 1.1 * time)
        requires = (("max_occupancy", Figure(min(100.0, 10.0 * batch), PREDICTED)),)
        workload = Workload(model, batch, share, processes)
        return Estimate(workload, device.name, figure, memory_bytes=memory, creq_pct=requires)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        """Return the batches of the databases."""
        return _BATCHES

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        """Return the shares of the databases."""
        listed = [Share(mig=one.name) for one in device.mig_profiles] or [Share(one) for one in _PERCENTS]
        return tuple(sorted(listed, key=lambda one: (device.fraction(one), str(one))))


def main() -> int:
    """Print a line for each policy, and every breach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--databases", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first database")
    parser.add_argument("--policies", default=",".join(policy_names()))
    parser.add_argument("--limit", type=float, default=_LIMIT_S, help="seconds that a search may take")
    given = parser.parse_args()
    maps: Counter[str] = Counter()
    replicas: Counter[str] = Counter()
    breaches: list[str] = []
    policies = given.policies.split(",")
    for seed in range(given.first, given.first + given.databases):
        for policy, estimator, count, broken in judge_maps(seed, policies, given.limit):
            maps[policy] += count > 0
            replicas[policy] += count
            breaches += [f"seed {seed}, {policy}, {estimator}: {one}" for one in broken]
    for policy in policies:
        print(f"{policy:>12}  {maps[policy]} maps, {replicas[policy]} replicas")
    print("\n".join(breaches) or f"none of {sum(maps.values())} maps asks for what failed or is dominated by it")
    return int(bool(breaches))


def judge_maps(
    seed: int, policies: Sequence[str], limit_s: float = _LIMIT_S, *, hides_failures: bool = False
) -> Iterator[tuple[str, str, int, list[str]]]:
    """Yield policy, estimator, replicas, and what of these must not be, for each map from a random database.

    With ``hides_failures`` the database holds none of the rows that failed, so that maps ask for them.
    """
    draw = random.Random(seed)
    kind = draw.choice(["v100", "a100-80"])
    device = named_device(kind)
    rows = list(_draw_rows(draw, device))
    demands = [
        gpuprof.Demand(model, draw.uniform(20.0, 600.0), gpuprof.Slo(draw.uniform(30.0, 200.0))) for model in _MODELS
    ]
    with tempfile.TemporaryDirectory(prefix="gpuprof-failed-") as made:
        folder = Path(made) / "db"
        database = KernelDb.create(folder)
        run = RunRow("r1", datetime(2026, 1, 1, tzinfo=UTC), kind, "drawn", "any")
        database.append(Run(run, models=tuple(row for row in rows if not (hides_failures and row.error))))
        for policy in policies:
            fleet = f"{kind}:{_FIXED}" if policy == "milp" else kind  # which plans for fixed fleets
            for estimator in ESTIMATORS:
                options = gpuprof.PlanningOptions(estimator=estimator, time_limit_s=limit_s, max_processes=2)
                try:
                    found = gpuprof.place(demands, fleet=fleet, db=folder, policy=policy, options=options).deployment
                except GpuprofError:
                    continue  # nothing can be planned so, which is no breach
                yield policy, estimator, sum(1 for _ in found.places()), list(_find_breaches(found, device, rows))


def _draw_rows(draw: random.Random, device: Device) -> Iterator[ModelRow]:
    """Yield the rows of all models: each has a size that is too large for a memory, and a share that is too small."""
    shares = [(100.0, name) for name in _PROFILES] if device.mig_profiles else [(one, None) for one in _PERCENTS]
    for model in _MODELS:
        start, each = draw.uniform(0.5, 4.0), draw.uniform(0.2, 2.0)
        base, more = draw.uniform(0.5, 3.0), draw.uniform(0.1, 2.0)  # GiB
        wrong = draw.choice([None, None, *shares[:2]])
        for percent, profile in shares:
            share = Share(percent, profile)
            memory = device.memory_bytes(share) / 2**30
            for batch in _BATCHES:
                for processes in (1, 2):
                    if draw.random() < 0.15:
                        continue  # never tried
                    held = base + more * batch
                    error = MEMORY if held * processes > memory * draw.uniform(0.3, 1.2) else None
                    error = OUTPUTS if (percent, profile) == wrong and batch >= 4 else error
                    ms = (start + each * batch) * processes / device.fraction(share) ** 0.7
                    yield ModelRow(
                        "r1", model, device.name, batch, percent, profile, processes, error=error,
                        latency_mean_ms=None if error else ms, memory_peak_bytes=None if error else int(held * 2**30),
                        max_occupancy_pct=None if error else min(100.0, 10.0 * batch),
                    )  # fmt: skip


def _find_breaches(found: DeploymentMap, device: Device, rows: Sequence[ModelRow]) -> Iterator[str]:
    for _, _, partition, replica in found.places():
        share = share_of(partition, replica)
        own = (replica.model, replica.batch, share.sm_pct, share.mig, replica.processes)
        tried: Mapping[bool, list[ModelRow]] = {
            failed: [row for row in rows if row.model == replica.model and (row.error is not None) == failed]
            for failed in (True, False)
        }
        if own in {(row.model, row.batch, row.sm_share_pct, row.mig_profile, row.processes) for row in tried[False]}:
            continue
        for row in tried[True]:
            theirs = Share(row.sm_share_pct or 100.0, row.mig_profile)
            is_larger = replica.batch >= row.batch and replica.processes >= row.processes
            has_less = device.memory_bytes(share) <= device.memory_bytes(theirs)
            if row.error != MEMORY:
                has_less &= device.fraction(share) <= device.fraction(theirs) * (1.0 + 1e-9)
            if is_larger and has_less:
                yield f"{own} is dominated by batch {row.batch} under {theirs} in {row.processes}: {row.error}"
                break


if __name__ == "__main__":
    sys.exit(main())
