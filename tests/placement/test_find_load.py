import math
from collections.abc import Callable

import pytest

from gpuprof.placement.rate_limit import find_load


@pytest.mark.parametrize("crossing", [0.002, 0.0135, 0.04, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("shape", [math.sqrt, lambda load: load**3, lambda load: -1.0 / load])
def test_the_largest_load_in_time_is_found_where_tails_are_not_linear(
    crossing: float, shape: Callable[[float], float]
) -> None:
    limit_ms = shape(crossing) + 5.0
    assert find_load(lambda load: shape(load) + 5.0, limit_ms, 0.85) == pytest.approx(crossing, rel=0.1)
