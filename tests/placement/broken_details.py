"""Ways to break a map in what is seldom read: types, names, merges, requirements, and what the plan says of itself."""

from __future__ import annotations

from typing import Any

from tests.placement.broken_maps import (
    Breakage,
    Edit,
    both_ends,
    every_replica,
    first_gpu,
    in_map,
    in_model,
    in_prediction,
    in_replica,
    in_settings,
    parts,
    replica,
)


def _in_merge(**values: object) -> Edit:
    return lambda content: content["merges"]["ab"].update(values)


def _in_member(**values: object) -> Edit:
    return lambda content: replica(content)["merged"][0].update(values)


def _take_from_second_member(content: dict[str, Any]) -> None:
    for one, rate in zip(replica(content)["merged"], (30.0, 10.0), strict=True):
        one.update(rate_rps=rate, goodput_rps=rate)


def _say_creq(**values: object) -> Edit:
    return in_prediction(creq={"metric": "max_occupancy", "pct": 48.0, "source": "measured", **values})


def _say_mreq(**values: object) -> Edit:
    return in_prediction(mreq={"bytes": 2**30, "source": "measured", **values})


def _rename(content: dict[str, Any], name: str) -> None:
    content["models"][name] = content["models"].pop("a")
    replica(content)["model"] = name


def _forget_cost(**bounds: object) -> Edit:
    return lambda content: content["predicted"].update(cost_per_hour=None, **bounds)


def _split_slos(content: dict[str, Any]) -> None:
    """Let the two replicas of a model serve it under two names, with two SLOs, one of which is below a batch's time."""
    strict = {**content["models"]["a"], "slo_ms": 5.0, "source_model": "a", "predicted": None}
    content["models"]["strict"] = strict
    every_replica(content)[0]["model"] = "strict"


_FEW: dict[str, object] = {"fleet": [{"device": "plain", "count": 1}]}
_TIMES = {"p50_ms": 3.3, "p95_ms": 3.8, "p99_ms": 4.1}

NUMBERS = (
    Breakage("one process that is called true", in_replica(processes=True)),
    Breakage("an index that is called false", lambda c: first_gpu(c).update(index=False)),
    Breakage("an index beyond all machines", lambda c: first_gpu(c).update(index=10**30)),
    Breakage("a wait that is called false", in_replica(max_wait_ms=False)),
    Breakage("devices that are called true", in_map(gpus=True)),
    Breakage("a count that is called true", in_settings(fleet=[{"device": "plain", "count": True}])),
    Breakage("a version that is called true", in_settings(version=True)),
    Breakage("no shares by a number", lambda c: parts(c)[0].update(unshared=1), "unshared"),
    Breakage("no shares in words", lambda c: parts(c)[0].update(unshared="yes"), "unshared"),
    Breakage("a batch in digits", in_replica(batch="4")),
    Breakage("a share in digits", in_replica(sm_share_pct="50")),
    Breakage("an SLO in digits", in_model(slo_ms="100")),
    Breakage("a pause that makes a batch take for ever", in_prediction(pause_factor=1e300)),
    Breakage("requests that are called true", in_replica(rate_rps=True)),
)
NAMES = (
    Breakage("a node of two lines", lambda c: c["nodes"][0].update(name="node\n0")),
    Breakage("a node that clears the screen", lambda c: c["nodes"][0].update(name="\x1b[2J")),
    Breakage("the same node again, without devices", lambda c: c["nodes"].append({"name": "node0", "gpus": []})),
    Breakage("a model with a byte of nothing", lambda c: _rename(c, "a\0")),
    Breakage("a model of two lines", lambda c: _rename(c, "a\nb")),
    Breakage("a source of two lines", in_model(source_model="a\nb")),
    Breakage("found by a space", in_settings(found_by=" ")),
    Breakage("stopped by nothing", in_settings(stopped_by="")),
    Breakage("planned on a device without a name", in_settings(fleet=[{"device": "plain"}, {"device": ""}])),
    Breakage("made before there were clocks", lambda c: c.update(created="1800-01-01T00:00:00Z")),
    Breakage("a model under two SLOs, one of which no batch keeps", _split_slos, "pool"),
)
MERGES = (
    Breakage("a member twice", lambda c: replica(c)["merged"].append(replica(c)["merged"][0]), "merged"),
    Breakage("a member that is left out", lambda c: replica(c)["merged"].pop(), "merged"),
    Breakage("a member with all requests", _take_from_second_member, "merged"),
    Breakage("a member whose requests are no number", _in_member(rate_rps=float("nan")), "merged"),
    Breakage("a member with less goodput", _in_member(goodput_rps=1.0), "merged"),
    Breakage("two members of one name in the file", _in_merge(members={"a": "x", "b": "x"}), "merged"),
    Breakage("a member without a name in the file", _in_merge(members={"a": "", "b": "b"}), "merged"),
    Breakage("a merge without members", _in_merge(members={}), "merged"),
    Breakage("a merge that saves less than nothing", _in_merge(saved_weight_bytes=-1), "merged"),
    Breakage("a merge twice as quick", in_prediction(**{name: ms / 2.0 for name, ms in _TIMES.items()}), "merged"),
    Breakage("a merged replica that is idle", in_prediction(utilization=0.0), "merged"),
    Breakage("a merged replica busy five times over", in_prediction(utilization=5.0), "merged"),
    Breakage(
        "a model of a merge that answers at once",
        lambda c: c["models"]["a"]["predicted"].update({name: ms / 1e3 for name, ms in _TIMES.items()}),
        "merged",
    ),
    Breakage(
        "a model of a merge that takes long",
        lambda c: c["models"]["b"]["predicted"].update({name: ms * 1e3 for name, ms in _TIMES.items()}),
        "merged",
    ),
    Breakage("half a device that a merge leaves", in_map(external_fragmentation=0.5), "merged"),
    Breakage("a merge without slack", in_map(internal_slack=0.0), "merged"),
    Breakage("an SLO that a merge does not keep", in_model(slo_ms=3.2), "merged"),
)
REQUIREMENTS = (
    Breakage("a compute requirement of up to fifty devices", _say_creq(interval_pct=[10.0, 5000.0])),
    Breakage("a compute requirement from less than nothing", _say_creq(interval_pct=[-10.0, 50.0])),
    Breakage("a compute requirement of its own", _say_creq(pct=3.0), needs_estimator=True),
    Breakage("a compute requirement from elsewhere", _say_creq(source="guessed"), needs_estimator=True),
    Breakage("a memory requirement without end", _say_mreq(interval_bytes=[0.0, float("inf")])),
    Breakage("a memory requirement from nowhere", _say_mreq(source=" ")),
    Breakage("a memory requirement of more than is held", _say_mreq(bytes=2**31)),
    Breakage("a memory requirement of a byte", _say_mreq(bytes=1)),
    Breakage("times that nothing is unsure of", in_prediction(latency_ms_interval=None), needs_estimator=True),
)
PLANS = (
    Breakage("a bound above a cost that is not said", _forget_cost(lower_bound_cost_per_hour=99.0)),
    Breakage("a bound of all of a cost that is not said", _forget_cost(lower_bound_cost_per_hour=3.0), "spare"),
    Breakage("ends of more devices than there are", lambda c: (in_settings(**_FEW)(c), both_ends({"gpus": 9}, {})(c))),
    Breakage(
        "an upper end of more devices than there are",
        lambda c: (in_settings(**_FEW)(c), both_ends({}, {"gpus": 10**9})(c)),
    ),
    Breakage("percentiles of a plan without queues", in_settings(latency_budget=1.0)),
    Breakage("percentiles of a plan without queues, in instances", in_settings(latency_budget=0.9), "mig"),
    Breakage("nobody on a device without shares", lambda c: parts(c)[0].update(replicas=[]), "unshared"),
    Breakage("a share where nobody has one", in_replica(sm_share_pct=50.0), "unshared"),
    Breakage("shares of two devices on one", lambda c: parts(c)[0].update(unshared=False), "unshared"),
    Breakage("all memory for one of two without shares", in_replica(memory_limit_bytes=16 * 2**30), "unshared"),
)


def _in_times(place: int, value: float) -> Edit:
    return lambda content: replica(content)["batch_latency_ms"].__setitem__(place, value)


#: Each of these stopped the check once, or was not seen without an estimator.
TIMES = (
    Breakage("a time that varies a billion times itself", in_prediction(latency_cv=1e9), "pool"),
    Breakage("a pause that varies a billion times itself", in_prediction(pause_cv=1e9), "pool"),
    Breakage("a batch that takes longer than the universe", in_prediction(latency_ms=1e300), "pool"),
    Breakage("a batch of one that takes longer than the universe", _in_times(0, 1e300), "pool"),
    Breakage("a batch of two of eleven days", _in_times(1, 1e9), "pool"),
    Breakage("a batch of two that takes next to nothing", _in_times(1, 1e-300), "pool"),
)
DETAILS = (*TIMES, *NUMBERS, *NAMES, *MERGES, *REQUIREMENTS, *PLANS)
