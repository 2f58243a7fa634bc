from __future__ import annotations

from dataclasses import replace

import pytest

from bench.placement_problems import KINDS, Kind, draw_problem
from gpuprof.errors import GpuprofError
from gpuprof.placement.optimal.incumbent import objective_value
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.policies import make_policy

#: Policies that take milliseconds for the problems here.
QUICK = ("igniter", "parvagpu", "gslice", "gpulet", "ffd", "mig-serving", "alpaserve", "paris-elsa", "shepherd")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 4])
def test_however_short_the_limit_no_quick_policy_has_a_better_map(kind: Kind, seed: int) -> None:
    given = draw_problem(kind, seed)
    limited = replace(given, options=replace(given.options, time_limit_s=1e-3))
    found = objective_value(given, Optimal().place(limited))
    for name in QUICK:
        try:
            other = objective_value(given, make_policy(name).place(given))
        except GpuprofError:
            continue  # not made for such a fleet
        assert found <= other, name
