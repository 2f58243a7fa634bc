"""Ways to break a sound deployment map: each takes the decoded JSON of one and changes it in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: ``"shared"``: two replicas by percentage on one device; ``"mig"``: one in each of two instances; ``"pool"``: three
#: replicas of one model on two devices, one of them slower; ``"spare"``: a device more than is needed; ``"unshared"``:
#: two replicas on one device, held to no share; ``"merged"``: two models in one replica.
Layout = Literal["shared", "mig", "pool", "spare", "unshared", "merged"]
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
        said = replica(content)["predicted"]
        said[name] = said[name] * factor

    return edit


def _scaled_times(factor: float, *, which: slice = slice(None), also_latency: bool = False) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        one = replica(content)
        times = one["batch_latency_ms"]
        times[which] = [factor * ms for ms in times[which]]
        if also_latency:  # consistent with itself: only an estimator can tell
            said = one["predicted"]
            said["latency_ms"] *= factor
            said["throughput_rps"] /= factor
            said["latency_ms_interval"] = said["throughput_rps_interval"] = None

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
    Breakage("a merge that is no model's", in_replica(merged=[{"model": "a", "rate_rps": 20.0, "goodput_rps": 20.0}])),
    Breakage("a merge of a model's name", lambda c: c.update(merges={"a": {"path": "x", "members": {}}})),
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
    Breakage("a smaller share", in_replica(sm_share_pct=40.0)),
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
    Breakage("less goodput than served", _scaled_prediction("goodput_rps", 0.5)),
    Breakage("a p50 above the p99", in_prediction(p50_ms=1e4)),
    Breakage("a p99 below the p50", in_prediction(p99_ms=1e-3)),
    Breakage("no variation", in_prediction(latency_cv=0.7), needs_estimator=True),
    Breakage("slow after a pause", in_prediction(pause_factor=3.0), needs_estimator=True),
    Breakage("quicker after a pause", in_prediction(pause_factor=0.5)),
    Breakage("a source that is not its own", in_prediction(source="roofline"), needs_estimator=True),
    Breakage("an interval elsewhere", in_prediction(latency_ms_interval=[900.0, 901.0])),
    Breakage("an interval upside down", in_prediction(latency_ms_interval=[20.0, 5.0])),
    Breakage("an interval of the goodput elsewhere", in_prediction(goodput_rps_interval=[0.0, 1.0])),
    Breakage("a model's goodput", lambda c: c["models"]["a"]["predicted"].update(goodput_rps=40.0)),
    Breakage("a model's percentiles", lambda c: c["models"]["a"]["predicted"].update(p50_ms=1e5)),
    Breakage("the map's goodput", in_map(goodput_rps=1e6)),
    Breakage("fewer devices than used", in_map(gpus=0)),
    Breakage("more devices than used", in_map(gpus=7)),
    Breakage("a bound above the devices", in_map(lower_bound_gpus=2)),
    Breakage("a bound above the cost", in_map(lower_bound_cost_per_hour=1e3)),
    Breakage("a bound below what is served", in_map(upper_bound_goodput_rps=1.0)),
    Breakage("more moves than replicas", in_map(moves=9)),
    Breakage("less left over than there is", in_map(external_fragmentation=0.9)),
    Breakage("more slack than all", in_map(internal_slack=1.5)),
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
    Breakage("a merge of strangers", lambda c: c.update(merges={"z": {"path": "x", "members": {"q": "q"}}})),
    Breakage("a merge that nobody serves", lambda c: c.update(merges={"z": {"path": "x", "members": {"a": "a"}}})),
    Breakage("busy five times over", in_prediction(utilization=5.0)),
    Breakage("hardly busy", in_prediction(utilization=0.01)),
    Breakage("busy for less than no time", in_prediction(utilization=-0.5)),
    Breakage("times that vary fiftyfold", in_prediction(latency_cv=50.0)),
    Breakage("a pause that varies fiftyfold", in_prediction(pause_cv=50.0)),
    Breakage("a negative variation", in_prediction(latency_cv=-0.1)),
    Breakage("more memory than there is", in_prediction(memory_bytes=2**45)),
    Breakage("less than no memory", in_prediction(memory_bytes=-5)),
    Breakage("a negative goodput", in_prediction(goodput_rps=-1.0)),
    Breakage(
        "a model quicker than all its replicas",
        lambda c: c["models"]["a"]["predicted"].update(p50_ms=0.1, p95_ms=0.2, p99_ms=0.3),
    ),
    Breakage("a model slower than all its replicas", lambda c: c["models"]["a"]["predicted"].update(p99_ms=1e5)),
    Breakage("idle shares", in_map(internal_slack=0.1)),
    Breakage("less than no slack", in_map(internal_slack=-0.5)),
    Breakage("fewer than no moves", in_map(moves=-1)),
    Breakage("a bound below nothing", in_map(lower_bound_gpus=-1)),
    Breakage("larger batches than planned", in_settings(max_batch=2)),
    Breakage("no process planned", in_settings(max_processes=0)),
    Breakage("a budget of twice the SLO", in_settings(latency_budget=2.0)),
    Breakage("a confidence of seven", in_settings(confidence=7.0)),
    Breakage("negative overhead", in_settings(overhead_ms=-1.0)),
    Breakage("a fleet of no devices", in_settings(fleet=[{"device": "plain", "count": 0}])),
    Breakage("a throughput interval elsewhere", in_prediction(throughput_rps_interval=[1e5, 2e5])),
    Breakage("an interval of p99 elsewhere", in_prediction(p99_ms_interval=[1e5, 2e5])),
    Breakage("an interval of three", in_prediction(latency_ms_interval=[1.0, 2.0, 3.0])),
    Breakage("less than nothing unplaced", lambda c: c.update(unplaced=[{"model": "a", "rate_rps": -5, "reason": ""}])),
)


def every_replica(content: dict[str, Any]) -> list[Any]:
    return [one for gpu in content["nodes"][0]["gpus"] for part in gpu["partitions"] for one in part["replicas"]]


def _scaled_everywhere(factor: float, *names: str) -> Edit:
    """Change figures of the replicas and of their models alike, so that they agree with one another."""

    def edit(content: dict[str, Any]) -> None:
        for one in (*every_replica(content), *content["models"].values()):
            for name in names:
                if one["predicted"].get(name) is not None:
                    one["predicted"][name] *= factor

    return edit


def _less_goodput(content: dict[str, Any]) -> None:
    _scaled_everywhere(0.9, "goodput_rps")(content)
    content["predicted"]["goodput_rps"] *= 0.9
    for one in every_replica(content):
        one["predicted"]["goodput_rps_interval"] = None


def _busier(content: dict[str, Any]) -> None:
    before = content["predicted"]["internal_slack"]
    _scaled_everywhere(1.3, "utilization")(content)
    content["predicted"]["internal_slack"] = 1.0 - 1.3 * (1.0 - before)


def _scaled_interval(name: str, low: float, high: float) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        said = replica(content)["predicted"]
        said[name] = [low * said[name][0], high * said[name][1]]

    return edit


def _scaled_memory(factor: float, *, also_limit: bool = False) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        one = replica(content)
        one["predicted"]["memory_bytes"] = int(factor * one["predicted"]["memory_bytes"])
        if also_limit:
            one["memory_limit_bytes"] = one["predicted"]["memory_bytes"]

    return edit


def _call_nothing(content: dict[str, Any]) -> None:
    content["models"][" "] = content["models"].pop("a")
    replica(content)["model"] = " "


def _even_rates(content: dict[str, Any]) -> None:
    every = every_replica(content)
    total = sum(one["rate_rps"] for one in every)
    for one in every:
        one["rate_rps"] = one["predicted"]["goodput_rps"] = total / len(every)
        one["predicted"]["goodput_rps_interval"] = one["predicted"]["utilization"] = None


def _smaller_batch(content: dict[str, Any]) -> None:
    """Leave the last batch away, and let the figures of the batch agree."""
    one = replica(content)
    said, times = one["predicted"], one["batch_latency_ms"][:-1]
    one.update(batch=len(times), batch_latency_ms=times)
    said.update(latency_ms=times[-1], throughput_rps=1000.0 * len(times) / times[-1])
    said.update(latency_ms_interval=None, throughput_rps_interval=None, p99_ms_interval=None, goodput_rps_interval=None)


def _in_every(**values: object) -> Edit:
    return lambda content: [one.update(values) for one in every_replica(content)]


def _ends(**values: object) -> Edit:
    return lambda content: content["predicted"].update(at_lower_ends={"gpus": 1, "served_rps": 40.0, **values})


def _mreq(needed: float, low: float, high: float) -> Edit:
    told = {"bytes": needed, "interval_bytes": [low, high], "source": "weights and live activations, scaled"}
    return lambda content: replica(content)["predicted"].update(mreq=told)


def _creq(pct: float, low: float, high: float) -> Edit:
    told = {"metric": "max_occupancy", "pct": pct, "interval_pct": [low, high], "source": "measured"}
    return lambda content: replica(content)["predicted"].update(creq=told)


_PERCENTILES = ("p50_ms", "p95_ms", "p99_ms")
FIGURES = (
    Breakage("half the cost", lambda c: c["predicted"].update(cost_per_hour=0.5)),
    Breakage("a tenth more cost", lambda c: c["predicted"].update(cost_per_hour=1.1)),
    Breakage("no cost at all", in_map(cost_per_hour=0.0)),
    Breakage("half the cost of instances", in_map(cost_per_hour=2.0), "mig"),
    Breakage("one device's cost for two", in_map(cost_per_hour=1.0), "pool"),
    Breakage("all percentiles halved alike", _scaled_everywhere(0.5, *_PERCENTILES)),
    Breakage("all percentiles halved alike in instances", _scaled_everywhere(0.5, *_PERCENTILES), "mig"),
    Breakage("all percentiles halved alike in a pool", _scaled_everywhere(0.5, *_PERCENTILES), "pool"),
    Breakage("all percentiles a fifth less", _scaled_everywhere(0.8, *_PERCENTILES), "pool"),
    Breakage("all percentiles a fifth more", _scaled_everywhere(1.2, *_PERCENTILES), "pool"),
    Breakage("all p99 a fifth less", _scaled_everywhere(0.8, "p99_ms"), "pool"),
    Breakage("all p95 a fifth less", _scaled_everywhere(0.8, "p95_ms"), "pool"),
    Breakage("all p50 a fifth less", _scaled_everywhere(0.8, "p50_ms"), "pool"),
    Breakage("all p99 doubled", _scaled_everywhere(2.0, "p99_ms")),
    Breakage("one p50 more by half", _scaled_prediction("p50_ms", 1.5), "pool"),
    Breakage("one p95 less by half", _scaled_prediction("p95_ms", 0.5), "pool"),
    Breakage("one p99 more by half", _scaled_prediction("p99_ms", 1.5), "pool"),
    Breakage("a model's p50 alone", lambda c: c["models"]["a"]["predicted"].update(p50_ms=1.0), "pool"),
    Breakage("goodput a tenth less everywhere", _less_goodput),
    Breakage("goodput a tenth less everywhere in a pool", _less_goodput, "pool"),
    Breakage("all busier by three tenths", _busier),
    Breakage("all busier by three tenths in a pool", _busier, "pool"),
    Breakage("one busier by half", _scaled_prediction("utilization", 1.5), "pool"),
    Breakage("an interval of p99 too wide", _scaled_interval("p99_ms_interval", 0.2, 5.0)),
    Breakage("an interval of p99 without an end", _scaled_interval("p99_ms_interval", 0.0, 1.0)),
    Breakage("an interval of p99 in a pool too wide", _scaled_interval("p99_ms_interval", 0.2, 5.0), "pool"),
    Breakage("an interval of goodput too wide", _scaled_interval("goodput_rps_interval", 0.2, 5.0)),
    Breakage("an interval of times too wide", _scaled_interval("latency_ms_interval", 0.5, 2.0)),
    Breakage("an interval of times without width", in_prediction(latency_ms_interval=[6.0, 6.0]), needs_estimator=True),
    Breakage(
        "an interval of throughput too wide",
        _scaled_interval("throughput_rps_interval", 0.5, 2.0),
        needs_estimator=True,
    ),
    Breakage("half the memory said", _scaled_memory(0.5), needs_estimator=True),
    Breakage("half the memory said and allowed", _scaled_memory(0.5, also_limit=True), needs_estimator=True),
    Breakage("a hundredth of the memory said", _scaled_memory(0.01), needs_estimator=True),
    Breakage("twice the memory said", _scaled_memory(2.0)),
    Breakage("twice the memory said and allowed", _scaled_memory(2.0, also_limit=True), needs_estimator=True),
    Breakage("a limit of half of what is said", in_replica(memory_limit_bytes=2**29)),
    Breakage("a limit of a tenth less than is said", in_replica(memory_limit_bytes=int(0.9 * 2**30)), "mig"),
    Breakage("as many requests for the slow as for the quick", _even_rates, "pool"),
    Breakage("a wait that percentiles know nothing of", in_replica(max_wait_ms=30.0)),
    Breakage("a wait everywhere that percentiles know nothing of", _in_every(max_wait_ms=30.0), "pool"),
    Breakage("a smaller batch with figures of its own", _smaller_batch, "pool"),
    Breakage("a first batch that takes half", _scaled_times(0.5, which=slice(0, 1))),
    Breakage("a first batch that takes twice as long", _scaled_times(2.0, which=slice(0, 1))),
    Breakage("all times halved, percentiles not", _scaled_times(0.5, also_latency=True)),
    Breakage("all times doubled, percentiles not", _scaled_times(2.0, also_latency=True), "mig"),
    Breakage("more served at an end than is asked for", _ends(served_rps=1e4)),
    Breakage("a bound at an end above its devices", _ends(lower_bound_gpus=3)),
    Breakage("less than nothing served at an end", _ends(served_rps=-1.0)),
    Breakage("a compute requirement above its interval", _creq(50.0, 10.0, 20.0)),
    Breakage("a compute requirement below its interval", _creq(5.0, 10.0, 20.0)),
    Breakage("a negative compute requirement", _creq(-5.0, -10.0, 20.0)),
    Breakage("a memory requirement above its interval", _mreq(5e9, 1e9, 2e9)),
    Breakage("a memory requirement below its interval", _mreq(5e8, 1e9, 2e9)),
    Breakage("a negative memory requirement", _mreq(-5.0, -10.0, 20.0)),
    Breakage("a model called nothing", _call_nothing),
    Breakage("a model of no name in the database", in_model(source_model=" ")),
    Breakage("sizes that nobody can read", in_model(dims="seq=")),
    Breakage("a fleet with a device twice", in_settings(fleet=[{"device": "plain", "count": 1}, {"device": "plain"}])),
    Breakage("devices for nothing", in_settings(fleet=[{"device": "plain", "price_per_hour": 0.0}])),
    Breakage("devices that pay", in_settings(fleet=[{"device": "plain", "price_per_hour": -1.0}])),
    Breakage("settings of another version", in_settings(version=2)),
    Breakage("a setting that nobody knows", in_settings(colour="red")),
    Breakage("a negative handover", in_settings(host={"handover_ms": -1.0})),
)


def both_ends(low: dict[str, object], high: dict[str, object]) -> Edit:
    served = {"gpus": 1, "served_rps": 40.0}
    return in_map(at_lower_ends={**served, **low}, at_upper_ends={**served, **high})


def _under_confidence(edit: Edit, confidence: float) -> Edit:
    return lambda content: (edit(content), in_settings(confidence=confidence)(content))


def leave_unplaced(rate_rps: float) -> Edit:
    return lambda content: content.update(unplaced=[{"model": "a", "rate_rps": rate_rps, "reason": "no room"}])


def _hide_bound(edit: Edit) -> Edit:
    """Break a map, and let a demand that is nearly served hide it."""
    return lambda content: (edit(content), leave_unplaced(1e-9)(content))


def _on_two_nodes(content: dict[str, Any]) -> None:
    """Put the second replica on a device of its own, and count no device more."""
    second = parts(content)[0]["replicas"].pop()
    gpu = {**first_gpu(content), "partitions": [{"mig": None, "replicas": [second]}]}
    content["nodes"].append({"name": "other", "gpus": [gpu]})


def _twice_as_fast_devices(content: dict[str, Any]) -> None:
    """Say that a replica holds all of the device, and that it is as quick."""
    replica(content)["sm_share_pct"] = 100.0
    parts(content)[0]["replicas"].pop()
    content["models"].pop("b")


BOUNDS = (
    Breakage("a bound of all devices where one is not needed", in_map(lower_bound_gpus=3), "spare"),
    Breakage("a bound of all the cost where a device is not needed", in_map(lower_bound_cost_per_hour=3.0), "spare"),
    Breakage("a bound of nearly all the cost", in_map(lower_bound_cost_per_hour=2.7), "spare"),
    Breakage(
        "a bound of all devices and their cost", in_map(lower_bound_gpus=3, lower_bound_cost_per_hour=3.0), "spare"
    ),
    Breakage("a bound above the devices, beside a demand nearly served", _hide_bound(in_map(lower_bound_gpus=9))),
    Breakage(
        "a bound above the cost, beside a demand nearly served", _hide_bound(in_map(lower_bound_cost_per_hour=99.0))
    ),
    Breakage("nothing of a demand unplaced", leave_unplaced(0.0)),
    Breakage(
        "a bound above what slower batches take",
        lambda c: (both_ends({}, {"gpus": 0})(c), in_map(lower_bound_gpus=1)(c)),
    ),
    Breakage("a bound at the lower ends above the map", both_ends({"lower_bound_gpus": 2, "gpus": 2}, {})),
    Breakage(
        "a bound at the lower ends above the upper ends",
        both_ends({"lower_bound_gpus": 3, "gpus": 3}, {"gpus": 2, "served_rps": 40.0}),
    ),
    Breakage("a bound of goodput below what one replica serves", in_map(upper_bound_goodput_rps=19.0)),
    Breakage("a bound of no goodput", in_map(upper_bound_goodput_rps=0.0)),
)
HIDDEN = (
    Breakage("halved times under a confidence", _under_confidence(_scaled_times(0.5), 0.5)),
    Breakage(
        "a last batch that is quicker, under a confidence",
        _under_confidence(_scaled_times(0.9, which=slice(-1, None)), 0.9),
    ),
    Breakage(
        "a first batch that is quicker, under a confidence of nothing",
        _under_confidence(_scaled_times(0.9, which=slice(0, 1)), 0.0),
        needs_estimator=True,
    ),
    Breakage("other arrivals than its percentiles are of", in_settings(arrivals="gamma:16"), "pool"),
    Breakage("even arrivals than its percentiles are of", in_settings(arrivals="constant"), "pool"),
    Breakage("arrivals that nobody knows", in_settings(arrivals="gama:4")),
    Breakage("a part of the SLO that batches do not keep", in_settings(latency_budget=0.01)),
    Breakage("overhead that percentiles know nothing of", in_settings(overhead_ms=40.0), "pool"),
    Breakage("more overhead than the SLO", in_settings(overhead_ms=1e6)),
    Breakage("a handover that times know nothing of", in_settings(host={"handover_ms": 5.0})),
    Breakage("a replica on another node that nobody counts", _on_two_nodes),
    Breakage("all of a device for half of it", _twice_as_fast_devices),
    Breakage(
        "half the demand and half the requests",
        lambda c: (
            c["models"]["a"].update(rate_rps=c["models"]["a"]["rate_rps"] / 2.0),
            [one.update(rate_rps=one["rate_rps"] / 2.0) for one in every_replica(c)],
        ),
        "pool",
    ),
    Breakage(
        "a batch of one that says it is of four",
        lambda c: replica(c).update(batch=4, batch_latency_ms=[replica(c)["batch_latency_ms"][0]] * 4),
        "mig",
    ),
    Breakage(
        "twice the processes and the throughput",
        lambda c: (replica(c).update(processes=2), _scaled_prediction("throughput_rps", 2.0)(c)),
        needs_estimator=True,
    ),
    Breakage(
        "requests of one model at the other's replica",
        lambda c: (replica(c).update(rate_rps=30.0), other_replica(c).update(rate_rps=10.0)),
    ),
    Breakage("a stricter percentile", in_model(percentile=99.99, slo_ms=7.0)),
    Breakage("an instance of the other's size", lambda c: parts(c)[1]["mig"].update(profile="1g.10gb"), "mig"),
    Breakage("an instance a slice further", _in_mig(start=1), "mig"),
    Breakage("a replica in no instance", lambda c: parts(c).append({"mig": None, "replicas": [replica(c)]}), "mig"),
    Breakage("nobody held to a share, and one of half", lambda c: parts(c)[0].update(unshared=True)),
)


BREAKAGES = (
    *FIGURES,
    *TYPES,
    *OWN,
    *STRUCTURE,
    *GEOMETRY,
    *SHARES,
    *MEMORY,
    *RATES,
    *OBJECTIVES,
    *PREDICTIONS,
    *BOUNDS,
    *HIDDEN,
)
