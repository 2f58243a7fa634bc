from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import gpuprof
from bench.baselines.alpaserve import AlpaServe
from bench.baselines.mig_serving import MigServing
from bench.baselines.paris_elsa import ParisElsa
from bench.baselines.shepherd import Shepherd
from gpuprof.cli.output import Format
from gpuprof.cli.place import print_map
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.pipeline.problem import PlanningOptions
from gpuprof.placement.contract import (
    LinearEstimator,
    demand,
    evidence,
    plain_device,
    problem,
    sliced_device,
    solve_and_check,
)
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import check
from gpuprof.placement.optimal.optimal import Optimal
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options
from gpuprof.placement.published.gpulet import Gpulet
from gpuprof.rules.host_work import HostWork
from tests.placement.table import TabledEstimator

BUDGET = Options(latency_budget=0.5)
HOST = HostWork(handover_ms=0.5, host_ms=1.0, host_cores=4)
POLICIES = ("optimal", "ffd", "milp", "igniter", "gslice", "usher", "gpulet")


def test_gpulet_puts_two_workloads_on_a_gpu_and_gives_the_second_all_that_is_left() -> None:
    # by falling rate: batch 4 under 50% takes 12 ms for 333/s, under 40% 15 ms for 267/s
    given = problem([demand("first", 250.0, 40.0), demand("second", 20.0, 40.0)], options=BUDGET)
    placement, _ = solve_and_check(Gpulet(), given)
    shares = [(replica.model, replica.share.sm_pct) for gpu in placement.gpus for replica in gpu.replicas()]
    assert len(placement.gpus) == 1
    assert shares[0][0] == "first"
    assert shares[1] == ("second", 100.0 - shares[0][1])


def test_gpulet_passes_over_a_batch_that_is_listed_and_refused() -> None:
    # of two batches at half a GPU the larger was measured; the smaller one is listed, and ruled out where it is asked
    estimator = TabledEstimator({Workload("m", 4, Share(50.0)): 400.0})
    given = replace(problem([demand("m", 300.0, 40.0)], options=BUDGET), estimator=_Listing(estimator.throughput_rps))
    placement, _ = solve_and_check(Gpulet(), given)
    assert [replica.batch for gpu in placement.gpus for replica in gpu.replicas()] == [4]


class _Listing(TabledEstimator):
    """Lists a batch that it refuses."""

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return (1, *super().batches(model, device, share))


def test_gpulet_never_has_more_than_two_partitions_on_a_gpu() -> None:
    placement, _ = solve_and_check(Gpulet(), problem([demand(f"m{i}", 2.0, 200.0) for i in range(9)]))
    assert max(len(list(gpu.replicas())) for gpu in placement.gpus) == 2
    assert len(placement.gpus) == 5


def test_gpulet_does_not_put_together_what_cannot_bear_each_other() -> None:
    estimator = LinearEstimator(slowdown=5.0)
    placement, _ = solve_and_check(
        Gpulet(), problem([demand("a", 50.0, 40.0), demand("b", 50.0, 40.0)], estimator=estimator)
    )
    assert len(placement.gpus) == 2


def test_gpulet_that_regards_no_neighbours_puts_them_together_and_its_map_says_what_it_breaks() -> None:
    given = problem([demand("a", 50.0, 40.0), demand("b", 50.0, 40.0)], estimator=LinearEstimator(slowdown=5.0))
    placement = Gpulet(aware=False).place(given)
    assert len(placement.gpus) == 1
    assert check(to_map(given, placement), evidence(given))


def test_mig_serving_takes_the_most_useful_configuration_first() -> None:
    table = TabledEstimator(
        {
            Workload(model, 1, Share(100.0, profile), 1): rate
            for model, rates in {"a": (50.0, 400.0), "b": (60.0, 100.0)}.items()
            for profile, rate in zip(("1g.10gb", "7g.80gb"), rates, strict=True)
        }
    )
    given = problem([demand("a", 400.0, 60.0), demand("b", 60.0, 60.0)], [(sliced_device(), None)], options=BUDGET)
    placement, _ = solve_and_check(MigServing(), replace(given, estimator=table))
    # seven slices score 1 for all of b and something for 300 of a, a whole GPU for a scores 1; the missing 100 then
    # get a whole GPU, the overallocation that ParvaGPU (SC'24 §IV-B2) sees in it
    assert [len(gpu.partitions) for gpu in placement.gpus] == [7, 1]
    assert placement.unplaced == ()


def test_optimal_needs_no_more_than_any() -> None:
    demands = [demand(f"m{i}", 120.0 + 40.0 * i, 50.0) for i in range(5)]
    given = problem(demands, [(sliced_device(), None)], options=BUDGET)
    best = len(solve_and_check(Optimal(), given)[0].gpus)
    for policy in (Gpulet(), MigServing(), Shepherd(), AlpaServe(), ParisElsa()):
        assert best <= len(solve_and_check(policy, given)[0].gpus), policy


def test_shepherd_gives_each_device_to_the_model_that_gains_most_from_it() -> None:
    # A whole device takes 10 ms for a batch of eight: 800/s. After the first device a has 100/s left, b all its 150.
    demands = [demand("a", 900.0, 60.0), demand("b", 150.0, 60.0)]
    placement, _ = solve_and_check(Shepherd(), problem(demands, [(plain_device(), 2)], options=BUDGET))
    assert [
        [(replica.model, replica.batch, replica.rate_rps) for replica in gpu.replicas()] for gpu in placement.gpus
    ] == [
        [("a", 8, 800.0)],
        [("b", 8, 150.0)],
    ]
    assert {shortfall.model: shortfall.rate_rps for shortfall in placement.unplaced} == pytest.approx({"a": 100.0})
    assert len(solve_and_check(Shepherd(), problem(demands, options=BUDGET))[0].gpus) == 3


def test_alpaserve_puts_the_model_with_most_unserved_on_the_device_that_is_used_least() -> None:
    # Batches of eight under 25, 50, 100% serve 200, 400, 800/s: c takes a device, then a half of the other, then b.
    demands = [demand("a", 300.0), demand("b", 200.0), demand("c", 500.0)]
    placement, _ = solve_and_check(AlpaServe(), problem(demands, [(plain_device(), 2)], options=BUDGET))
    assert [{(replica.model, replica.share.sm_pct) for replica in gpu.replicas()} for gpu in placement.gpus] == [
        {("c", 100.0)},
        {("a", 50.0), ("b", 25.0)},
    ]


@pytest.mark.parametrize(("slo_ms", "profile", "count"), [(200.0, "1g.10gb", 3), (60.0, "2g.20gb", 2)])
def test_paris_takes_the_smallest_instance_that_the_batch_at_its_knee_suits(
    slo_ms: float, profile: str, count: int
) -> None:
    # Of all sizes the knee is a batch of four, 667 a second of a whole device: 86/s in one slice, 173/s in two. Within
    # 30 ms one slice holds no more than a batch of one, 43/s.
    given = problem([demand("m", 200.0, slo_ms)], [(sliced_device(), None)], options=BUDGET)
    placement, _ = solve_and_check(ParisElsa(), given)
    replicas = [replica for gpu in placement.gpus for replica in gpu.replicas()]
    assert [replica.share.mig for replica in replicas].count(profile) == count - (profile == "2g.20gb")
    assert len(replicas) == count
    assert {replica.batch for replica in replicas if replica.share.mig == profile} == {4}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("rate_rps", [20.0, 150.0, 400.0])
def test_the_map_of_every_policy_is_sound_with_it(name: str, rate_rps: float) -> None:
    demands = [demand("a", rate_rps, 60.0), demand("b", rate_rps / 2, 80.0)]
    given = problem(demands, [(plain_device(), 1)], LinearEstimator(), Options(host=HOST))
    placement, deployment = solve_and_check(make_policy(name), given)
    for *_, replica in deployment.places():
        assert replica.batch_latency_ms is not None
        assert replica.rate_rps < 1000.0 * replica.batch * replica.processes / replica.batch_latency_ms[-1]
    calm, _ = solve_and_check(make_policy(name), problem(demands, [(plain_device(), 1)], LinearEstimator(), Options()))
    served, without = (sum(shortfall.rate_rps for shortfall in plan.unplaced) for plan in (placement, calm))
    assert served >= without - 1e-6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("unprofiled")
    return [gpuprof.build_model(name, folder / f"{name}.onnx") for name in ("random_cnn", "mlp")]


@pytest.mark.parametrize("policy", ["usher", "milp"])
def test_a_policy_by_requirements_places_files_that_nobody_profiled(policy: str, files: list[Path]) -> None:
    demands = [gpuprof.Demand(str(file), rate_rps=50.0, slo=gpuprof.Slo(200.0)) for file in files]
    plan = gpuprof.place(demands, fleet="v100:2", policy=policy, options=PlanningOptions(latency_budget=0.5))
    assert plan.is_complete
    for row in plan.rows():
        assert row["creq_metric"] == "max_occupancy"
        low, value, high = (float(str(row[f"creq_{name}"])) for name in ("low_pct", "pct", "high_pct"))
        assert 0.0 <= low <= value <= high <= 100.0
        assert float(str(row["share_pct"])) == pytest.approx(2.5 * round(float(str(row["share_pct"])) / 2.5))
        assert float(str(row["share_pct"])) >= value - 1e-6
        least, needed, most = (float(str(row[f"mreq_{name}"])) for name in ("low_bytes", "bytes", "high_bytes"))
        assert 0.0 < least <= needed <= most
    for *_, replica in plan.deployment.places():
        assert replica.predicted.mreq is not None and replica.predicted.mreq.interval_bytes is not None
        # a guess is planned at its upper end, and is no limit that a process could be ended by
        assert replica.predicted.memory_bytes == pytest.approx(replica.predicted.mreq.interval_bytes[1], abs=2.0)
        assert replica.memory_limit_bytes is None


def test_the_json_says_the_interval(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    demands = [gpuprof.Demand(str(files[1]), rate_rps=50.0, slo=gpuprof.Slo(200.0))]
    options = PlanningOptions(latency_budget=0.5)
    plan = gpuprof.place(demands, fleet="v100:1", policy="usher", options=options)
    print_map(plan, Format.JSON)
    assert json.loads(capsys.readouterr().out)["replicas"][0]["creq_high_pct"] <= 100.0
    (*_, replica) = next(plan.deployment.places())
    assert replica.predicted.creq is not None and replica.predicted.creq.source.startswith("creq from launches")


def test_a_profiled_requirement_above_a_hundred_counts_as_the_whole_device() -> None:
    from gpuprof.placement.published.milp import _required_pct

    assert _required_pct(Figure(130.0, MEASURED)) == 100.0
    assert _required_pct(Figure(41.3, MEASURED)) == 41.3
    assert _required_pct(Figure(41.3, "creq from launches: float32, eager")) == 42.5
