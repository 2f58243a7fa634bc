"""``gpuprof run``: a whole run from one file, resumed, and every mistake in it told with its line."""

import csv
import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpuprof.cli.main import main
from gpuprof.domain.demand import read_demands
from gpuprof.domain.deployment import read_map
from gpuprof.errors import UnstableError
from gpuprof.pipeline.profile import ProfileResult
from tests.command_line import CommandLine, Printed
from tests.reruns import measures_in_real_time

PLAN = """\
models:
  digits: {file: net.onnx, rate_rps: 100, slo_ms: 50}
  strict: {file: net.onnx, rate_rps: 10, slo_ms: 20, percentile: 95}
devices: [l4:4, t4]
steps:
  - estimate:
      batch: [1, 2]
      save: estimates.json
  - place: {policy: ffd, max-batch: 2}
  - check
  - simulate: {duration: 2, seed: 1}
  - export: {to: k8s, image: "gpuprof:1"}
  - report
"""
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def here(here: Path) -> Path:
    assert main(["zoo", "build", "random_mlp", "-o", "net.onnx"]) == 0
    Path("plan.yaml").write_text(PLAN)
    return here


def test_a_dry_run_prints_the_commands_and_does_nothing(cli: CommandLine) -> None:
    before = sorted(Path().iterdir())
    lines = [line for line in cli("run --dry-run").out.splitlines() if not line.startswith("#")]
    assert lines == [
        "gpuprof estimate net.onnx --batch 1,2 --device l4 --json > gpuprof-run/estimates-l4.json",
        "gpuprof estimate net.onnx --batch 1,2 --device t4 --json > gpuprof-run/estimates-t4.json",
        "gpuprof place --slo-file gpuprof-run/slo.csv --gpus l4:4,t4 --max-batch 2 "
        "--policy ffd --output gpuprof-run/map.json",
        "gpuprof check gpuprof-run/map.json",
        "gpuprof simulate gpuprof-run/map.json --duration 2 --seed 1 --output gpuprof-run/simulation.json",
        "gpuprof export gpuprof-run/map.json --to k8s --output gpuprof-run/export-k8s --image gpuprof:1",
        "gpuprof report gpuprof-run/map.json gpuprof-run/simulation.json --output gpuprof-run/report.html",
    ]
    assert sorted(Path().iterdir()) == before


def test_the_sizes_of_each_model_reach_every_step(cli: CommandLine) -> None:
    models = """models:
  short: {file: net.onnx, rate_rps: 9, slo_ms: 50, dims: seq=64}
  long: {file: net.onnx, rate_rps: 1, slo_ms: 90, dims: "seq=64:0.5|seq=256:0.5"}
  plain: {file: other.onnx, rate_rps: 1, slo_ms: 90}
"""
    Path("plan.yaml").write_text(models + "steps: [profile, {estimate: {save: out.json}}, place]\n")
    lines = [line for line in cli("run --dry-run").out.splitlines() if not line.startswith("#")]
    assert lines == [
        "gpuprof profile net.onnx --db gpuprof-db --dim seq=64,256",
        "gpuprof profile other.onnx --db gpuprof-db",
        "gpuprof estimate net.onnx --dim seq=64,256 --db gpuprof-db --json > gpuprof-run/out.json",
        "gpuprof estimate other.onnx --db gpuprof-db --json > gpuprof-run/out-2.json",
        "gpuprof place --slo-file gpuprof-run/slo.csv --db gpuprof-db --output gpuprof-run/map.json",
    ]


def test_a_missing_model_is_found_before_the_first_step(cli: CommandLine) -> None:
    Path("plan.yaml").write_text("models: {a: {file: gone.onnx}, b: {file: net.onnx}}\nsteps: [doctor, profile]\n")
    captured = cli("run", code=3)
    assert captured.out == "" and "step 1" not in captured.err
    assert "no file gone.onnx, and no step makes it" in captured.err


def _steps_left_out(run: Printed) -> list[int]:
    return [int(line.split()[1]) for line in run.err.splitlines() if "done before" in line]


@pytest.mark.slow
def test_a_run_does_again_only_what_has_changed(here: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")  # paths count from the file
    plan = str(here / "plan.yaml")
    assert _steps_left_out(cli("run", plan)) == []
    folder = here / "gpuprof-run"
    demands = read_demands(folder / "slo.csv")
    assert [(demand.model, demand.rate_rps, demand.slo.percentile) for demand in demands] == [
        ("digits", 100.0, 99.0),
        ("strict", 10.0, 95.0),
    ]
    assert {replica.model for *_, replica in read_map(folder / "map.json").places()} == {"digits", "strict"}
    assert {row["device"] for row in json.loads((folder / "estimates-t4.json").read_text())} == {"t4"}
    assert json.loads((folder / "simulation.json").read_text())["seed"] == 1
    assert "<title>" in (folder / "report.html").read_text() and any((folder / "export-k8s").iterdir())

    assert _steps_left_out(cli("run", plan)) == [1, 2, 3, 5, 6, 7]  # check writes nothing, and is run each time

    (folder / "simulation.json").unlink()
    assert _steps_left_out(cli("run", plan)) == [1, 2, 3, 6, 7]  # the same simulation gives the same report

    Path(plan).write_text(PLAN.replace("rate_rps: 100", "rate_rps: 120"))
    assert _steps_left_out(cli("run", plan)) == [1, 2]
    assert _steps_left_out(cli("run", plan, "--fresh")) == []


def test_the_step_that_fails_ends_the_run_with_its_code_and_is_named(cli: CommandLine) -> None:
    Path("plan.yaml").write_text(PLAN.replace("slo_ms: 50", "slo_ms: 0.001"))
    stderr = cli("run", code=1).err
    assert "step 3 of 7 failed; gpuprof run plan.yaml goes on with it" in stderr and "step 4" not in stderr
    Path("plan.yaml").write_text(PLAN)
    assert _steps_left_out(cli("run")) == [1, 2]


@measures_in_real_time
def test_unstable_times_are_planned_and_said(here: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = "steps:\n  - profile: {batch: 1, share: 1core, device: cpu, time-limit: 0.1}\n  - place: {gpus: cpu}\n"
    (here / "plan.yaml").write_text("models: {net: {file: net.onnx, rate_rps: 1, slo_ms: 5000}}\n" + steps)
    noisy = UnstableError("1 of 1 is unstable", "they are kept and marked")
    monkeypatch.setattr("gpuprof.pipeline.profile.measure_serving", lambda database, device, note: None)
    monkeypatch.setattr(ProfileResult, "require_trusted", Mock(side_effect=noisy))
    for _ in range(2):
        stderr = cli("run", code=2).err
        assert "step 1 of 2: gpuprof profile" in stderr and "gpuprof: 1 of 1 is unstable" in stderr
        assert "every step ran, but what step 1 measured is unstable" in stderr and "keep-unstable: true" in stderr
    assert read_map(Path("gpuprof-run/map.json")).models.keys() == {"net"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("models:", "modls:", "plan.yaml:1: unknown key 'modls' (did you mean models?)"),
        ("slo_ms: 50", "slo: 50", "plan.yaml:2: unknown key 'slo' (did you mean slo_ms?)"),
        ("rate_rps: 10,", "rate_rps: many,", "plan.yaml:3: models.strict.rate_rps: input should be a valid number"),
        ("rate_rps: 10,", "rate_rps: -1,", "plan.yaml:3: models.strict.rate_rps: input should be greater than 0"),
        ("file: net.onnx, rate_rps: 10,", "rate_rps: 10,", "plan.yaml:3: strict has neither a file nor a model"),
        ("slo_ms: 50", "priority: 1", "plan.yaml:9: place needs slo_ms of the model digits"),
        ("slo_ms: 50", "slo_ms: 50, slo_ms: 60", "plan.yaml:2 is not YAML: slo_ms stands twice"),
        ("devices: [l4:4, t4]", "devices: {l4: 4}", "plan.yaml:4: devices: input should be a valid list"),
        ("- place:", "- plac:", "plan.yaml:9: unknown verb 'plac' (did you mean place?)"),
        ("- check", "- serve", "plan.yaml:10: serve is no step of a run"),
        ("- check", "- zoo", "plan.yaml:10: zoo has commands of its own (zoo list, zoo build"),
        ("- check", "- zoo bild", "plan.yaml:10: unknown command of zoo 'bild' (did you mean build?)"),
        ("- check", "- zoo build: {seed: 1}", "plan.yaml:10: Missing argument"),
        ("- check", "- [check]", "plan.yaml:10: a step is a verb"),
        ("- check", "- {check: , place: }", "plan.yaml:10: a step is one verb but got 2"),
        ("policy: ffd", "polic: ffd", "plan.yaml:9: unknown option of place 'polic' (did you mean policy"),
        ("max-batch: 2", "max-batch: two", "plan.yaml:9: Invalid value for '--max-batch'"),
        (', image: "gpuprof:1"', "", "plan.yaml:12: a manifest needs a container image"),
        ("to: k8s", "to: k9s", "plan.yaml:12: unknown export 'k9s' (did you mean k8s"),
        ("save: estimates.json", "save: estimates.xml", "plan.yaml:8: save takes a file (which ends in .csv, .json"),
        ("seed: 1}", "seed: 1", "is not YAML"),
    ],
)
def test_a_mistake_is_told_with_its_line_before_anything_runs(old: str, new: str, said: str, cli: CommandLine) -> None:
    Path("plan.yaml").write_text(PLAN.replace(old, new, 1))
    assert said in cli("run", code=3).err
    assert not Path("gpuprof-run").exists()


def test_the_file_of_the_documentation_is_one(cli: CommandLine) -> None:
    page = (DOCS / "run.md").read_text(encoding="utf-8")
    match = re.search(r"^((?:    .*\n|\n)+?)(?=\S)", page[page.index("    models:") :], re.MULTILINE)
    assert match is not None
    Path("plan.yaml").write_text("\n".join(line[4:] for line in match[1].splitlines()) + "\n")
    lines = cli("run --dry-run").out.splitlines()
    header = next(csv.reader([lines[1].lstrip("# ")]))
    assert header[:4] == ["model", "rate_rps", "slo_ms", "service"] and len(lines) > 8


def test_a_chain_is_run_whole_and_its_files_are_those_of_its_steps(cli: CommandLine) -> None:
    Path("second.onnx").write_bytes(Path("net.onnx").read_bytes())
    plan = """models:
  both: {file: net.onnx>second.onnx, rate_rps: 50, slo_ms: 40}
devices: [t4]
steps: [{estimate: {save: out.json}}, {place: {policy: ffd}}, check, {simulate: {duration: 2}}, report]
"""
    Path("plan.yaml").write_text(plan)
    assert "both" in cli("run").out
    assert read_map(Path("gpuprof-run/map.json")).chains["both"].steps == ("net", "second")
    assert {row["model"] for row in json.loads(Path("gpuprof-run/out.json").read_text())} == {"net.onnx", "second.onnx"}
    Path("second.onnx").unlink()
    assert "no file second.onnx" in cli("run", code=3).err
