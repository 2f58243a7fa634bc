"""Whatever is wrong with a map is found, with a database and without, and nothing is found in a sound one."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.deployment import DeploymentMap, parse_map, read_map
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.estimators.queueing.queueing import BatchQueue
from gpuprof.pipeline.problem import make_queueing
from gpuprof.placement.contract import demand, evidence, plain_device, problem, sliced_device, solve_and_check
from gpuprof.placement.deploy import to_map
from gpuprof.placement.evidence import Evidence, Violation
from gpuprof.placement.feasibility import check
from gpuprof.placement.placement import PlacedGpu, PlacedPartition, PlacedReplica, Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Options
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.parvagpu import ParvaGpu

#: ``"shared"``: two replicas by percentage on one device; ``"mig"``: one in each of two instances; ``"pool"``: three
#: replicas of one model on two devices, one of them slower; ``"unshared"``: two replicas on one device without shares.
Layout = Literal["shared", "mig", "pool", "unshared"]
Content = dict[str, Any]
Edit = Callable[[Content], object]
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Breakage:
    """One way to break the JSON of a sound map in place."""

    name: str
    edit: Edit
    layout: Layout = "shared"
    needs_estimator: bool = False  #: Whether the map contradicts nothing but the estimator.


def first_gpu(content: Content) -> Any:
    return content["nodes"][0]["gpus"][0]


def parts(content: Content) -> Any:
    return first_gpu(content)["partitions"]


def replica(content: Content) -> Any:
    return parts(content)[0]["replicas"][0]


def scale_times(factor: float, which: slice = slice(None), *, also_latency: bool = False) -> Edit:
    def edit(content: Content) -> None:
        times, predicted = replica(content)["batch_latency_ms"], replica(content)["predicted"]
        times[which] = [factor * ms for ms in times[which]]
        if also_latency:  # consistent with itself: only an estimator can tell
            predicted["latency_ms"] *= factor
            predicted["throughput_rps"] /= factor
            predicted["latency_ms_interval"] = predicted["throughput_rps_interval"] = None

    return edit


def scale_prediction(name: str, factor: float) -> Edit:
    return lambda c: replica(c)["predicted"].update({name: replica(c)["predicted"][name] * factor})


def swap_rates(content: Content) -> None:
    first, second = parts(content)[0]["replicas"]
    first["model"], second["model"] = second["model"], first["model"]
    first["rate_rps"], second["rate_rps"] = 35.0, 5.0


OBJECTS: dict[str, Callable[[Content], Any]] = {
    "gpu": first_gpu,
    "replica": replica,
    "prediction": lambda c: replica(c)["predicted"],
    "model": lambda c: c["models"]["a"],
    "map": lambda c: c["predicted"],
    "settings": lambda c: c["planned_with"],
    "mig": lambda c: parts(c)[0]["mig"],
}
#: Values that no sound map of this content has, by object and field.
WRONG_VALUES: dict[str, dict[str, tuple[object, ...]]] = {
    "gpu": {"device": ("h900", "", "PLAIN", " plain"), "index": (-1, "zero", 0.5), "partitions": ([],)},
    "replica": {
        "model": ("stranger", ""),
        "batch": (0, 2, 8, 3.5, "four"),
        "processes": (0, 2, 49, 1.5),
        "sm_share_pct": (60.0, 101.0, 0.0, -5.0, 1e-9, 5e-324, 0.5, "half", NAN, INF),
        "memory_limit_bytes": (0, -1, 2**40),
        "rate_rps": (15.0, 0.0, 25.0, 1e4, -1.0, INF, NAN),
        "max_wait_ms": (150.0, 1e300, -1.0, NAN),
        "cores": (4,),
    },
    "prediction": {
        "latency_ms": (0.0, NAN, INF),
        "throughput_rps": (NAN,),
        "goodput_rps": (NAN, -1.0),
        "p50_ms": (NAN,),
        "latency_cv": (NAN, -0.1),
        "pause_factor": (0.5,),
        "utilization": (-0.5,),
        "memory_bytes": (2**45, -5),
        "latency_ms_interval": ([1.0, 2.0, 3.0],),
    },
    "model": {
        "slo_ms": (5.0, 0.0, INF, NAN),
        "percentile": (100.0, 0.0, NAN),
        "rate_rps": (30.0, 10.0, 0.0),
        "members": ({"b": {"rate_rps": 20.0, "slo_ms": 50.0}},),
    },
    "map": {
        "gpus": (0, 7),
        "lower_bound_gpus": (2, -1),
        "cost_per_hour": (0.5, -1.0),
        "internal_slack": (-0.5,),
        "moves": (-1,),
        "upper_bound_goodput_rps": (NAN,),
    },
    "settings": {
        "max_batch": (2,),
        "max_processes": (0,),
        "latency_budget": (2.0,),
        "confidence": (7.0,),
        "overhead_ms": (-1.0,),
        "fleet": ([{"device": "plain", "count": 0}],),
    },
    "mig": {"profile": ("9g.90gb", "7g.80gb", "", "3G.40GB"), "start": (2, 40, 0.5, -1)},
}


def write_value(target: str, field: str, value: object) -> Edit:
    return lambda content: OBJECTS[target](content).update({field: value})


def list_wrong_values() -> Iterator[Breakage]:
    for target, fields in WRONG_VALUES.items():
        layout: Layout = "mig" if target == "mig" else "shared"
        for field, values in fields.items():
            for value in values:
                yield Breakage(f"{target} {field} {value}", write_value(target, field, value), layout)


def set_unplaced(model: str, rate_rps: float) -> Edit:
    return lambda c: c.update(unplaced=[{"model": model, "rate_rps": rate_rps, "reason": "?"}])


BREAKAGES = (
    *list_wrong_values(),
    Breakage("two nodes of a name", lambda c: c["nodes"].append(c["nodes"][0])),
    Breakage("another node with all of it", lambda c: c["nodes"].append({**c["nodes"][0], "name": "other"})),
    Breakage("a node without a name", lambda c: c["nodes"][0].update(name="")),
    Breakage("two devices of an index", lambda c: c["nodes"][0]["gpus"].append(first_gpu(c))),
    Breakage("no node at all", lambda c: c.update(nodes=[])),
    Breakage("nodes that are no list", lambda c: c.update(nodes={})),
    Breakage("no replica", lambda c: parts(c)[0].update(replicas=[])),
    Breakage("the whole device twice", lambda c: parts(c).append(parts(c)[0])),
    Breakage("a model under another name", lambda c: c["models"].update(stranger=c["models"].pop("a"))),
    Breakage("a model without replicas", lambda c: c["models"].update(c=c["models"]["a"])),
    Breakage("no models", lambda c: c.update(models={})),
    Breakage("another schema", lambda c: c.update(schema="gpuprof.deployment/99")),
    Breakage("no predictions of the map", lambda c: c.pop("predicted")),
    Breakage("no predictions of a replica", lambda c: replica(c).pop("predicted")),
    Breakage("no SLO", lambda c: c["models"]["a"].pop("slo_ms")),
    Breakage("overlapping instances", lambda c: parts(c)[0]["mig"].update(parts(c)[1]["mig"]), "mig"),
    Breakage("more instances than the driver allows", lambda c: parts(c).append(parts(c)[0]), "mig"),
    Breakage("two of the only large instance", lambda c: [p["mig"].update(profile="4g.40gb") for p in parts(c)], "mig"),
    Breakage("instances on a device used whole", lambda c: parts(c)[0].update(mig=None), "mig"),
    Breakage("an instance of no MIG device", lambda c: parts(c)[0].update(mig={"profile": "1g.10gb", "start": 0})),
    Breakage("a device without MIG", lambda c: first_gpu(c).update(device="plain"), "mig"),
    Breakage("one replica twice", lambda c: parts(c)[0]["replicas"].append(replica(c))),
    Breakage("a replica twice in an instance", lambda c: parts(c)[0]["replicas"].append(replica(c)), "mig"),
    Breakage("a smaller share", write_value("replica", "sm_share_pct", 40.0), needs_estimator=True),
    Breakage("a limit of a MiB", write_value("replica", "memory_limit_bytes", 2**20), needs_estimator=True),
    Breakage("too small a limit", write_value("replica", "memory_limit_bytes", 2**30 - 2**16), needs_estimator=True),
    Breakage("a limit beyond the instance", write_value("replica", "memory_limit_bytes", 41 * 2**30), "mig"),
    Breakage("a lost replica", lambda c: parts(c)[0]["replicas"].pop()),
    Breakage("a lost instance", lambda c: parts(c).pop(), "mig"),
    Breakage("both replicas of one model", lambda c: parts(c)[0]["replicas"][1].update(model="a")),
    Breakage("rates at the wrong models", swap_rates),
    Breakage("unplaced and placed", set_unplaced("a", 5.0)),
    Breakage("a stranger unplaced", set_unplaced("x", 5.0)),
    Breakage("a negative rate unplaced", set_unplaced("a", -5.0)),
    Breakage("a batch of millions", lambda c: replica(c).update(batch=10**7, batch_latency_ms=None)),
    Breakage("batches in half the time", scale_times(0.5)),
    Breakage("batches in a hundredth more", scale_times(1.01)),
    Breakage("the last batch quicker", scale_times(0.9, slice(-1, None))),
    Breakage("the first batch quicker", scale_times(0.5, slice(0, 1)), needs_estimator=True),
    Breakage("all times a tenth less", scale_times(0.9, also_latency=True), needs_estimator=True),
    Breakage("times of nothing", scale_times(0.0)),
    Breakage("negative times", scale_times(-1.0)),
    Breakage("a time that is no number", scale_times(NAN, slice(1, 2))),
    Breakage("a time too few", lambda c: replica(c)["batch_latency_ms"].pop()),
    Breakage("a time too many", lambda c: replica(c)["batch_latency_ms"].append(99.0)),
    Breakage("half the time of a batch", scale_prediction("latency_ms", 0.5)),
    Breakage("three times the throughput", scale_prediction("throughput_rps", 3.0)),
    Breakage("more goodput than rate", scale_prediction("goodput_rps", 1.5)),
    Breakage("the map's goodput", write_value("map", "goodput_rps", 1e6), needs_estimator=True),
    Breakage("an SLO a tenth of its own", write_value("model", "slo_ms", 5.0), "pool"),
    Breakage("one device's cost for two", write_value("map", "cost_per_hour", 1.0), "pool"),
    Breakage("half the cost of instances", write_value("map", "cost_per_hour", 2.0), "mig"),
    Breakage("a share in a partition without", write_value("replica", "sm_share_pct", 50.0), "unshared"),
    Breakage("shares of two devices on one", lambda c: parts(c)[0].update(unshared=False), "unshared"),
    Breakage("all memory for one of two", write_value("replica", "memory_limit_bytes", 16 * 2**30), "unshared"),
)


def make_replica(model: str, pct: float, mig: str | None = None, rate_rps: float = 20.0) -> PlacedReplica:
    return PlacedReplica(model, 4, 1, Share(pct, mig), rate_rps, memory_bytes=2**30)


def make_plain(*replicas: PlacedReplica, unshared: bool = False) -> PlacedGpu:
    return PlacedGpu("plain", (PlacedPartition(replicas, unshared=unshared),))


GIVEN = problem([demand("a", 20.0), demand("b", 20.0)], [(plain_device(), 1), (sliced_device(), 1)])
POOL = problem([demand("a", 600.0)], [(plain_device(), 2)])
INSTANCES = tuple(
    PlacedPartition((make_replica(name, 100.0, "3g.40gb"),), "3g.40gb", start) for name, start in (("a", 0), ("b", 4))
)
PROBLEMS = {"shared": GIVEN, "mig": GIVEN, "pool": POOL, "unshared": GIVEN}
GPUS = {
    "unshared": (make_plain(make_replica("a", 100.0), make_replica("b", 100.0), unshared=True),),
    "shared": (make_plain(make_replica("a", 50.0), make_replica("b", 50.0)),),
    "pool": (
        make_plain(*(make_replica("a", 50.0, rate_rps=150.0),) * 2),
        make_plain(make_replica("a", 100.0, rate_rps=300.0)),
    ),
    "mig": (PlacedGpu("sliced", INSTANCES),),
}
MAPS = {layout: to_map(PROBLEMS[layout], Placement("by hand", gpus)) for layout, gpus in GPUS.items()}


def is_refused(breakage: Breakage, *, with_estimator: bool) -> bool:
    content = json.loads(MAPS[breakage.layout].to_json())
    breakage.edit(content)
    against = evidence(PROBLEMS[breakage.layout])
    against = against if with_estimator else replace(against, estimator=None)
    try:
        broken = parse_map(content, "broken")
        return bool(check(broken, take_settings(broken, against)))
    except InputError:
        return True


def take_settings(deployment: DeploymentMap, against: Evidence) -> Evidence:
    """Return the evidence with the settings that the map says it was planned with, as the command collects them."""
    planned = deployment.planned_with
    queueing = against.queueing
    if planned.arrivals is not None:
        queueing = make_queueing(planned.arrivals, deployment.models)
    return replace(
        against,
        queueing=queueing,
        confidence=planned.confidence,
        latency_budget=planned.latency_budget,
        overhead_ms=planned.overhead_ms,
        host=planned.host,
    )


@pytest.mark.parametrize("layout", PROBLEMS)
def test_the_maps_are_sound_before_they_are_broken(layout: Layout) -> None:
    against = evidence(PROBLEMS[layout])
    assert check(MAPS[layout], against) == ()
    assert check(MAPS[layout], replace(against, estimator=None)) == ()


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda case: case.name)
def test_a_broken_map_is_refused_with_a_database_and_without(breakage: Breakage) -> None:
    assert is_refused(breakage, with_estimator=True)
    assert breakage.needs_estimator or is_refused(breakage, with_estimator=False)


@pytest.mark.parametrize("name", ["latency_cv", "pause_cv", "latency_ms"])
@pytest.mark.parametrize("value", [1e9, 1e300])
def test_absurd_times_are_refused_before_a_queue_is_computed(name: str, value: float) -> None:
    content = json.loads(MAPS["pool"].to_json())
    replica(content)["predicted"][name] = value
    believed = replace(evidence(POOL), queueing=BatchQueue(), estimator=None)
    assert check(parse_map(content, "broken"), believed)


@pytest.mark.parametrize(
    ("whole", "twice"),
    [
        ('"batch": 4,', '"batch": 4, "batch": 8,'),
        ('"slo_ms": 100.0,', '"slo_ms": 100.0, "slo_ms": 1.0,'),
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


@pytest.mark.parametrize("policy", ["ffd", "optimal"])
@pytest.mark.parametrize("options", [Options(), Options(latency_budget=0.5), Options(confidence=0.9)])
def test_no_sound_map_is_refused(policy: str, options: Options) -> None:
    demands = [demand("a", 40.0), demand("b", 10.0, 60.0), demand("c", 300.0, 200.0)]
    for fleet in ([(plain_device(), None)], [(plain_device(), 1)]):
        given = problem(demands, fleet, options=options)
        _, deployment = solve_and_check(make_policy(policy), given)
        assert check(deployment, replace(evidence(given), estimator=None)) == ()


def test_faults_of_different_kinds_are_all_listed() -> None:
    content = json.loads(MAPS["mig"].to_json())
    first, second = parts(content)
    first["mig"]["start"] = 2
    second["replicas"][0].update(sm_share_pct=0.5, memory_limit_bytes=2**40)
    content["models"]["a"]["slo_ms"] = 1.0
    content["models"]["b"]["rate_rps"] = 30.0
    content["nodes"].append({"name": "node1", "gpus": [{**first_gpu(content), "device": "h900"}]})
    rules = {violation.rule for violation in check(parse_map(content, "broken"), evidence(GIVEN))}
    assert rules == {"geometry", "fleet", "share", "memory", "rate", "slo", "figures"}


# --- maps of policies, edited at random -------------------------------------------------------------------------------

PLANNED_MIG = problem(
    [demand(f"m{i}", 150.0 + 120.0 * i, 60.0 + 20.0 * i) for i in range(5)],
    [(sliced_device(), None)],
    options=Options(latency_budget=0.5),
)
PLANNED_SHARED = problem([demand(f"m{i}", 20.0 + 10.0 * i, 80.0) for i in range(5)], [(plain_device(), None)])
PLANNED = {
    "mig": (PLANNED_MIG, to_map(PLANNED_MIG, ParvaGpu().place(PLANNED_MIG))),
    "shared": (PLANNED_SHARED, to_map(PLANNED_SHARED, FirstFitDecreasing().place(PLANNED_SHARED))),
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**19),
    st.floats(),
    st.sampled_from(["", "m0", "sliced", "nowhere", "1g.10gb", "9g.99gb"]),
    st.just([]),
    st.just({}),
)


def check_edited(kind: str, edit: Edit) -> tuple[Violation, ...]:
    posed, planned = PLANNED[kind]
    content = json.loads(planned.to_json())
    edit(content)
    return check(DeploymentMap.model_validate(content), evidence(posed))


def pick_place(content: Content, pick: int) -> tuple[Content, Content]:
    """Return a device and one of its partitions."""
    places = [(gpu, part) for node in content["nodes"] for gpu in node["gpus"] for part in gpu["partitions"]]
    return places[pick % len(places)]


def list_paths(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    steps = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(deeper for key, value in steps for deeper in list_paths(value, (*path, key)))]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(PLANNED)), st.data())
def test_whatever_is_written_anywhere_is_refused_or_checked(kind: str, data: st.DataObject) -> None:
    posed, planned = PLANNED[kind]
    content = json.loads(planned.to_json())
    for _ in range(data.draw(st.integers(1, 4))):
        *steps, last = data.draw(st.sampled_from(list_paths(content)[1:]))
        target = content
        for step in steps:
            target = target[step]
        target[last] = data.draw(VALUES)
    try:
        edited = parse_map(content, "the map")
    except InputError:
        return  # a clear line, and no map
    assert all(violation.rule and violation.message for violation in check(edited, evidence(posed)))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.5, 100.0))
def test_every_device_with_shares_above_a_whole_is_found(pick: int, extra: float) -> None:
    def edit(content: Content) -> None:
        replicas = pick_place(content, pick)[1]["replicas"]
        taken = sum(replica["sm_share_pct"] for replica in replicas)
        replicas.append({**replicas[0], "sm_share_pct": min(100.0, 100.0 - taken + extra)})

    assert "share" in {violation.rule for violation in check_edited("shared", edit)}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12))
def test_every_start_that_the_driver_refuses_and_every_overlap_is_found(pick: int, start: int) -> None:
    device = sliced_device()
    is_wrong = False

    def edit(content: Content) -> None:
        nonlocal is_wrong
        gpu, part = pick_place(content, pick)
        part["mig"]["start"] = start
        instances = [(device.mig_profile(p["mig"]["profile"]), p["mig"]["start"]) for p in gpu["partitions"]]
        slots = [slot for profile, first in instances for slot in range(first, first + profile.memory_slices)]
        legal = device.mig_profile(part["mig"]["profile"]).start_slots
        is_wrong = start not in legal or len(set(slots)) < len(slots)

    violations = check_edited("mig", edit)
    assert ("geometry" in {violation.rule for violation in violations}) is is_wrong
