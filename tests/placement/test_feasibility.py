import ast
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprof.domain.demand import Demand, Slo
from gpuprof.domain.deployment import DeploymentMap, parse_map
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Estimate, FailedRun, Figure, TriedRuns, Workload
from gpuprof.domain.host_work import HostWork
from gpuprof.domain.share import Share
from gpuprof.domain.sojourn import Arrivals, BatchServer
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.placement import feasibility
from gpuprof.placement.contract import LinearEstimator, demand, evidence, plain_device, problem, sliced_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.feasibility import Evidence, Violation, check, check_layout, find_unknown_memory
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.problem import Options

GIVEN = problem([demand("a", 20.0), demand("b", 20.0)], [(plain_device(), 2), (sliced_device(), 2)])


def replica(model: str = "a", pct: float = 50.0, rate: float = 20.0, mig: str | None = None) -> PlacedReplica:
    return PlacedReplica(model, 4, 1, Share(pct, mig), rate, memory_bytes=2**30)


def instance(model: str, profile: str, start: int, rate: float = 20.0) -> PlacedPartition:
    return PlacedPartition((replica(model, 100.0, rate, profile),), profile, start)


def draw_map(*gpus: PlacedGpu) -> DeploymentMap:
    return to_map(GIVEN, Placement("by hand", gpus))


def whole(*replicas: PlacedReplica) -> PlacedGpu:
    return PlacedGpu("plain", (PlacedPartition(replicas),))


SOUND = draw_map(whole(replica("a"), replica("b")))


def edit_map(change: Callable[[dict[str, Any]], object], sound: DeploymentMap = SOUND) -> DeploymentMap:
    content = sound.model_dump(mode="json", by_alias=True)
    change(content)
    return parse_map(content, "edited")


def rules(deployment: DeploymentMap) -> list[str]:
    return [violation.rule for violation in check(deployment, evidence(GIVEN))]


def first_gpu(content: dict[str, Any]) -> Any:
    return content["nodes"][0]["gpus"][0]


class _Working(LinearEstimator):
    """Tells the work of a request, whatever its times."""

    work = Figure(24.0, "predicted", 20.0, 36.0)

    def board_work_ms(self, model: str, device: Device) -> Figure:
        return self.work


def test_a_device_that_is_given_more_work_than_a_second_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = replace(evidence(GIVEN), estimator=_Working(), confidence=0.0)
    assert [
        violation for violation in check(SOUND, given) if "seconds of the whole device's work" in violation.message
    ] == []
    at_upper_end = replace(given, confidence=None)
    overload = Violation(
        "rate", "node0 gpu 0", "its replicas are given 1.44 seconds of the whole device's work a second"
    )
    assert overload in check(SOUND, at_upper_end)
    monkeypatch.setattr(_Working, "work", Figure(30.0, "measured"))  # estimates may promise more than was measured
    assert overload.message not in {violation.message for violation in check(SOUND, at_upper_end)}
    monkeypatch.setattr(_Working, "work", Figure(43.75, "measured"))
    assert "1.75 seconds" in " ".join(violation.message for violation in check(SOUND, at_upper_end))


def test_a_replica_that_is_placed_twice_is_its_own_neighbour() -> None:
    twice = replica("a", 40.0)
    shared = PlacedPartition((twice, twice, replica("b", 20.0)))
    assert sorted(workload.model for workload in shared.beside(twice)) == ["a", "b"]
    assert PlacedPartition((replica("a", 50.0), twice)).beside(replica("c")) != ()


@pytest.mark.parametrize(("rate", "broken"), [(300.0, []), (400.0, ["time"])])
def test_oversubscribed_shares_are_ceilings_and_the_time_is_still_one(rate: float, broken: list[str]) -> None:
    shared = PlacedPartition((replica("a", 80.0, rate), replica("b", 80.0, rate)), oversubscribed=True)
    given = problem([demand("a", rate, 1000.0), demand("b", rate, 1000.0)], [(plain_device(), 2)])
    deployment = to_map(given, Placement("by hand", (PlacedGpu("plain", (shared,)),)))
    assert [violation.rule for violation in check(deployment, evidence(given))] == broken
    on_cpu = replace(evidence(given), devices={"plain": replace(plain_device(), kind="cpu")})
    assert "plain cannot be oversubscribed: its replicas are held to cores" in {
        violation.message for violation in check(deployment, on_cpu)
    }


def test_memory_beyond_the_devices_is_refused() -> None:
    big = replace(GIVEN, estimator=LinearEstimator(memory_bytes=9 * 2**30))
    violations = check(SOUND, evidence(big))
    assert {violation.rule for violation in violations} == {"memory", "figures"}
    assert "the replicas hold 18 GiB of 16 GiB" in [violation.message for violation in violations]


@pytest.mark.parametrize(("limit", "broken"), [(1, ["memory"]), (2**20 - 1, ["memory"]), (2**20, [])])
def test_no_process_is_held_to_less_than_a_mebibyte_even_if_memory_is_unknown(limit: int, broken: list[str]) -> None:
    nobody = replace(evidence(GIVEN), estimator=None)

    def hold(content: dict[str, Any]) -> None:
        for replica in first_gpu(content)["partitions"][0]["replicas"]:
            replica["memory_limit_bytes"], replica["predicted"]["memory_bytes"] = limit, None

    violations = [violation for violation in check(edit_map(hold), nobody) if "may hold" in violation.message]
    assert [violation.rule for violation in violations] == broken * 2
    assert find_unknown_memory(edit_map(hold), nobody) == ("a", "b")
    assert find_unknown_memory(edit_map(hold), evidence(GIVEN)) == ()


def test_what_is_named_as_unplaced_counts_unless_checked_against_an_slo_file() -> None:
    def drop(content: dict[str, Any]) -> None:
        first_gpu(content)["partitions"][0]["replicas"].pop()
        content["unplaced"] = [{"model": "b", "rate_rps": 20.0, "reason": "no room"}]

    dropped = edit_map(drop)
    assert "rate" not in rules(dropped)
    against = replace(evidence(GIVEN), demands=GIVEN.demands)
    assert [broken.where for broken in check(dropped, against) if broken.rule == "rate"] == ["b"]


def test_interference_beside_counts() -> None:
    slowed = replace(GIVEN, estimator=LinearEstimator(slowdown=9.0))
    assert {violation.rule for violation in check(SOUND, evidence(slowed))} == {"slo", "figures"}


def test_planning_with_confidence_is_checked_with_confidence() -> None:
    unsure = replace(GIVEN, estimator=LinearEstimator(interval=0.9), demands=(demand("a", 20, 12), demand("b", 20, 12)))
    deployment = to_map(unsure, Placement("by hand", (whole(replica("a"), replica("b")),)))
    assert check(deployment, evidence(unsure)) == ()
    careful = replace(evidence(unsure), confidence=0.9)
    assert [violation.rule for violation in check(deployment, careful)] == ["slo", "slo"]


def test_a_map_is_checked_at_the_upper_ends_of_what_nobody_observed() -> None:
    guessed = LinearEstimator(interval=0.9, source="roofline")
    unsure = replace(GIVEN, estimator=guessed, demands=(demand("a", 20, 12), demand("b", 20, 12)))
    deployment = to_map(unsure, Placement("by hand", (whole(replica("a"), replica("b")),)))
    assert [violation.rule for violation in check(deployment, evidence(unsure))] == ["slo", "slo"]
    assert check(deployment, replace(evidence(unsure), confidence=0.0)) == ()
    loose = (demand("a", 20, 30), demand("b", 20, 30))
    budget = replace(evidence(unsure), latency_budget=0.5, demands=loose)
    assert {violation.rule for violation in check(deployment, budget)} == {"slo"}
    assert check(deployment, replace(budget, confidence=0.0)) == ()


def test_more_replicas_than_allowed_are_refused() -> None:
    pair = draw_map(whole(replica("a", rate=10.0), replica("a", rate=10.0)), whole(replica("b")))
    demands = (Demand("a", 20.0, Slo(100.0), max_replicas=1), demand("b", 20.0))
    assert [violation.rule for violation in check(pair, replace(evidence(GIVEN), demands=demands))] == ["rate"]


def test_the_papers_rule_compares_the_batch_with_its_part_of_the_slo() -> None:
    budget = replace(GIVEN, options=Options(latency_budget=0.5), demands=(demand("a", 20, 24.1), demand("b", 20, 24.1)))
    deployment = to_map(budget, Placement("by hand", (whole(replica("a"), replica("b")),)))
    assert check(deployment, evidence(budget)) == ()
    tight = replace(evidence(budget), latency_budget=0.49)
    assert [violation.rule for violation in check(deployment, tight)] == ["slo", "slo"]


def test_the_check_shares_no_code_with_any_policy() -> None:
    allowed = ("evidence", "feasibility")
    for name in allowed:
        path = Path(feasibility.__file__).with_name(f"{name}.py")
        source = ast.parse(path.read_text(encoding="utf-8"))
        imported = {node.module or "" for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
        ours = {name for name in imported if name.startswith("gpuprof.placement")}
        assert ours <= {f"gpuprof.placement.{name}" for name in allowed}


def test_the_cost_of_serving_is_counted_where_one_machine_is_all_there_is() -> None:
    demands = [demand("a", 20.0, 60.0), demand("b", 20.0, 60.0)]
    parts = (whole(replica("a"), replica("b")),)
    quiet, busy = (
        problem(demands, [(plain_device(), 1)], options=Options(host=host))
        for host in (HostWork(), HostWork(1.0, 8.0, 2))
    )
    calm, disturbed = (to_map(given, Placement("test", parts)) for given in (quiet, busy))
    assert check(calm, evidence(quiet)) == ()
    for name in ("a", "b"):
        before, after = calm.models[name].predicted, disturbed.models[name].predicted
        assert before is not None and after is not None and before.p99_ms is not None and after.p99_ms is not None
        assert after.p99_ms > before.p99_ms + 1.0
    tight = [
        replace(item, slo=replace(item.slo, latency_ms=1.001 * (calm.models[item.model].predicted.p99_ms or 0.0)))  # type: ignore[union-attr]
        for item in demands
    ]
    assert check(calm, replace(evidence(quiet), demands=tuple(tight))) == ()
    broken = check(calm, replace(evidence(busy), demands=tuple(tight)))
    assert [violation.rule for violation in broken if violation.rule != "figures"] == ["slo", "slo"]
    # Without a word of neighbours' rates, a batch still keeps its worker for as long as it is handed over.
    assert [r.batch_latency_ms for *_, r in disturbed.places()] == [
        tuple(ms + 1.0 for ms in r.batch_latency_ms or ()) for *_, r in calm.places()
    ]


def test_what_is_predicted_is_what_is_checked() -> None:
    demands = [demand("a", 20.0, 60.0), demand("b", 30.0, 60.0)]
    given = problem(demands, [(plain_device(), 1)], options=Options(host=HostWork(1.0, 8.0, 2)))
    made = to_map(given, Placement("test", (whole(replica("a"), replica("b", rate=30.0)),)))
    for scale, expected in ((1.0001, ()), (0.999, ("slo", "slo"))):
        limits = tuple(
            replace(item, slo=replace(item.slo, latency_ms=scale * (made.models[item.model].predicted.p99_ms or 0.0)))  # type: ignore[union-attr]
            for item in demands
        )
        assert tuple(v.rule for v in check(made, replace(evidence(given), demands=limits))) == expected


def test_a_layout_is_checked_without_a_word_on_times() -> None:
    whole = PlacedReplica("m", 1, 1, Share(100.0, "3g.40gb"), 1.0)
    given = problem([demand("m", 1.0)], [(sliced_device(), None)])
    parts = (PlacedPartition((whole,), "3g.40gb", 0), PlacedPartition((whole,), "3g.40gb", 4))
    sound = to_map(given, Placement("by hand", (PlacedGpu("sliced", parts),)))
    text = sound.to_json().replace('"start": 4', '"start": 2')
    silent = replace(evidence(given), estimator=None)
    assert check_layout(sound, silent) == ()
    assert {violation.rule for violation in check_layout(parse_map(json.loads(text), "m"), silent)} == {"geometry"}
    elsewhere = json.loads(text.replace('"sliced"', '"elsewhere"'))
    assert check_layout(parse_map(elsewhere, "m"), silent) == ()


@pytest.mark.parametrize(
    ("batch", "pct", "processes", "reason", "is_refused"),
    [
        (4, 50.0, 1, "out of memory", True),
        (3, 100.0, 1, "out of memory", True),
        (5, 50.0, 1, "out of memory", False),
        (4, 50.0, 2, "out of memory", False),
        (4, 20.0, 1, "out of memory", True),  # its share of the compute units does not matter to the memory
        (4, 20.0, 1, "wrong outputs under its share", False),
        (4, 60.0, 1, "wrong outputs under its share", True),
    ],
)
def test_what_a_failure_dominates_is_refused_whatever_the_estimator_says(
    batch: int, pct: float, processes: int, reason: str, is_refused: bool
) -> None:
    failed = FailedRun("plain", Workload("a", batch, Share(pct), processes), reason)
    violations = check(SOUND, replace(evidence(GIVEN), tried=TriedRuns((failed,))))
    assert [violation.rule for violation in violations] == ["failed"] * is_refused
    ran = frozenset({("plain", Workload("a", 4, Share(50.0)))})
    assert check(SOUND, replace(evidence(GIVEN), tried=TriedRuns((failed,), ran))) == ()


def test_a_failure_in_a_smaller_instance_says_nothing_of_a_larger_one() -> None:
    sliced = draw_map(PlacedGpu("sliced", (instance("a", "2g.20gb", 0), instance("b", "3g.40gb", 4))))
    for profile, where in (("1g.10gb", []), ("2g.20gb", ["failed"]), ("4g.40gb", ["failed"])):
        failed = FailedRun("sliced", Workload("a", 1, Share(100.0, profile)), "out of memory")
        violations = check(sliced, replace(evidence(GIVEN), tried=TriedRuns((failed,))))
        assert [violation.rule for violation in violations] == where


def test_the_replicas_of_a_model_are_one_queue() -> None:
    def make_map(count: int, slo_ms: float) -> DeploymentMap:
        predicted = {"latency_ms": 10.0, "throughput_rps": 400.0, "goodput_rps": 600.0 / count}
        replica_json = {
            "model": "ab",
            "batch": 4,
            "sm_share_pct": 100.0,
            "rate_rps": 600.0 / count,
            "batch_latency_ms": [7.0, 8.0, 9.0, 10.0],
            "predicted": predicted,
        }
        gpus = [{"index": i, "device": "plain", "partitions": [{"replicas": [replica_json]}]} for i in range(count)]
        return parse_map(
            {
                "schema": "gpuprof.deployment/1",
                "policy": "by hand",
                "models": {"ab": {"rate_rps": 600.0, "slo_ms": slo_ms}},
                "nodes": [{"name": "n", "gpus": gpus}],
                "predicted": {"gpus": count, "goodput_rps": 600.0},
            },
            "map",
        )

    queue = BatchQueue()
    server = BatchServer((7.0, 8.0, 9.0, 10.0), 4, 0.0)
    alone = queue.sojourn(Arrivals(200.0), server).percentile(99)
    pooled = queue.pool(Arrivals(600.0), (server,) * 3).whole.percentile(99)
    assert pooled < 0.9 * alone
    against = Evidence({"plain": plain_device()}, queue)
    assert not check(make_map(3, 0.5 * (alone + pooled)), against)
    assert [violation.rule for violation in check(make_map(3, 0.95 * pooled), against)] == ["slo"]


class _FreeShares(LinearEstimator):
    """A measured requirement claims that no share slows a batch down; batches keep a part of the SMs active."""

    active_pct: float | None = None

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        alone = LinearEstimator.estimate(self, model, device, batch, Share(), (), processes)
        creq = [("wavg_occupancy", 20.0), ("wavg_sm_util", self.active_pct)]
        required = tuple((metric, Figure(pct, MEASURED)) for metric, pct in creq if pct is not None)
        return replace(alone, latency_ms=Figure(alone.latency_ms.value, "USHER's premise"), creq_pct=required)


@pytest.mark.parametrize(("active_pct", "expected"), [(None, ["180%"]), (50.0, [])])
def test_shares_that_cost_nothing_do_not_make_a_device_twice_as_fast(
    monkeypatch: pytest.MonkeyPatch, active_pct: float | None, expected: list[str]
) -> None:
    monkeypatch.setattr(_FreeShares, "active_pct", active_pct)
    given = problem([demand(name, 400.0) for name in "abc"], [(plain_device(), 1)], estimator=_FreeShares())
    deployment = to_map(given, Placement("by hand", (whole(*(replica(name, 20.0, 400.0) for name in "abc")),)))
    faults = [str(violation) for violation in check(deployment, evidence(given)) if violation.rule == "time"]
    assert faults == [f"time: node0 gpu 0: the replicas ask for {part} of the device's time" for part in expected]
