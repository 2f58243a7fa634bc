"""Ways to break a sound deployment map: each takes the decoded JSON of one and changes it in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: ``"shared"``: two replicas by percentage on one device; ``"mig"``: one in each of two instances; ``"pool"``: three
#: replicas of one model on two devices, one of them slower; ``"spare"``: a device more than is needed; ``"unshared"``:
#: two replicas on one device, held to no share.
Layout = Literal["shared", "mig", "pool", "spare", "unshared"]
Edit = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Breakage:
    """One way to break a map.

    Attributes
    ----------
    name : str
    edit : callable
    layout : str
    needs_estimator : bool
        Whether the map contradicts nothing but the estimator.
    """

    name: str
    edit: Edit
    layout: Layout = "shared"
    needs_estimator: bool = False


def first_gpu(content: dict[str, Any]) -> Any:
    """Return the first device."""
    return content["nodes"][0]["gpus"][0]


def parts(content: dict[str, Any]) -> Any:
    """Return the partitions of the first device."""
    return first_gpu(content)["partitions"]


def replica(content: dict[str, Any]) -> Any:
    """Return the first replica."""
    return parts(content)[0]["replicas"][0]


def in_replica(**values: object) -> Edit:
    return lambda content: replica(content).update(values)


def in_prediction(**values: object) -> Edit:
    return lambda content: replica(content)["predicted"].update(values)


def _scaled_prediction(name: str, factor: float) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        predicted = replica(content)["predicted"]
        predicted[name] = predicted[name] * factor

    return edit


def _scaled_times(factor: float, *, which: slice = slice(None), also_latency: bool = False) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        edited = replica(content)
        times = edited["batch_latency_ms"]
        times[which] = [factor * ms for ms in times[which]]
        if also_latency:  # consistent with itself: only an estimator can tell
            predicted = edited["predicted"]
            predicted["latency_ms"] *= factor
            predicted["throughput_rps"] /= factor
            predicted["latency_ms_interval"] = predicted["throughput_rps_interval"] = None

    return edit


def in_map(**values: object) -> Edit:
    return lambda content: content["predicted"].update(values)


def in_model(**values: object) -> Edit:
    return lambda content: content["models"]["a"].update(values)


def _in_mig(**values: object) -> Edit:
    return lambda content: parts(content)[0]["mig"].update(values)


def _rename_model(content: dict[str, Any]) -> None:
    content["models"]["stranger"] = content["models"].pop("a")


def _swap_rates(content: dict[str, Any]) -> None:
    first, second = (part for part in parts(content)[0]["replicas"])
    first["model"], second["model"] = second["model"], first["model"]
    first["rate_rps"], second["rate_rps"] = 35.0, 5.0


STRUCTURE = (
    Breakage("two nodes of a name", lambda c: c["nodes"].append(c["nodes"][0])),
    Breakage("two devices of an index", lambda c: c["nodes"][0]["gpus"].append(first_gpu(c))),
    Breakage("a device that nobody knows", lambda c: first_gpu(c).update(device="h900")),
    Breakage("a device of another name", lambda c: first_gpu(c).update(device="")),
    Breakage("no node at all", lambda c: c.update(nodes=[])),
    Breakage("no device at all", lambda c: c["nodes"][0].update(gpus=[])),
    Breakage("no partition", lambda c: first_gpu(c).update(partitions=[])),
    Breakage("no replica", lambda c: parts(c)[0].update(replicas=[])),
    Breakage("the whole device twice", lambda c: parts(c).append(parts(c)[0])),
    Breakage("a replica of a stranger", in_replica(model="stranger")),
    Breakage("a replica of a model without a name", in_replica(model="")),
    Breakage("a model under another name", _rename_model),
    Breakage("a model without replicas", lambda c: c["models"].update(c=c["models"]["a"])),
    Breakage("no models", lambda c: c.update(models={})),
    Breakage("a member of a model's name", in_model(members={"b": {"rate_rps": 20.0, "slo_ms": 50.0}})),
    Breakage("a negative index", lambda c: first_gpu(c).update(index=-1)),
    Breakage("another schema", lambda c: c.update(schema="gpuprof.deployment/99")),
    Breakage("a field that nobody knows", in_replica(cores=4)),
    Breakage("nodes that are no list", lambda c: c.update(nodes={})),
)
GEOMETRY = (
    Breakage("a profile that the device lacks", _in_mig(profile="9g.90gb"), "mig"),
    Breakage("a start that is none", _in_mig(start=2), "mig"),
    Breakage("a start beyond the device", _in_mig(start=40), "mig"),
    Breakage("overlapping instances", lambda c: parts(c)[0]["mig"].update(parts(c)[1]["mig"]), "mig"),
    Breakage("an instance over another", _in_mig(profile="7g.80gb"), "mig"),
    Breakage("more instances than the driver allows", lambda c: parts(c).append(parts(c)[0]), "mig"),
    Breakage("cut and whole", lambda c: parts(c)[0].update(mig=None), "mig"),
    Breakage(
        "an instance of a device without MIG", lambda c: parts(c)[0].update(mig={"profile": "1g.10gb", "start": 0})
    ),
    Breakage("a device without MIG", lambda c: first_gpu(c).update(device="plain"), "mig"),
    Breakage("an instance without a name", _in_mig(profile=""), "mig"),
)
SHARES = (
    Breakage("shares above all", in_replica(sm_share_pct=60.0)),
    Breakage("a share above 100", in_replica(sm_share_pct=101.0)),
    Breakage("a share of nothing", in_replica(sm_share_pct=0.0)),
    Breakage("a negative share", in_replica(sm_share_pct=-5.0)),
    Breakage("a share of a billionth of a percent", in_replica(sm_share_pct=1e-9)),
    Breakage("the smallest share there is", in_replica(sm_share_pct=5e-324)),
    Breakage("half a percent", in_replica(sm_share_pct=0.5)),
    Breakage("more processes than MPS takes", in_replica(processes=49)),
    Breakage("no process", in_replica(processes=0)),
    Breakage("one replica twice", lambda c: parts(c)[0]["replicas"].append(replica(c))),
    Breakage("a replica twice in an instance", lambda c: parts(c)[0]["replicas"].append(replica(c)), "mig"),
    Breakage("a smaller share", in_replica(sm_share_pct=40.0), needs_estimator=True),
    Breakage("two processes for one", in_replica(processes=2)),
)
MEMORY = (
    Breakage("a limit of a MiB", in_replica(memory_limit_bytes=2**20), needs_estimator=True),
    Breakage("a limit of nothing", in_replica(memory_limit_bytes=0)),
    Breakage("a negative limit", in_replica(memory_limit_bytes=-1)),
    Breakage("a limit of half", in_replica(memory_limit_bytes=2**29), needs_estimator=True),
    Breakage("a limit beyond the device", in_replica(memory_limit_bytes=2**40)),
    Breakage("a limit beyond the instance", in_replica(memory_limit_bytes=41 * 2**30), "mig"),
    Breakage("a limit of a byte too few", in_replica(memory_limit_bytes=2**30 - 2**16), needs_estimator=True),
)
RATES = (
    Breakage("a lost replica", lambda c: parts(c)[0]["replicas"].pop()),
    Breakage("a lost instance", lambda c: parts(c).pop(), "mig"),
    Breakage("less than is asked for", in_replica(rate_rps=15.0)),
    Breakage("nothing at all", in_replica(rate_rps=0.0)),
    Breakage("more than is asked for", in_replica(rate_rps=25.0)),
    Breakage("more than it can", in_replica(rate_rps=1e4)),
    Breakage("a negative rate", in_replica(rate_rps=-1.0)),
    Breakage("an infinite rate", in_replica(rate_rps=float("inf"))),
    Breakage("a rate that is no number", in_replica(rate_rps=float("nan"))),
    Breakage("a demand raised afterwards", in_model(rate_rps=30.0)),
    Breakage("a demand lowered afterwards", in_model(rate_rps=10.0)),
    Breakage("a demand of nothing", in_model(rate_rps=0.0)),
    Breakage("unplaced and placed", lambda c: c.update(unplaced=[{"model": "a", "rate_rps": 5.0, "reason": "?"}])),
    Breakage("a stranger unplaced", lambda c: c.update(unplaced=[{"model": "x", "rate_rps": 5.0, "reason": "?"}])),
    Breakage("rates at the wrong models", _swap_rates),
)
OBJECTIVES = (
    Breakage("an SLO below the time of a batch", in_model(slo_ms=5.0)),
    Breakage("an SLO of nothing", in_model(slo_ms=0.0)),
    Breakage("an infinite SLO", in_model(slo_ms=float("inf"))),
    Breakage("a percentile of 100", in_model(percentile=100.0)),
    Breakage("a percentile of nothing", in_model(percentile=0.0)),
    Breakage("a wait beyond the SLO", in_replica(max_wait_ms=150.0)),
    Breakage("an endless wait", in_replica(max_wait_ms=1e300)),
    Breakage("a negative wait", in_replica(max_wait_ms=-1.0)),
    Breakage("no requests in a batch", in_replica(batch=0)),
    Breakage("a batch beyond all measure", in_replica(batch=10**7, batch_latency_ms=None)),
    Breakage("a larger batch", in_replica(batch=8)),
    Breakage("a smaller batch", in_replica(batch=2)),
)
PREDICTIONS = (
    Breakage("batches in half the time", _scaled_times(0.5)),
    Breakage("batches in a hundredth more", _scaled_times(1.01)),
    Breakage("the last batch quicker", _scaled_times(0.9, which=slice(-1, None))),
    Breakage("the first batch quicker", _scaled_times(0.5, which=slice(0, 1)), needs_estimator=True),
    Breakage("all times halved alike", _scaled_times(0.5, also_latency=True), needs_estimator=True),
    Breakage("all times a tenth less", _scaled_times(0.9, also_latency=True), needs_estimator=True),
    Breakage("times of nothing", _scaled_times(0.0)),
    Breakage("a time too few", lambda c: replica(c)["batch_latency_ms"].pop()),
    Breakage("a time too many", lambda c: replica(c)["batch_latency_ms"].append(99.0)),
    Breakage("negative times", _scaled_times(-1.0)),
    Breakage("a batch in no time", in_prediction(latency_ms=0.0)),
    Breakage("half the time of a batch", _scaled_prediction("latency_ms", 0.5)),
    Breakage("twice the time of a batch", _scaled_prediction("latency_ms", 2.0)),
    Breakage("three times the throughput", _scaled_prediction("throughput_rps", 3.0)),
    Breakage("half the throughput", _scaled_prediction("throughput_rps", 0.5)),
    Breakage("more goodput than rate", _scaled_prediction("goodput_rps", 1.5)),
    Breakage("quicker after a pause", in_prediction(pause_factor=0.5)),
    Breakage("the map's goodput", in_map(goodput_rps=1e6), needs_estimator=True),
    Breakage("fewer devices than used", in_map(gpus=0)),
    Breakage("more devices than used", in_map(gpus=7)),
    Breakage("a bound above the devices", in_map(lower_bound_gpus=2)),
    Breakage("a negative cost", in_map(cost_per_hour=-1.0)),
)
_NAN, _INF = float("nan"), float("inf")


def other_replica(content: dict[str, Any]) -> Any:
    return parts(content)[0]["replicas"][1]


def in_settings(**values: object) -> Edit:
    return lambda content: content["planned_with"].update(values)


def _tenth(content: dict[str, Any]) -> dict[str, Any]:
    return {**replica(content), "sm_share_pct": 10.0}


TYPES = (
    Breakage("an index in words", lambda c: first_gpu(c).update(index="zero")),
    Breakage("half an index", lambda c: first_gpu(c).update(index=0.5)),
    Breakage("half a request in a batch", in_replica(batch=3.5)),
    Breakage("half a process", in_replica(processes=1.5)),
    Breakage("a batch in words", in_replica(batch="four")),
    Breakage("a share in words", in_replica(sm_share_pct="half")),
    Breakage("a share that is no number", in_replica(sm_share_pct=_NAN)),
    Breakage("an infinite share", in_replica(sm_share_pct=_INF)),
    Breakage("a time that is no number", in_prediction(latency_ms=_NAN)),
    Breakage("an infinite time", in_prediction(latency_ms=_INF)),
    Breakage("a throughput that is no number", in_prediction(throughput_rps=_NAN)),
    Breakage("a goodput that is no number", in_prediction(goodput_rps=_NAN)),
    Breakage("a percentile's time that is no number", in_prediction(p50_ms=_NAN)),
    Breakage("a variation that is no number", in_prediction(latency_cv=_NAN)),
    Breakage("a time of a batch that is no number", lambda c: replica(c)["batch_latency_ms"].__setitem__(1, _NAN)),
    Breakage("an infinite time of a batch", lambda c: replica(c)["batch_latency_ms"].__setitem__(0, _INF)),
    Breakage("a wait that is no number", in_replica(max_wait_ms=_NAN)),
    Breakage("an SLO that is no number", in_model(slo_ms=_NAN)),
    Breakage("a percentile that is no number", in_model(percentile=_NAN)),
    Breakage("a bound that is no number", in_map(upper_bound_goodput_rps=_NAN)),
    Breakage("models in a list", lambda c: c.update(models=["a", "b"])),
    Breakage("no predictions of the map", lambda c: c.pop("predicted")),
    Breakage("no predictions of a replica", lambda c: replica(c).pop("predicted")),
    Breakage("no SLO", lambda c: c["models"]["a"].pop("slo_ms")),
    Breakage("half a start", _in_mig(start=0.5), "mig"),
    Breakage("a start before the device", _in_mig(start=-1), "mig"),
    Breakage("a profile in capitals", _in_mig(profile="3G.40GB"), "mig"),
)
OWN = (
    Breakage("both replicas of one model", lambda c: other_replica(c).update(model="a")),
    Breakage(
        "all requests at one of two replicas", lambda c: (replica(c).update(rate_rps=40.0), other_replica(c).clear())
    ),
    Breakage("a node without a name", lambda c: c["nodes"][0].update(name="")),
    Breakage("all of it on another node again", lambda c: c["nodes"].append({**c["nodes"][0], "name": "other"})),
    Breakage("a device in capitals", lambda c: first_gpu(c).update(device="PLAIN")),
    Breakage("a device behind a space", lambda c: first_gpu(c).update(device=" plain")),
    Breakage("two of the only large instance", lambda c: [p["mig"].update(profile="4g.40gb") for p in parts(c)], "mig"),
    Breakage("beyond a whole instance", lambda c: parts(c)[0]["replicas"].append(_tenth(c)), "mig"),
    Breakage("busy for less than no time", in_prediction(utilization=-0.5)),
    Breakage("a negative variation", in_prediction(latency_cv=-0.1)),
    Breakage("more memory than there is", in_prediction(memory_bytes=2**45)),
    Breakage("less than no memory", in_prediction(memory_bytes=-5)),
    Breakage("a negative goodput", in_prediction(goodput_rps=-1.0)),
    Breakage("less than no slack", in_map(internal_slack=-0.5)),
    Breakage("fewer than no moves", in_map(moves=-1)),
    Breakage("a bound below nothing", in_map(lower_bound_gpus=-1)),
    Breakage("larger batches than planned", in_settings(max_batch=2)),
    Breakage("no process planned", in_settings(max_processes=0)),
    Breakage("a budget of twice the SLO", in_settings(latency_budget=2.0)),
    Breakage("a confidence of seven", in_settings(confidence=7.0)),
    Breakage("negative overhead", in_settings(overhead_ms=-1.0)),
    Breakage("a fleet of no devices", in_settings(fleet=[{"device": "plain", "count": 0}])),
    Breakage("an interval of three", in_prediction(latency_ms_interval=[1.0, 2.0, 3.0])),
    Breakage("less than nothing unplaced", lambda c: c.update(unplaced=[{"model": "a", "rate_rps": -5, "reason": ""}])),
)


PLANS = (
    Breakage("an SLO a tenth of its own", in_model(slo_ms=5.0), "pool"),
    Breakage("half the cost", in_map(cost_per_hour=0.5)),
    Breakage("one device's cost for two", in_map(cost_per_hour=1.0), "pool"),
    Breakage("half the cost of instances", in_map(cost_per_hour=2.0), "mig"),
    Breakage("a share in a partition without shares", in_replica(sm_share_pct=50.0), "unshared"),
    Breakage("shares of two devices on one", lambda c: parts(c)[0].update(unshared=False), "unshared"),
    Breakage("all memory for one of two without shares", in_replica(memory_limit_bytes=16 * 2**30), "unshared"),
)
BREAKAGES = (
    *STRUCTURE,
    *GEOMETRY,
    *SHARES,
    *MEMORY,
    *RATES,
    *OBJECTIVES,
    *PREDICTIONS,
    *TYPES,
    *OWN,
    *PLANS,
)
