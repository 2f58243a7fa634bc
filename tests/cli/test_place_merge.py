"""``place --merge``: what shares a device and weights becomes one replica where that pays and keeps the SLOs."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprof.domain.deployment import read_map
from gpuprof.graph.merged_model import read_merged
from gpuprof.machine.cpu import local_cpu
from tests.command_line import CommandLine
from tests.estimators.rows import database, measured_row
from tests.merging.models import finetune_model, residual, save, transformer
from tests.reruns import serves_in_real_time

pytestmark = serves_in_real_time

Times = Mapping[str, tuple[float, float]]
ALIKE: Times = {"a": (4.0, 2.0), "b": (4.0, 2.0)}


@pytest.fixture
def here(here: Path) -> Path:
    base = transformer(layers=2)
    for seed, name in ((1, "a"), (2, "b")):
        save(finetune_model(base, 0.7, seed), here, f"tuned-{name}")
    save(residual(), here, "image")
    return here


def write_profiles(here: Path, times: Times) -> None:
    """Write a database in which a batch of n takes (start + n · each) / share."""
    rows = []
    for model, (start, each) in times.items():
        path = here / f"tuned-{model}.onnx"
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        rows += [
            measured_row(
                model, batch, (start + batch * each) * 100.0 / share, device=local_cpu().name, share=share,
                path=str(path), sha256=sha256, repeats=100, std_ms=0.1, memory=2**20,
            )
            for batch in (1, 2, 4)
            for share in (50.0, 100.0)
        ]  # fmt: skip
    database(here / "gpuprof-db", [replace(row, weight_bytes=2**16) for row in rows])


def slo(here: Path, **models: tuple[float, float]) -> None:
    lines = [f"{name},{rate:g},{slo_ms:g}" for name, (rate, slo_ms) in models.items()]
    (here / "slo.csv").write_text("\n".join(["model,rate_rps,slo_ms", *lines]) + "\n")


MERGE = "place --merge --gpus cpu:1"


def test_fine_tuned_models_become_one_replica_that_holds_shared_weights_once(here: Path, cli: CommandLine) -> None:
    write_profiles(here, ALIKE)
    slo(here, a=(20, 200), b=(10, 300))
    cli("place --gpus cpu:1 -o apart.json")
    assert "are merged" in cli(MERGE).err
    apart, merged = read_map(here / "apart.json"), read_map(here / "map.json")
    (replica,) = [replica for *_, replica in merged.places()]
    before = [replica for *_, replica in apart.places()]
    assert replica.sm_share_pct <= sum(separate.sm_share_pct for separate in before)
    ((name, merge),) = merged.models.items()
    assert replica.model == name
    assert {member: member_plan.rate_rps for member, member_plan in merge.members.items()} == {"a": 20.0, "b": 10.0}
    assert (merge.rate_rps, merge.slo_ms) == (30.0, 200.0)
    assert merge.saved_weight_bytes > 0
    assert replica.memory_limit_bytes == 2 * 2**20 - merge.saved_weight_bytes
    assert merge.path is not None
    described = read_merged(here / merge.path)
    assert described is not None
    assert {member.name for member in described.members} == set(merge.members)
    assert merge.sha256 == hashlib.sha256((here / merge.path).read_bytes()).hexdigest()
    assert merge.predicted is not None
    assert merge.predicted.p99_ms == pytest.approx(replica.predicted.p99_ms)
    cli("check")


def test_the_check_of_a_merged_map_finds_rates_and_slos_that_do_not_hold(here: Path, cli: CommandLine) -> None:
    write_profiles(here, ALIKE)
    slo(here, a=(20, 200), b=(10, 300))
    cli(MERGE)
    content = json.loads((here / "map.json").read_text())
    (model,) = content["models"].values()
    model |= {"slo_ms": 5.0, "rate_rps": 35.0}
    (here / "broken.json").write_text(json.dumps(content))
    rules = {(row["rule"], row["where"]) for row in cli.json("check broken.json", code=1)["violations"]}
    assert rules == {("rate", "a+b"), ("slo", "a+b")}


def test_a_merge_that_would_break_an_slo_is_left_out_and_the_reason_told(here: Path, cli: CommandLine) -> None:
    write_profiles(here, {"a": (1.0, 0.2), "b": (40.0, 5.0)})
    slo(here, a=(10, 20), b=(4, 900))
    assert "a and b are not merged: as one, 14 requests/s of a+b cannot be served" in cli(MERGE).err
    assert set(read_map(here / "map.json").models) == {"a", "b"}
    assert sorted(path.name for path in here.glob("*.onnx")) == ["image.onnx", "tuned-a.onnx", "tuned-b.onnx"]


def test_models_whose_requests_were_recorded_apart_are_planned_and_not_merged(here: Path, cli: CommandLine) -> None:
    write_profiles(here, ALIKE)
    slo(here, a=(20, 200), b=(10, 300))
    times = sorted([(0.1 * n, "a") for n in range(900)] + [(float(n // 3), "b") for n in range(270)])
    (here / "trace.csv").write_text("time_s,model\n" + "".join(f"{at:.3f},{model}\n" for at, model in times))
    message = "not merged: of how requests of several models arrive together"
    assert message in cli(MERGE, "--arrivals trace.csv").err
    cli("check")
    (here / "trace.csv").write_text("time_s,model\n0.1,a\n0.2,other\n")
    assert "nothing is known of how requests of b arrive" in cli(MERGE, "--arrivals trace.csv", code=3).err


def test_two_services_of_one_model_become_one_replica_under_their_own_names(here: Path, cli: CommandLine) -> None:
    write_profiles(here, ALIKE)
    (here / "slo.csv").write_text("service,model,rate_rps,slo_ms\nsearch,a,20,200\nmail,a,10,300\n")
    assert "search and mail are merged" in cli(MERGE).err
    merged = read_map(here / "map.json")
    (replica,) = [replica for *_, replica in merged.places()]
    (model,) = merged.models.values()
    assert {name: (member_plan.source_model, member_plan.rate_rps) for name, member_plan in model.members.items()} == {
        "search": ("a", 20.0),
        "mail": ("a", 10.0),
    }
    assert replica.rate_rps == 30.0
    cli("check")
    assert [row["model"] for row in cli.json("simulate --duration 5")["models"]] == ["search+mail"]  # one queue
    cli("place --gpus cpu:1 -o apart.json")
    rows = {row["model"]: row["slo_ms"] for row in cli.json("simulate apart.json --duration 5")["models"]}
    assert rows == {"search": 200.0, "mail": 300.0}
