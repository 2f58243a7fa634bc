"""The estimator's word on neighbours, as a multiple of what the map says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.pipeline.simulate import over_all_neighbours
from gpuprof.simulator.cluster import places_of
from tests.simulator.maps import make_map, replica


class Half:
    """Half as slow again for each neighbour."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        self.asked.append((model, [neighbour.model for neighbour in beside]))
        time = Figure(10.0 * (1.0 + 0.5 * len(beside)), "test")
        return Estimate(Workload(model, batch, share, processes), "a100-80", time)

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return (1,)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        return (Share(100.0),)


def test_a_batch_beside_some_neighbours_is_compared_with_one_beside_all() -> None:
    from gpuprof.domain.catalogue import device

    places = places_of(
        make_map([[replica("a", [5.0]), replica("b", [5.0]), replica("c", [5.0])], [replica("d", [1.0])]])
    )
    estimator = Half()
    ask = over_all_neighbours(estimator, {"a100-80": device("a100-80")})
    assert ask(places[0], [places[2]]) == pytest.approx(1.5 / 2.0)
    assert estimator.asked == [("a", ["c"]), ("a", ["b", "c"])]
    assert ask(places[0], [places[1], places[2]]) == 1.0
    assert ask(places[3], []) == 1.0
