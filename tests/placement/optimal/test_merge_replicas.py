from __future__ import annotations

from gpuprof.domain.share import Share
from gpuprof.placement.contract import demand, problem
from gpuprof.placement.optimal.program_plan import merge_replicas
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica
from gpuprof.placement.problem import Options
from gpuprof.placement.segment import Segments

GIVEN = problem([demand("a", 200.0), demand("b", 50.0)], options=Options(latency_budget=0.9))
SEGMENTS = Segments(GIVEN)
CHOICES = {demand.model: SEGMENTS.best(demand, GIVEN.fleet.entries[0].device) for demand in GIVEN.demands}


def replica(model: str, rate: float) -> PlacedReplica:
    return PlacedReplica(model, 8, 1, Share(25.0), rate, memory_bytes=2**30)


def models(*replicas: PlacedReplica) -> list[tuple[str, float, float]]:
    (gpu,) = merge_replicas(GIVEN, SEGMENTS, CHOICES, [PlacedGpu("plain", (PlacedPartition(replicas),))])
    return sorted((replica.model, replica.share.sm_pct, replica.rate_rps) for replica in gpu.replicas())


def test_two_replicas_in_one_partition_become_one_that_does_as_much() -> None:
    assert models(replica("a", 100.0), replica("b", 50.0), replica("a", 100.0)) == [
        ("a", 25.0, 200.0),
        ("b", 25.0, 50.0),
    ]


def test_what_one_replica_cannot_serve_stays_divided() -> None:
    assert len(models(replica("a", 201.0), replica("a", 201.0), replica("b", 50.0))) == 3
