"""Whatever is wrong with a map is found, with a database and without, and nothing is found in a sound one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Estimate, Figure, Workload
from gpuprof.domain.map_file import parse_map, read_map
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.pipeline.problem import make_queueing
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
from gpuprof.placement.evidence import Evidence
from gpuprof.placement.feasibility import check
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options, Problem
from gpuprof.rules.host_work import host_work_of_plan
from tests.placement.broken_maps import BREAKAGES, Breakage, Layout

GIVEN = problem([demand("a", 20.0), demand("b", 20.0)], [(plain_device(), 1), (sliced_device(), 1)])
POOL = problem([demand("a", 600.0)], [(plain_device(), 2)])
SPARE = problem([demand("a", 300.0)], [(plain_device(), 3)])
TOGETHER = problem([demand("a", 20.0), demand("b", 20.0)], [(plain_device(), 1)])
PROBLEMS: dict[Layout, Problem] = {
    "shared": GIVEN,
    "mig": GIVEN,
    "pool": POOL,
    "spare": SPARE,
    "unshared": TOGETHER,
}


def make_replica(model: str, pct: float, mig: str | None = None, rate_rps: float = 20.0) -> PlacedReplica:
    return PlacedReplica(model, 4, 1, Share(pct, mig), rate_rps, memory_bytes=2**30)


MAPS: dict[Layout, DeploymentMap] = {
    "unshared": to_map(
        TOGETHER,
        Placement(
            "by hand",
            (
                PlacedGpu(
                    "plain",
                    (PlacedPartition((make_replica("a", 100.0), make_replica("b", 100.0)), unshared=True),),
                ),
            ),
        ),
    ),
    "shared": to_map(
        GIVEN,
        Placement(
            "by hand", (PlacedGpu("plain", (PlacedPartition((make_replica("a", 50.0), make_replica("b", 50.0))),)),)
        ),
    ),
    "pool": to_map(
        POOL,
        Placement(
            "by hand",
            (
                PlacedGpu("plain", (PlacedPartition((make_replica("a", 50.0, rate_rps=150.0),) * 2),)),
                PlacedGpu("plain", (PlacedPartition((make_replica("a", 100.0, rate_rps=300.0),)),)),
            ),
        ),
    ),
    "spare": to_map(
        SPARE,
        Placement(
            "by hand", (PlacedGpu("plain", (PlacedPartition((make_replica("a", 100.0, rate_rps=100.0),)),)),) * 3
        ),
    ),
    "mig": to_map(
        GIVEN,
        Placement(
            "by hand",
            (
                PlacedGpu(
                    "sliced",
                    (
                        PlacedPartition((make_replica("a", 100.0, "3g.40gb"),), "3g.40gb", 0),
                        PlacedPartition((make_replica("b", 100.0, "3g.40gb"),), "3g.40gb", 4),
                    ),
                ),
            ),
        ),
    ),
}


def is_refused(breakage: Breakage, *, with_estimator: bool) -> bool:
    content = json.loads(MAPS[breakage.layout].to_json())
    breakage.edit(content)
    against = evidence(PROBLEMS[breakage.layout])
    against = against if with_estimator else replace(against, estimator=None)
    try:
        broken = parse_map(content, "broken")
        return bool(check(broken, _as_recorded(broken, against)))
    except InputError:
        return True


def _as_recorded(deployment: DeploymentMap, against: Evidence) -> Evidence:
    """Return the evidence with the settings that the map says it was planned with, as the command collects them."""
    settings = deployment.planned_with
    queueing = against.queueing
    if settings.arrivals is not None:
        queueing = make_queueing(settings.arrivals, deployment.models)
    return replace(
        against,
        queueing=queueing,
        confidence=settings.confidence,
        latency_budget=settings.latency_budget,
        overhead_ms=settings.overhead_ms,
        host=host_work_of_plan(settings),
    )


def test_every_breakage_has_a_name_of_its_own() -> None:
    assert Counter(breakage.name for breakage in BREAKAGES).most_common(1)[0][1] == 1


@pytest.mark.parametrize("layout", PROBLEMS)
def test_the_maps_are_sound_before_they_are_broken(layout: Layout) -> None:
    against = evidence(PROBLEMS[layout])
    assert check(MAPS[layout], against) == ()
    assert check(MAPS[layout], replace(against, estimator=None)) == ()


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda case: case.name)
def test_a_broken_map_is_refused_with_a_database(breakage: Breakage) -> None:
    assert is_refused(breakage, with_estimator=True)


@pytest.mark.parametrize(
    "breakage", [case for case in BREAKAGES if not case.needs_estimator], ids=lambda case: case.name
)
def test_a_broken_map_is_refused_without_a_database(breakage: Breakage) -> None:
    assert is_refused(breakage, with_estimator=False)


@pytest.mark.parametrize("name", ["latency_cv", "pause_cv", "latency_ms"])
@pytest.mark.parametrize("value", [1e9, 1e300])
def test_absurd_times_are_refused_before_a_queue_is_computed(name: str, value: float) -> None:
    content = json.loads(MAPS["pool"].to_json())
    content["nodes"][0]["gpus"][0]["partitions"][0]["replicas"][0]["predicted"][name] = value
    believed = replace(evidence(POOL), queueing=BatchQueue(), estimator=None)
    assert check(parse_map(content, "broken"), believed)


@pytest.mark.parametrize(
    ("whole", "twice"),
    [
        ('"batch": 4,', '"batch": 4, "batch": 8,'),
        ('"slo_ms": 100.0,', '"slo_ms": 100.0, "slo_ms": 1.0,'),
        ('"policy": "by hand",', '"policy": "by hand", "policy": "by hand",'),
        ('"models": {', '"models": {"a": {"rate_rps": 1.0, "slo_ms": 1.0},'),
    ],
)
def test_a_key_that_an_object_has_twice_is_refused(tmp_path: Path, whole: str, twice: str) -> None:
    text = MAPS["shared"].to_json()
    assert whole in text
    path = tmp_path / "map.json"
    path.write_text(text.replace(whole, twice, 1))
    with pytest.raises(InputError, match="in one object twice"):
        read_map(path)


@pytest.mark.parametrize("settings", [{"latency_budget": 2.0}, {"confidence": 1.5}, {"overhead_ms": -1.0}])
def test_settings_that_no_plan_can_have_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match="must be"):
        replace(evidence(GIVEN), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["ffd", "gslice", "optimal"])
@pytest.mark.parametrize("options", [Options(), Options(latency_budget=0.5), Options(confidence=0.9)])
def test_no_sound_map_is_refused(policy: str, options: Options) -> None:
    demands = [demand("a", 40.0), demand("b", 10.0, 60.0), demand("c", 300.0, 200.0)]
    for fleet in ([(plain_device(), None)], [(plain_device(), 1)]):
        given = problem(demands, fleet, options=options)
        _, deployment = solve_and_check(make_policy(policy), given)
        assert check(deployment, replace(evidence(given), estimator=None)) == ()


def test_faults_of_different_kinds_are_all_listed() -> None:
    content = json.loads(MAPS["mig"].to_json())
    first, second = content["nodes"][0]["gpus"][0]["partitions"]
    first["mig"]["start"] = 2
    second["replicas"][0]["sm_share_pct"] = 0.5
    second["replicas"][0]["memory_limit_bytes"] = 2**40
    content["models"]["a"]["slo_ms"] = 1.0
    content["models"]["b"]["rate_rps"] = 30.0
    content["nodes"].append({"name": "node1", "gpus": [{**content["nodes"][0]["gpus"][0], "device": "h900"}]})
    rules = {violation.rule for violation in check(parse_map(content, "broken"), evidence(GIVEN))}
    assert rules == {"geometry", "fleet", "share", "memory", "rate", "slo", "figures"}


@pytest.mark.parametrize("with_estimator", [True, False])
def test_a_device_without_shares_is_not_asked_for_more_than_its_time(with_estimator: bool) -> None:
    demands = [demand("a", 500.0), demand("b", 500.0)]  # each needs three quarters of a device in batches of 4
    given = problem(demands, [(plain_device(), 1)])
    partition = PlacedPartition(
        (make_replica("a", 100.0, rate_rps=500.0), make_replica("b", 100.0, rate_rps=500.0)), unshared=True
    )
    deployment = to_map(given, Placement("by hand", (PlacedGpu("plain", (partition,)),)))
    against = evidence(given)
    broken = check(deployment, against if with_estimator else replace(against, estimator=None))
    assert [str(violation) for violation in broken] == [
        "time: node0 gpu 0: the replicas ask for 150% of the device's time"
    ]


class UsherPremise(LinearEstimator):
    """A share of a fifth slows no batch down, whatever runs beside it."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        alone = LinearEstimator.estimate(self, model, device, batch, Share(), (), processes)
        required = (("wavg_occupancy", Figure(20.0, MEASURED)), *self.utilization())
        return replace(
            alone,
            latency_ms=Figure(alone.latency_ms.value, "USHER's premise"),
            creq_pct=required,
            workload=alone.workload,
        )

    def utilization(self) -> tuple[tuple[str, Figure], ...]:
        return ()


class HalfActive(UsherPremise):
    """Batches keep half of the SMs active, as was measured."""

    def utilization(self) -> tuple[tuple[str, Figure], ...]:
        return (("wavg_sm_util", Figure(50.0, MEASURED)),)


@pytest.mark.parametrize(("estimator", "message"), [(UsherPremise(), "180%"), (HalfActive(), None)])
def test_shares_that_cost_nothing_do_not_make_a_device_twice_as_fast(
    estimator: LinearEstimator, message: str | None
) -> None:
    given = problem([demand(name, 400.0) for name in "abc"], [(plain_device(), 1)], estimator=estimator)
    replicas = tuple(make_replica(name, 20.0, rate_rps=400.0) for name in "abc")
    deployment = to_map(given, Placement("by hand", (PlacedGpu("plain", (PlacedPartition(replicas),)),)))
    shares = [str(violation) for violation in check(deployment, evidence(given)) if violation.rule == "time"]
    expected = f"time: node0 gpu 0: the replicas ask for {message} of the device's time"
    assert shares == ([] if message is None else [expected])
