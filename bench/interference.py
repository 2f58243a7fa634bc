"""Errors of the interference models on measured co-locations, leaving out a pair of models or a victim model.

    python -m bench.interference [DIRECTORY]

DIRECTORY (../shared/reference/igniter_v100 unless given) holds config.jsonl (iGniter's profile of a V100 and its
models) and pairs.csv (latencies of pairs under MPS). Prints the coefficients of the hardware, the plan of the paper's
section 2.3 and a table of errors. The fits see only what is not left out; no coefficient was chosen by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from gpuprof.estimators.igniter.fit import fit_all
from gpuprof.estimators.igniter.igniter import (
    HardwareCoefficients,
    WorkloadCoefficients,
    appropriate_batch,
    lower_bound_share,
)
from gpuprof.estimators.igniter.profile import read_igniter_profile
from gpuprof.estimators.interference.judgement import evaluate, read_pairs
from gpuprof.estimators.interference.models import (
    ConstantInterference,
    ContentionModel,
    IgniterInterference,
    InterferenceModel,
    LinearInterference,
    NoInterference,
)

_REFERENCE = Path("../shared/reference/igniter_v100")
#: Section 2.3 of the paper: model, SLO in ms, requests/s.
EXAMPLE = (("alexnet", 15.0, 500.0), ("resnet50", 40.0, 400.0), ("vgg19", 60.0, 200.0))


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
        "igniter": lambda: IgniterInterference(hardware, workloads),
        "ours": lambda: ContentionModel(hardware),
    }
    measured = read_pairs(path, hardware, workloads)
    print(f"{'model':14} {'left out':10} {'mean %':>7} {'p95 %':>7} {'worst %':>8}   ({len(measured)} latencies)")
    for name, make in models.items():
        for left_out in ("victim", "pair", "nothing"):
            error = evaluate(name, make, measured, left_out)
            print(f"{name:14} {left_out:10} {error.mean_pct:7.2f} {error.p95_pct:7.2f} {error.worst_pct:8.2f}")


if __name__ == "__main__":
    raise SystemExit(main())
