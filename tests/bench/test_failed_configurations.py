"""No map asks for what failed in its database, whoever plans it and by whichever estimator."""

from __future__ import annotations

import pytest

from bench.failed_configurations import ESTIMATORS, judge_maps
from gpuprof.placement.policies import policy_names

#: Seeds of a database of a V100 under shares, and of one of an A100 in MIG instances.
SHARED, CUT = 1, 5


@pytest.mark.slow
def test_no_map_holds_a_configuration_that_failed_or_is_dominated_by_one() -> None:
    found = [one for seed in (SHARED, CUT) for one in judge_maps(seed, policy_names(), 0.05)]
    assert [(policy, estimator, broken) for policy, estimator, _, broken in found if broken] == []
    assert {estimator for _, estimator, count, _ in found if count} == set(ESTIMATORS)
    assert {policy for policy, _, count, _ in found if count} == set(policy_names())


@pytest.mark.slow
def test_the_judge_sees_what_must_not_be_in_a_map() -> None:
    found = [broken for seed in (SHARED, CUT) for *_, broken in judge_maps(seed, ["ffd"], hides_failures=True)]
    assert sum(map(len, found)) > 3
