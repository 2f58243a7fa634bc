"""Errors of the interference models on measured co-locations, leaving out a model in both roles, a victim or a pair.

    python -m bench.interference [DIRECTORY]

DIRECTORY (../shared/reference/igniter_v100 unless given) holds config.jsonl (iGniter's profile of a V100 and its
models) and pairs.csv (latencies of pairs under MPS). Prints the coefficients of the hardware, the plan of the paper's
section 2.3, a table of errors, and errors and intervals with each model left out as victim and as neighbour: the fits
see nothing of it. The interval that is judged on a model is that of the rows in which the others were left out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bench.published_pairs import fit_all, read_igniter_profile, read_pairs
from gpuprof.estimators.conformal import quantile
from gpuprof.estimators.igniter.igniter import HardwareCoefficients, WorkloadCoefficients
from gpuprof.estimators.interference.colocation import (
    ColocatedWorkload,
    ConstantInterference,
    ContentionModel,
    IgniterInterference,
    InterferenceModel,
    LeftOutRow,
    NoInterference,
    RunningWorkload,
    TrafficInterference,
    leave_out,
)

_REFERENCE = Path("../shared/reference/igniter_v100")
#: Section 2.3 of the paper: model, SLO in ms, requests/s.
EXAMPLE = (("alexnet", 15.0, 500.0), ("resnet50", 40.0, 400.0), ("vgg19", 60.0, 200.0))


@dataclass(frozen=True, slots=True)
class InterferenceError:
    """Error of a model."""

    model: str
    left_out: str  #: ``"pair"`` of models or ``"victim"`` model.
    rows: int
    #: ``mean_pct``, ``p95_pct``, ``worst_pct``: Of the absolute relative error of the latency.
    mean_pct: float
    p95_pct: float
    worst_pct: float


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=_REFERENCE)
    directory = parser.parse_args().directory
    hardware, workloads = fit_all(*read_igniter_profile(directory / "config.jsonl"))
    print(f"alpha_f {hardware.alpha_f:.3f}  alpha_sch {hardware.alpha_sch:.5f}  beta_sch {hardware.beta_sch:.5f}")
    print_bounds(hardware, workloads)
    print_errors(directory / "pairs.csv", hardware, workloads)
    return 0


def appropriate_batch(
    hardware: HardwareCoefficients, workload: WorkloadCoefficients, slo_ms: float, rate_rps: float
) -> int:
    """Return b_appr, the batch that just meets the rate (equation 17)."""
    rate, pcie = rate_rps / 1000.0, hardware.pcie_bytes_per_ms
    batch = slo_ms * rate * pcie / (2.0 * (pcie + rate * workload.load_bytes))
    return max(1, math.ceil(batch - 1e-9))


def lower_bound_share(
    hardware: HardwareCoefficients, workload: WorkloadCoefficients, slo_ms: float, batch: int
) -> float | None:
    """Return r_lower, the least share that meets half of the SLO alone (equation 18).

    None where no share does: the fixed parts alone take longer, or more than the whole GPU would be needed.
    """
    k1, k2, k3, k4, k5 = workload.active
    transfer = (workload.load_bytes + workload.feedback_bytes) * batch / hardware.pcie_bytes_per_ms
    left = slo_ms / 2.0 - transfer - k5 - workload.launch_ms * workload.kernels
    if left <= 0.0:
        return None
    steps = ((k1 * batch**2 + k2 * batch + k3) / left - k4) / hardware.share_unit
    share = max(1, math.ceil(steps - 1e-9)) * hardware.share_unit
    return share if share <= 1.0 + 1e-9 else None


def evaluate(
    name: str, make: Callable[[], InterferenceModel], measured: Sequence[ColocatedWorkload], left_out: str
) -> InterferenceError:
    """Fit a fresh model without each group in turn and predict the group.

    Parameters
    ----------
    left_out : {"pair", "victim"}
    """
    rows = leave_out(make, measured, left_out)
    errors = np.abs(1.0 / np.array([row.ratio for row in rows]) - 1.0)
    percent = 100.0 * errors
    return InterferenceError(
        name, left_out, len(errors), float(percent.mean()), float(np.percentile(percent, 95)), float(percent.max())
    )


class LinearInterference:
    """gpulet's model (ATC'22): a linear function of both sides' L2 and DRAM utilisation, by least squares."""

    def fit(self, measured: Sequence[ColocatedWorkload]) -> Self:
        """Fit the five coefficients."""
        features = np.array([self._features(row.victim, row.beside) for row in measured])
        slowdowns = np.array([row.slowdown for row in measured])
        self.weights_ = np.linalg.lstsq(features, slowdowns, rcond=None)[0]
        return self

    def slowdown(self, victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> float:
        """Return the linear function."""
        return max(1.0, float(self._features(victim, beside) @ self.weights_)) if beside else 1.0

    @staticmethod
    def _features(victim: RunningWorkload, beside: Sequence[RunningWorkload]) -> NDArray[np.float64]:
        return np.array(
            [
                1.0,
                victim.l2_pct,
                sum(neighbour.l2_pct for neighbour in beside),
                victim.dram_pct,
                sum(neighbour.dram_pct for neighbour in beside),
            ]
        )


def print_bounds(hardware: HardwareCoefficients, workloads: dict[str, WorkloadCoefficients]) -> None:
    """Print batch and share alone of the example's three models."""
    for name, slo, rate in EXAMPLE:
        batch = appropriate_batch(hardware, workloads[name], slo, rate)
        share = lower_bound_share(hardware, workloads[name], slo, batch)
        print(f"{name}: batch {batch}, share alone {'none' if share is None else f'{100 * share:g}%'}")


def print_errors(path: Path, hardware: HardwareCoefficients, workloads: dict[str, WorkloadCoefficients]) -> None:
    """Print a line for each model and way to leave out."""
    models: dict[str, Callable[[], InterferenceModel]] = {
        "none": NoInterference,
        "constant": ConstantInterference,
        "gpulet linear": LinearInterference,
        "traffic": TrafficInterference,
        "igniter": lambda: IgniterInterference(hardware, workloads),
        "contention": lambda: ContentionModel(hardware),
    }
    measured = read_pairs(path, hardware, workloads)
    print(f"{'model':14} {'left out':10} {'mean %':>7} {'p95 %':>7} {'worst %':>8}   ({len(measured)} latencies)")
    for name, make in models.items():
        for left_out in ("victim", "pair"):
            error = evaluate(name, make, measured, left_out)
            print(f"{name:14} {left_out:10} {error.mean_pct:7.2f} {error.p95_pct:7.2f} {error.worst_pct:8.2f}")
    print_unseen_models(models, measured)


def print_unseen_models(
    models: Mapping[str, Callable[[], InterferenceModel]], measured: Sequence[ColocatedWorkload]
) -> None:
    """Print errors in percent with each model left out in both roles, and how often the interval held its latencies."""
    names = sorted({row.victim.model for row in measured})
    columns = "".join(f"{f'{name} as victim':>20}{'neighbour':>11}" for name in names)
    print(f"\n{'left out':14} {'mean %':>7}{columns}   interval holds (each model, by the others)")
    for name, make in models.items():
        rows = leave_out(make, measured, "model")
        cells = ""
        for model in names:
            as_victim, beside = (_mean_pct([r for r in rows if r.unit == model and r.is_victim == v]) for v in (1, 0))
            cells += f"{as_victim:20.2f}{beside:11.2f}"
        held = " ".join(f"{100 * _coverage(rows, model):.0f}%" for model in names)
        print(f"{name:14} {_mean_pct(rows):7.2f}{cells}   {held}")


def _mean_pct(rows: Sequence[LeftOutRow]) -> float:
    return float(np.mean([100.0 * abs(1.0 / row.ratio - 1.0) for row in rows]))


def _coverage(rows: Sequence[LeftOutRow], model: str) -> float:
    """Return how often the interval made of the other models' rows holds those of ``model``."""
    factor = quantile((max(row.ratio, 1.0 / row.ratio) for row in rows if row.unit != model), 0.95) or 1.0
    ratios = [max(row.ratio, 1.0 / row.ratio) for row in rows if row.unit == model]
    return float(np.mean([ratio <= factor for ratio in ratios]))


if __name__ == "__main__":
    raise SystemExit(main())
