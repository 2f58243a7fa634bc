"""Two services of one model go through the whole pipeline: each with its own rate and SLO."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpuprof
from gpuprof.domain.demand import read_demands
from gpuprof.errors import InputError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(gpuprof.build_model("mlp", tmp_path_factory.mktemp("services") / "mlp.onnx"))


def slo_file(folder: Path, *rows: str, header: str = "service,model,rate_rps,slo_ms,priority") -> Path:
    path = folder / "slo.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_services_of_one_model_are_placed_checked_and_served_by_their_own_names(tmp_path: Path, model: Path) -> None:
    path = slo_file(tmp_path, f"search,{model},200,20,1", f"mail,{model},50,40,0", f",{model},10,60,0")
    plan = gpuprof.place(path, fleet="a100-40")
    models = plan.deployment.models
    assert {name: (one.rate_rps, one.slo_ms) for name, one in models.items()} == {
        "search": (200.0, 20.0),
        "mail": (50.0, 40.0),
        "mlp": (10.0, 60.0),
    }
    assert {name: one.source_model for name, one in models.items()} == {"search": "mlp", "mail": "mlp", "mlp": None}
    assert len({one.sha256 for one in models.values()}) == 1
    assert not gpuprof.check(plan.deployment, against=path).violations
    with gpuprof.serve(plan.deployment, gpuprof.ServeSettings(port=0, simulate=True)) as server:
        traffic = gpuprof.LoadTraffic(duration_s=1.0, warmup_s=0.1)
        seen = gpuprof.load(server.url, server.map, traffic=traffic).to_frame()
    assert sorted(seen["model"]) == ["mail", "mlp", "search"]
    assert bool((seen["answered"] == seen["sent"]).all())


def test_two_services_of_one_name_are_one_line(tmp_path: Path, model: Path) -> None:
    path = slo_file(tmp_path, f"search,{model},200,20,1", f"search,{model},50,40,0")
    with pytest.raises(InputError, match=r"slo.csv:3: 'search' was already asked for in line 2"):
        read_demands(path)
    path = slo_file(tmp_path, f"{model},200,20", f"{model},50,40", header="model,rate_rps,slo_ms")
    with pytest.raises(InputError, match="was already asked for in line 2") as caught:
        read_demands(path)
    assert "column service" in (caught.value.fix or "")


def test_a_model_that_is_given_two_files_is_one_line(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other.onnx"
    other.write_bytes(model.read_bytes())
    header = "service,model,file,rate_rps,slo_ms"
    path = slo_file(tmp_path, f"a,net,{model},200,20", f"b,net,{other},50,40", header=header)
    with pytest.raises(InputError, match="the model 'net' is"):
        gpuprof.place(path, fleet="a100-40")
    path = slo_file(tmp_path, f"a,net,{model},200,20", f"b,net,{model},50,40", header=header)
    assert set(gpuprof.place(path, fleet="a100-40").deployment.models) == {"a", "b"}
