"""A database in which everything failed, estimators that do not know a device, services that share a name: one line."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.domain.catalogue import datasets
from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id

_FAILED = "net at batch 1 under 100% failed on a100-80: CUDA out of memory"
_RULED_OUT = f"is ruled out: {_FAILED}"
_NO_KERNELS = "the database holds no kernels of h100 that are tied to ops, which the GK-Estimator adds up"
_NOT_IGNITER = "no model was measured on h100 with all of iGniter's metrics"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with demands, a database of failures, one of a V100, and a map of a model that fails."""
    made = tmp_path_factory.mktemp("nothing-known")
    now = datetime.now(UTC)
    run = RunRow(run_id=new_run_id(now), started_at=now, device="a100-80", collector="test", model="net")
    failed = [
        ModelRow(run_id=run.run_id, model="net", device="a100-80", batch=batch, error="CUDA out of memory")
        for batch in (1, 2, 4)
    ]
    KernelDb.create(made / "failed-db").append(Run(run, models=failed))
    (made / "slo.csv").write_text("model,rate_rps,slo_ms\nnet,50,100\n")
    (made / "alexnet.csv").write_text("model,rate_rps,slo_ms\nalexnet,50,100\n")
    (made / "same.csv").write_text("service,model,rate_rps,slo_ms\ns,alexnet,50,100\ns,resnet50,20,100\n")
    (made / "taken.csv").write_text("service,model,rate_rps,slo_ms\nalexnet,resnet50,50,100\nalexnet,alexnet,9,100\n")
    database = str(made / "v100-db")
    assert main(["db", "import", str(datasets() / "v100_profiles.csv"), "--db", database]) == 0
    words = ("place", "--slo-file", str(made / "alexnet.csv"), "--db", database, "--gpus", "v100", "--policy", "ffd")
    assert main([*words, "-o", str(made / "good.json")]) == 0
    content = json.loads((made / "good.json").read_text().replace("alexnet", "net").replace('"v100"', '"a100-80"'))
    (made / "map.json").write_text(json.dumps(content | {"planned_with": {}}))
    return made


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        *((f"estimate net --db failed-db --device a100-80 --estimator {name}", 3, _RULED_OUT)
          for name in ("database", "igniter")),
        *((f"place --slo-file slo.csv --db failed-db --gpus a100-80 --estimator {name} -o x.json", 1, _RULED_OUT)
          for name in ("database", "gk")),
        ("place --slo-file slo.csv --db failed-db --gpus a100-80 --strict -o x.json", 1, _RULED_OUT),
        *((f"place --slo-file slo.csv --db failed-db --gpus any --time-limit {limit} -o x.json", 1,
           "net is known to run on") for limit in ("0.001", "60")),
        ("compare --slo-file slo.csv --db failed-db --gpus a100-80 --policies ffd,parvagpu,gpulet", 1,
         "net: no policy serves any of it: no batch of net is known to run on a100-80: net at batch 1"),
        ("check map.json --db failed-db", 1, "map.json breaks"),
        ("explain map.json net --db failed-db", 0, _RULED_OUT),
        ("simulate map.json --db failed-db --estimator database --duration 1s", 3, _RULED_OUT),
        ("simulate map.json --db failed-db --reschedule 1s --duration 3s", 0,
         "rates that cannot be placed leave the map as it is, first: net: no batch of net is known to run on a100-80"),
        ("train --db failed-db --device a100-80", 3, "no ops were measured on a100-80"),
        ("calibrate --db failed-db --device a100-80", 3, "no model was measured on a100-80"),
        ("evaluate --db failed-db", 3, "no ops were measured on a100-80"),
        ("estimate alexnet --db v100-db --device h100 --estimator measured", 3, "alexnet was not measured on h100"),
        ("estimate alexnet --db v100-db --device h100 --estimator gk", 3, _NO_KERNELS),
        ("estimate alexnet --db v100-db --device h100 --estimator igniter", 3, _NOT_IGNITER),
        ("place --slo-file alexnet.csv --db v100-db --gpus h100 --estimator measured -o x.json", 1,
         "no batch of alexnet is known to run on h100: alexnet was not measured on h100"),
        ("place --slo-file alexnet.csv --db v100-db --gpus h100 --estimator igniter -o x.json", 3, _NOT_IGNITER),
        ("compare --slo-file alexnet.csv --db v100-db --gpus h100 --estimator measured --policies ffd", 1,
         "alexnet: no policy serves any of it: no batch of alexnet is known to run on h100"),
        ("place --slo-file alexnet.csv --db v100-db --gpus v100 --estimator measured -o x.json", 1,
         "batches of alexnet that are not full are not known on v100: alexnet was not measured on v100 at batch 1"),
        ("check good.json --db v100-db --estimator igniter", 1, "good.json breaks 1 rule"),
        ("explain good.json alexnet --db v100-db --estimator igniter", 3, "no model was measured on v100 with all"),
        ("simulate good.json --db v100-db --estimator gk --duration 1s", 3, "holds no kernels of v100"),
        ("serve good.json --adapt --estimator igniter --db v100-db --port 0", 3, "no model was measured on v100 with"),
        *((f"{verb} --slo-file {name}.csv --db v100-db --gpus v100", 3,
           f"{name}.csv:3: '{service}' was already asked for in line 2")
          for verb in ("place", "compare") for name, service in (("same", "s"), ("taken", "alexnet"))),
    ],
)  # fmt: skip
def test_each_verb_says_in_a_line_what_is_not_known(
    line: str, code: int, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "400")
    assert main(shlex.split(line)) == code
    messages = capsys.readouterr().err.strip().splitlines()
    assert len([message for message in messages if said in message]) == 1
    # Said on a machine that has not done so yet, of a limit that nothing keeps, and of the replicas of the map itself.
    excused = ("compiling the simulator", "longer than the time limit", "no machine can be set up as")
    messages = [message for message in messages if not any(words in message for words in excused)]
    assert len(messages) <= 3, messages
    assert all(message.startswith("gpuprof:") and len(message) < 400 for message in messages)
