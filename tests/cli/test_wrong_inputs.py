"""Wrong inputs: each is refused in one line that names a remedy, with an exit code, without a traceback."""

import json
import os
import shlex
from pathlib import Path

import pytest

from gpuprof.cli.main import main
from gpuprof.domain.catalogue import datasets
from gpuprof.kernel_db.schema import ModelRow
from tests.estimators.rows import database
from tests.export.test_export import MAP
from tests.small_models import floats, write_model

DATABASE = Path(__file__).parents[1] / "kernel_db/database_of_0_1_0/gpuprof-db"
#: What is written before: name → content.
_FILES = {
    "empty.onnx": "",
    "text.onnx": "not a model",
    "empty.csv": "",
    "negative.csv": "model,rate_rps,slo_ms\nnet.onnx,-5,20\n",
    "twice.csv": "model,rate_rps,slo_ms\nnet.onnx,5,20\nnet.onnx,6,20\n",
    "unknown.csv": "model,rate_rps,slo_ms\nnowhere,5,20\n",
    "slo.csv": "model,rate_rps,slo_ms\nnet.onnx,5,20\n",
    "absurd.csv": "model,rate_rps,slo_ms\nnet.onnx,1e15,20\n",
    "map.json": MAP.to_json(),
    "list.json": "[]",
    "fleet.toml": "this is = = no TOML",
    "trace.csv": "time_s,model\nlater,b\n",
    "token": "",
    "folder/file": "",
    "listed.yaml": "models: [net.onnx]\nsteps: [profile]\n",
    "devices.toml": "[[devices]]\nname = 'x'\n",
    "deep.json": "[" * 100_000,
    "list.yaml": "- a\n- b\n",
    "data.npz": "PK nonsense",
    "nodes.json": json.dumps(json.loads(MAP.to_json()) | {"nodes": []}),
    "itself.yaml": "steps:\n  - run: {plan: itself.yaml}\n",
    "tag.yaml": "steps: !!python/object/apply:os.system ['true']\n",
    "tab.yaml": "steps:\n\t- doctor\n",
    "foreign/sales.parquet": "PAR1",
    "short_keys.yaml": "models: {a: {file: net.onnx, rate: 10, slo: 50}}\nsteps: [doctor]\n",
    "circle/file": "",
    "net.pt": "PK\3\4 archive/data.pkl",
}

#: Words of a command line → part of what is said.
_WRONG: list[tuple[str, str]] = [
    ("profile", "model"),
    ("profile none.onnx", "none.onnx"),
    ("profile empty.onnx --device cpu", "empty"),
    ("profile text.onnx --device cpu", "text.onnx"),
    ("profile net.onnx --batch 0", "batch"),
    ("profile net.onnx --share 0 --device cpu", "share"),
    ("profile net.onnx --share 3g.40gb --device cpu", "3g.40gb"),
    ("profile net.onnx --collector perf", "perf"),
    ("profile net.onnx --time-limit -1", "time-limit"),
    ("profile net.onnx --beside other:x --device cpu", "other"),
    ("profile net.onnx --device tpu", "tpu"),
    ("profile --from-report none.sqlite --batch 1", "none.sqlite"),
    ("estimate net.onnx --batch 99999999999 --device a100-80", "batch"),
    ("estimate net.onnx --device a100-8", "a100-80"),
    ("estimate net.onnx --device a100-80 --share 9g.1gb", "9g.1gb"),
    ("estimate net.onnx --device a100-80 --estimator oracle", "oracle"),
    ("estimate net.onnx --device a100-80 --precision float13", "float13"),
    ("estimate net.onnx --device a100-80 --beside net.onnx@x --share 50", "net.onnx@x"),
    ("estimate nowhere --device a100-80", "nowhere"),
    ("place --slo-file none.csv", "none.csv"),
    ("place --slo-file empty.csv --gpus a100-80", "empty.csv"),
    ("place --slo-file negative.csv --gpus a100-80", "-5"),
    ("place --slo-file twice.csv --gpus a100-80", "net"),
    ("place --slo-file unknown.csv --gpus a100-80 --db DB", "nowhere"),
    ("place --slo-file slo.csv --gpus a100-80:0", "a100-80:0"),
    ("place --slo-file slo.csv --gpus fleet.toml", "fleet.toml"),
    ("place --slo-file slo.csv --gpus a100-80 --policy best", "best"),
    ("place --slo-file slo.csv --gpus a100-80 -O magic=1", "magic"),
    ("place --slo-file slo.csv --gpus a100-80 --confidence 2", "confidence"),
    ("place --slo-file slo.csv --gpus a100-80 --arrivals sometimes", "sometimes"),
    ("place --slo-file absurd.csv --gpus a100-80:1 --policy ffd", "absurd.csv:2"),
    ("compare --slo-file slo.csv --gpus a100-80 --policies ''", "polic"),
    ("check list.json", "list.json"),
    ("explain map.json nowhere", "nowhere"),
    ("explain map.json", "several models (name one: Net/A, b)"),
    ("export map.json --to helm", "helm"),
    ("export map.json --to k8s", "--image"),
    ("simulate map.json --duration soon", "soon"),
    ("simulate map.json --trace trace.csv", "trace.csv"),
    ("simulate map.json --fail node9@1s", "node9"),
    ("simulate map.json --rate nowhere=5", "nowhere"),
    ("serve map.json --simulate --node node9", "node9"),
    ("serve map.json --simulate --host 0.0.0.0", "--token-file"),
    ("serve map.json --simulate --token-file token", "token"),
    ("load http://127.0.0.1:9 --map map.json --duration 1", "127.0.0.1:9"),
    ("load ftp://x --map map.json", "ftp"),
    ("load http://127.0.0.1:9 --map map.json -o out.xlsx", ".json"),
    ("merge net.onnx -o both.onnx", "two"),
    ("merge a.onnx b.onnx -o both.onnx", "a.onnx"),
    ("merge net.onnx net.onnx -o net.onnx", "net.onnx"),
    ("similarity net.onnx", "two"),
    ("zoo build resnet51", "resnet50"),
    ("zoo build mlp --batch many", "many"),
    ("zoo rebatch text.onnx -o out.onnx", "text.onnx"),
    ("trace make --rate b", "b"),
    ("db sql 'select nothing from models' --db DB", "nothing"),
    ("db sql 'drop table models' --db DB", "select"),
    ("db ls --db none", "none"),
    ("db import none.csv --db db", "none.csv"),
    ("report none", "none"),
    ("train --db none", "none"),
    ("calibrate --db none --device a100-80", "none"),
    ("apply map.json --port 9", "9"),
    ("profile net.onnx --device cpu --time-limit 1e999", "time-limit"),
    ("profile net.onnx --device cpu --share 99999cores", "cores at most"),
    ("profile net.onnx --device cpu --collector os:getcwd", "collect"),
    ("profile net.onnx --device cpu --input-data data.npz", "numpy.savez"),
    ("estimate net.onnx --device a100-80 --estimator os:getcwd", "os:getcwd"),
    ("estimate net.onnx --device x --device-file devices.toml", "[NAME]"),
    ("place --slo-file folder --gpus a100-80", "a CSV file"),
    ("place --slo-file slo.csv --gpus a100-80 --policy os:getcwd", "place()"),
    ("place --slo-file slo.csv --gpus a100-80 --policy nowhere:Policy", "package.module:Class"),
    ("trace show deep.json", "write time_s,model"),
    ("load http://127.0.0.1:9 --map map.json --rate b=1e9", "less than 10000000"),
    ("simulate map.json --rate b=1e12", "1,000,000,000"),
    ("run list.yaml", "steps"),
    ("profile pipe --device cpu", "pipe"),
    ("profile net.onnx --device cpu --input-data pipe", "named pipe"),
    ("profile net.onnx --device cpu --dim batch=3", "beside the batch, which --batch sets or place chooses: none"),
    ("profile net.onnx --device cpu --batch 1:8", "1:8"),
    ("profile --from-report /dev/zero --batch 1", "a device"),
    ("estimate net.onnx --device ''", "empty"),
    ("place --slo-file /dev/zero --gpus a100-80", "a device"),
    ("place --slo-file slo.csv --gpus a100-80:1 -o pipe", "named pipe"),
    ("place --slo-file slo.csv --gpus a100-80:1 --arrivals pipe", "pipe"),
    ("check pipe", "named pipe"),
    ("serve nodes.json --simulate --port 0", "no replica"),
    ("merge net.onnx pipe -o both.onnx", "pipe"),
    ("zoo build mlp -o /dev/null", "a device"),
    ("run itself.yaml", "no step"),
    ("run tag.yaml", "unknown verb"),
    ("run tab.yaml", "spaces"),
    ("run pipe", "named pipe"),
    ("load 'http://exa mple' --map map.json", "http://127.0.0.1:8000"),
    ("profile net.onnx --device cpu --processes 99999", "from 1 to 65,536"),
    (f"profile net.onnx --device cpu --batch {'9' * 5000}", "from 1 to 65,536"),
    ("run listed.yaml", "models: {NAME"),
    ("report slo.csv", "give a database"),
    ("place --slo-file slo.csv --gpus a100-80:99999999999999999999", "999,999,999"),
    ("trace show none.csv", "gpuprof trace make"),
    ("db import folder --db db", "no file of folder"),
    ("db compact --db foreign", "no kernel database"),
    ("report map.json -o page.gif", "one HTML page"),
    ("train --db DB --regressors magic", "magic"),
    ("run short_keys.yaml", "rate_rps"),
    ("report circle", "no kernel database"),
    ("report nothing_there", "holds no runs"),
    ("export map.json --to k8s --image 'a b' -o k8s", "'a b'"),
    ("serve map.json --simulate --host 300.1.1.1 --insecure --port 0", "--host"),
    ("profile net.onnx --device cpu --collector nsys", "leave out --collector"),
    ("profile ''", "''"),
    ("simulate map.json --rate b=1 --rate b=2", "the rate of b is given twice: 1 and 2"),
    ("place --slo-file slo.csv --gpus a100-80:1 --policy milp -O unshared=true -O unshared=false", "given twice"),
    ("profile offset.onnx --device cpu", "(the model is damaged: export it again)"),
    ("load https://127.0.0.1:9 --map map.json --ca-file text.onnx", "(give a file that begins with -----BEGIN)"),
    ("serve map.json --simulate --node node0 --tls-cert text.onnx --tls-key text.onnx --port 0", "-----BEGIN"),
    ("place --slo-file slo.csv --gpus a100-80:1 --gpus l4:1", "--gpus is given 2 times"),
    ("db sql 'select 1; select 2' --db DB", "holds 2 statements"),
    ("profile net.onnx --device cpu --db /proc/db", "/proc is not writable"),
    ("place --slo-file slo.csv --gpus a100-80:1 -o /proc/map.json", "cannot write /proc/map.json"),
    ("train --db DB --regressors lasso,lasso", "lasso is named twice"),
    ("profile net.pt --device cpu", "as PyTorch and Keras write (export the model with torch.onnx.export"),
    ("profile https://example.com/net.onnx --device cpu", "(download it first)"),
    ("place slo.csv --gpus t4", "(demands are given by --slo-file slo.csv)"),
    ("zoo build", "see gpuprof zoo build --help"),
    ("serve map.json --simulate --port 8123 --grpc-port 8123", "are both 8123 (give them different ports)"),
    ("load http://127.0.0.1:9/v2?x=1 --map map.json", "has a path, and requests go to /v2 at its root"),
    ("load http://127.0.0.1:9 --map map.json --duration 0s", "--duration must be greater than or equal to 0.1"),
    ("load http://127.0.0.1:9 --map map.json --duration 1y", "write a number and ms, s, m, h or d"),
    ("place --slo-file none.csv -o missing/out.json", "does not exist (name a file in a directory that exists)"),
    ("merge a.onnx b.onnx -o missing/out.json", "does not exist (name a file in a directory that exists)"),
    ("simulate none.json -o missing/out.json", "does not exist (name a file in a directory that exists)"),
    ("load http://127.0.0.1:9 -o missing/out.json", "does not exist (name a file in a directory that exists)"),
    ("zoo build nothing -o missing/out.json", "does not exist (name a file in a directory that exists)"),
    ("trace make --rate m=-1 -o missing/out.json", "does not exist (name a file in a directory that exists)"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wrong")
    for name, content in _FILES.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(content, encoding="latin-1")
    os.mkfifo(made / "pipe")
    (made / "circle/itself").symlink_to("itself")
    (made / "nothing_there").mkdir()
    from onnx import helper

    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    write_model(made / "net.onnx", nodes, {"x": ["batch", 4]}, {"y": ["batch", 4]}, {"w": floats(4, 4)})
    _write_broken_model(made)
    return made


def _write_broken_model(folder: Path) -> None:
    """Write a model whose weights stand nowhere in another file."""
    from onnx import TensorProto, load

    model = load(folder / "net.onnx")
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "text.onnx"), ("offset", "many")):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    (folder / "offset.onnx").write_bytes(model.SerializeToString())


@pytest.mark.parametrize(("line", "named"), _WRONG, ids=[line[:80] for line, _ in _WRONG])
def test_a_wrong_input_is_refused_in_one_line_with_a_remedy(
    line: str, named: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("GPUPROF_")]:
        monkeypatch.delenv(name)
    assert main([str(DATABASE) if word == "DB" else word for word in shlex.split(line)]) in {1, 3}
    stderr = capsys.readouterr().err.strip().splitlines()
    assert stderr and stderr[-1].startswith("gpuprof: "), stderr
    last = stderr[-1]
    assert "bug:" not in last and "Traceback" not in "".join(stderr), last
    assert named.lower() in last.lower(), last
    assert last.endswith(")") or " must " in last or ": " in last.removeprefix("gpuprof: "), f"no remedy: {last}"


_FAILED = "net at batch 1 under 100% failed on a100-80: CUDA out of memory"
_RULED_OUT = f"is ruled out: {_FAILED}"
_NO_KERNELS = "the database holds no kernels of h100 that are tied to ops, which the GK-Estimator adds up"
_NOT_IGNITER = "no model was measured on h100 with all of iGniter's metrics"


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with demands, a database of failures, one of a V100, and a map of a model that fails."""
    made = tmp_path_factory.mktemp("nothing-known")
    error = "CUDA out of memory"
    database(made / "failed-db", [ModelRow("r1", "net", "a100-80", batch, error=error) for batch in (1, 2, 4)])
    (made / "slo.csv").write_text("model,rate_rps,slo_ms\nnet,50,100\n")
    (made / "alexnet.csv").write_text("model,rate_rps,slo_ms\nalexnet,50,100\n")
    (made / "same.csv").write_text("service,model,rate_rps,slo_ms\ns,alexnet,50,100\ns,resnet50,20,100\n")
    (made / "taken.csv").write_text("service,model,rate_rps,slo_ms\nalexnet,resnet50,50,100\nalexnet,alexnet,9,100\n")
    v100 = str(made / "v100-db")
    assert main(["db", "import", str(datasets() / "v100_profiles.csv"), "--db", v100]) == 0
    words = ("place", "--slo-file", str(made / "alexnet.csv"), "--db", v100, "--gpus", "v100", "--policy", "ffd")
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
    line: str, code: int, said: str, failures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(failures)
    monkeypatch.setenv("COLUMNS", "400")
    assert main(shlex.split(line)) == code
    messages = capsys.readouterr().err.strip().splitlines()
    assert len([message for message in messages if said in message]) == 1
    # Said on a machine that has not done so yet, of a limit that nothing keeps, and of the replicas of the map itself.
    excused = ("compiling the simulator", "longer than the time limit", "no machine can be set up as")
    messages = [message for message in messages if not any(words in message for words in excused)]
    assert len(messages) <= 3, messages
    assert all(message.startswith("gpuprof:") and len(message) < 400 for message in messages)
