"""Problems of an estimator whose neighbours act through sums."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Workload
from gpuprof.domain.fleet import Fleet, FleetEntry
from gpuprof.domain.interference_table import Floats, Integers
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import ExponentialQueue, plain_device
from gpuprof.placement.problem import Options, Problem
from tests.placement.curved import CurvedEstimator

PERCENTS = (20.0, 40.0, 60.0, 80.0, 100.0)
BATCHES = (1, 4)


@dataclass(frozen=True, slots=True)
class SummedTable:
    """What a neighbour takes is its fraction of the device times log2(1 + batch): one pressure."""

    alone_ms: Floats
    pressures: Floats
    disturbance: float

    def take(self, rows: Integers) -> SummedTable:
        return SummedTable(self.alone_ms[rows], self.pressures[rows], self.disturbance)

    def least_times_ms(self, count: int, totals: Floats) -> tuple[Floats, Floats]:
        times = self.alone_ms * (1.0 + self.disturbance * np.maximum(totals[0] - self.pressures[:, 0], 0.0))
        return times, times


class SummedEstimator(CurvedEstimator):
    """The curved one, which knows no shares between those that it lists, and says that its neighbours act by sums."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        if share.sm_pct not in PERCENTS:
            raise InputError(f"nothing is known of {share}")
        return super().estimate(model, device, batch, share, beside, processes)

    def tabulate_interference(self, device: Device, workloads: Sequence[Workload]) -> SummedTable:
        alone = [
            self.estimate(one.model, device, one.batch, one.share, (), one.processes).latency_ms.value
            if one.share.sm_pct in PERCENTS
            else math.inf
            for one in workloads
        ]
        taken = [[device.fraction(one.share) * math.log2(1 + one.batch)] for one in workloads]
        return SummedTable(np.array(alone), np.array(taken), self.disturbance)


def problem(seed: int, *, kinds: int = 1, copies: int = 12, disturbed: bool = True) -> Problem:
    draw = random.Random(seed)
    classes = [(draw.uniform(50.0, 500.0), draw.uniform(20.0, 80.0)) for _ in range(2)]
    disturbance = draw.uniform(0.1, 0.6) if disturbed else 0.0
    estimator = SummedEstimator(disturbance=disturbance, spread=0.0, gaps=False, sizes=BATCHES, interval=0.0)
    demands = tuple(Demand(f"m{number}", rate, Slo(slo)) for number, (rate, slo) in enumerate(classes * copies))
    devices = [plain_device("first", 1.0), plain_device("second", 0.7)][:kinds]
    if kinds == 2:
        devices[1] = replace(devices[1], compute_units=60)
    entries = tuple(FleetEntry(one) for one in devices)
    return Problem(demands, Fleet(entries), estimator, ExponentialQueue(), Options(latency_budget=0.5))
