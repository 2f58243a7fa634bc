from collections.abc import Callable

import pytest

from bench.baselines.alpaserve import AlpaServe
from bench.baselines.mig_serving import MigServing
from bench.baselines.paris_elsa import ParisElsa
from bench.baselines.shepherd import Shepherd
from gpuprof.placement.contract import PolicyContract, plain_device, sliced_device
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.policies import Policy
from gpuprof.placement.problem import Options
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.gpulet import Gpulet
from gpuprof.placement.published.gslice import Gslice
from gpuprof.placement.published.igniter import Igniter
from gpuprof.placement.published.milp import Milp
from gpuprof.placement.published.parvagpu import ParvaGpu
from gpuprof.placement.published.usher import Usher

SLICED, BOTH = ((sliced_device(), None),), ((sliced_device(), None), (plain_device(), None))
HALF_BUDGET = Options(latency_budget=0.5)
#: Test class -> policy, and fields of the contract.
CASES: dict[str, tuple[Callable[[], Policy], dict[str, object]]] = {
    "FirstFitDecreasing": (FirstFitDecreasing, {}),
    "FirstFitDecreasingOnSlicedDevices": (FirstFitDecreasing, {"fleet": SLICED}),
    "FirstFitDecreasingOnTwoKinds": (FirstFitDecreasing, {"fleet": BOTH}),
    "ParvaGpu": (ParvaGpu, {"fleet": SLICED}),
    "ParvaGpuSingleUnoptimized": (lambda: ParvaGpu(single=True, unoptimized=True), {"fleet": SLICED}),
    "Optimal": (Optimal, {}),
    "OptimalOnSlicedDevices": (Optimal, {"fleet": SLICED}),
    "OptimalOnTwoKinds": (Optimal, {"fleet": BOTH}),
    "Usher": (Usher, {}),
    "UsherOnTwoKinds": (Usher, {"fleet": BOTH}),
    "Milp": (Milp, {"fleet": ((plain_device(), 8),), "many": 10}),
    "Igniter": (Igniter, {}),
    "IgniterByThePapersRule": (Igniter, {"options": HALF_BUDGET}),
    "Gpulet": (Gpulet, {}),
    "GpuletInTurn": (lambda: Gpulet(temporal=True), {}),
    "Gslice": (Gslice, {}),
    "GsliceByThePapersRule": (Gslice, {"options": HALF_BUDGET}),
    "MigServing": (MigServing, {"fleet": SLICED}),
    "Shepherd": (Shepherd, {}),
    "ShepherdOnSlicedDevices": (Shepherd, {"fleet": SLICED}),
    "AlpaServe": (AlpaServe, {}),
    "AlpaServeOnSlicedDevices": (AlpaServe, {"fleet": SLICED}),
    "ParisElsa": (ParisElsa, {"fleet": SLICED}),
}


def make_contract(name: str, make_policy: Callable[[], Policy], fields: dict[str, object]) -> type[PolicyContract]:
    """Return the contract's test class for a policy; the slow policies' are marked."""
    members = {"policy": lambda self: make_policy(), "__module__": __name__, **fields}
    contract = type(f"Test{name}", (PolicyContract,), members)
    return pytest.mark.slow(contract) if name.startswith("OptimalOn") else contract


globals().update({f"Test{name}": make_contract(name, *case) for name, case in CASES.items()})
