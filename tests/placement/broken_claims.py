"""Ways to break what a map claims of itself: its making, its bounds, and figures that are changed all together."""

from __future__ import annotations

from typing import Any

from tests.placement.broken_maps import (
    Breakage,
    Edit,
    both_ends,
    every_replica,
    in_map,
    in_model,
    in_prediction,
    in_replica,
    in_settings,
    leave_unplaced,
    parts,
    replica,
)


def _swap_predictions(content: dict[str, Any]) -> None:
    first, second = every_replica(content)[0], every_replica(content)[-1]
    first["predicted"], second["predicted"] = second["predicted"], first["predicted"]


def _swap_models(content: dict[str, Any]) -> None:
    models = content["models"]
    models["a"], models["b"] = {**models["b"], "rate_rps": 21.0}, models["a"]


def _reverse_times(content: dict[str, Any]) -> None:
    replica(content)["batch_latency_ms"].reverse()


def _even_times(content: dict[str, Any]) -> None:
    times = replica(content)["batch_latency_ms"]
    times[:] = [times[-1]] * len(times)


def _in_all_replicas(**values: object) -> Edit:
    return lambda content: [one["predicted"].update(values) for one in every_replica(content)]


def _split_in_two(content: dict[str, Any]) -> None:
    """Let two replicas of half the share each do what one did."""
    one = replica(content)
    half = {**one, "sm_share_pct": one["sm_share_pct"] / 2.0, "rate_rps": one["rate_rps"] / 2.0}
    parts(content)[0]["replicas"][0:1] = [half, half]


def _add_idle_device(content: dict[str, Any]) -> None:
    content["nodes"][0]["gpus"].append({"index": 7, "device": "plain", "partitions": [{"mig": None, "replicas": []}]})
    content["predicted"]["gpus"] += 1


_FOR_PLAIN: dict[str, object] = {"device": "plain", "count": 1}

CLAIMS = (
    Breakage("made at no time", lambda c: c.update(created="yesterday")),
    Breakage("made in a month that is none", lambda c: c.update(created="2026-13-01T00:00:00Z")),
    Breakage("made on a day that is none", lambda c: c.update(created="2026-02-30")),
    Breakage("made at an empty time", lambda c: c.update(created="")),
    Breakage("made in seconds", lambda c: c.update(created="1769860800")),
    Breakage("made in a thousand years", lambda c: c.update(created="3026-01-31T12:00:00Z")),
    Breakage("made at the end of all years", lambda c: c.update(created="9999-12-31T23:59:59+00:00")),
    Breakage("made at a number", lambda c: c.update(created=1769860800)),
    Breakage("a bound of a device that is not needed in a fleet", in_map(lower_bound_gpus=3, moves=0), "spare"),
    Breakage(
        "a bound beside a lower one of the cost", in_map(lower_bound_gpus=3, lower_bound_cost_per_hour=1.0), "spare"
    ),
    Breakage(
        "a bound of the cost beside a lower one", in_map(lower_bound_gpus=1, lower_bound_cost_per_hour=2.9), "spare"
    ),
    Breakage("planned on other devices", in_settings(fleet=[{"device": "sliced"}])),
    Breakage("planned on devices that nobody knows", in_settings(fleet=[{"device": "h900"}])),
    Breakage("planned on a device fewer", in_settings(fleet=[_FOR_PLAIN]), "pool"),
    Breakage("planned on half as many", in_settings(fleet=[_FOR_PLAIN, {"device": "sliced", "count": 9}]), "pool"),
    Breakage("planned on instances' devices only", in_settings(fleet=[_FOR_PLAIN]), "mig"),
    Breakage("planned by nobody", lambda c: c.update(policy="")),
    Breakage("planned by a space", lambda c: c.update(policy="  ")),
    Breakage("timed by nobody", in_settings(estimator="")),
    Breakage("a database of no hash", in_settings(database_sha256="abc")),
    Breakage("demands of no hash", in_settings(slo_sha256="zz")),
    Breakage("a model file of no path", in_model(path="")),
    Breakage("a merge of no file", lambda c: c.update(merges={"z": {"path": "", "members": {"a": "a", "b": "b"}}})),
    Breakage("left over without a reason", lambda c: (leave_unplaced(1e-3)(c), c["unplaced"][0].update(reason=""))),
    Breakage("all replicas' predictions swapped", _swap_predictions, "pool"),
    Breakage("the models' demands swapped", _swap_models),
    Breakage("smaller batches that take longer", _reverse_times),
    Breakage("batches of one as slow as full ones", _even_times),
    Breakage("two replicas of half the share as quick as one", _split_in_two, needs_estimator=True),
    Breakage("a device that does nothing and is counted", _add_idle_device),
    Breakage("all said to hold one byte", _in_all_replicas(memory_bytes=1), needs_estimator=True),
    Breakage("all said to hold nothing", _in_all_replicas(memory_bytes=0), needs_estimator=True),
    Breakage("all said to be idle", _in_all_replicas(utilization=0.0)),
    Breakage("all said to be fully busy", _in_all_replicas(utilization=1.0)),
    Breakage("all said to vary by half", _in_all_replicas(latency_cv=0.5), needs_estimator=True),
    Breakage("all said to pause at twice the time", _in_all_replicas(pause_factor=2.0), needs_estimator=True),
    Breakage("all said to pause unevenly", _in_all_replicas(pause_cv=3.0), needs_estimator=True),
    Breakage("all said to answer at once", _in_all_replicas(p50_ms=0.0, p95_ms=0.0, p99_ms=0.0)),
    Breakage("a p50 of nothing", in_prediction(p50_ms=0.0)),
    Breakage(
        "all p50 as high as p99",
        lambda c: [one["predicted"].update(p50_ms=one["predicted"]["p99_ms"]) for one in every_replica(c)],
    ),
    Breakage(
        "a compute requirement in horsepower",
        in_prediction(creq={"metric": "horsepower", "pct": 30.0, "source": "profiled"}),
    ),
    Breakage(
        "a compute requirement from nowhere", in_prediction(creq={"metric": "occupancy", "pct": 30.0, "source": ""})
    ),
    Breakage(
        "a compute requirement of ten devices",
        in_prediction(creq={"metric": "occupancy", "pct": 1000.0, "source": "profiled"}),
    ),
    Breakage(
        "an interval of a compute requirement upside down",
        in_prediction(creq={"metric": "occupancy", "pct": 30.0, "interval_pct": [40.0, 20.0], "source": "profiled"}),
    ),
    Breakage("fewer devices at the ends than suffice", both_ends({"gpus": 0}, {"gpus": 0})),
    Breakage("ends that need no devices", both_ends({"lower_bound_gpus": 1, "gpus": 0}, {"gpus": 1})),
    Breakage(
        "a time of the SLO's percentile above the SLO",
        lambda c: [
            one["predicted"].update(p99_ms=2.0 * c["models"]["a"]["slo_ms"])
            for one in (*every_replica(c), *c["models"].values())
        ],
        "pool",
    ),
    Breakage(
        "a wait in batches of one",
        lambda c: replica(c).update(batch=1, batch_latency_ms=replica(c)["batch_latency_ms"][:1], max_wait_ms=20.0),
    ),
    Breakage(
        "slack that is a little off",
        lambda c: c["predicted"].update(internal_slack=c["predicted"]["internal_slack"] - 0.06),
    ),
    Breakage(
        "unused parts that are a little off",
        lambda c: c["predicted"].update(external_fragmentation=c["predicted"]["external_fragmentation"] + 0.01),
    ),
    Breakage(
        "a cent less than the devices cost",
        lambda c: c["predicted"].update(cost_per_hour=(c["predicted"]["cost_per_hour"] or 0.0) * 0.99 + 0.001),
    ),
    Breakage(
        "an SLO a tenth of its own", lambda c: c["models"]["a"].update(slo_ms=c["models"]["a"]["slo_ms"] / 10.0), "pool"
    ),
    Breakage("a model behind a space", lambda c: c["models"].update({" a": c["models"]["a"]})),
    Breakage("replicas of a model behind a space", in_replica(model="a ")),
    Breakage(
        "an unknown kind of instance beside known ones",
        lambda c: parts(c).append({"mig": {"profile": "2g.2gb", "start": 2}, "replicas": []}),
        "mig",
    ),
)
