"""Plans for a Triton model repository: configurations for the plan beside the present ones."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from gpuprof.cli.main import main
from gpuprof.domain.deployment import read_map
from tests.profiling.models import write_mlp


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, version in (("small", 1), ("large", 3)):
        folder = tmp_path / "repo" / name
        (folder / str(version)).mkdir(parents=True)
        write_mlp(folder / str(version) / "model.onnx")
        text = f'name: "{name}" backend: "onnxruntime" max_batch_size: 2 optimization {{ graph {{ level: 1 }} }}'
        (folder / "config.pbtxt").write_text(text + " instance_group [ { count: 7 kind: KIND_CPU } ]")
    (tmp_path / "repo" / "text" / "1").mkdir(parents=True)
    (tmp_path / "repo" / "text" / "config.pbtxt").write_text('backend: "python"')
    (tmp_path / "slo.csv").write_text("model,rate_rps,slo_ms\nsmall,100,50\nlarge,2000,20\n")
    return tmp_path / "repo"


def _read(path: Path) -> model_config_pb2.ModelConfig:
    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


def test_the_plan_becomes_configurations_that_keep_every_other_field(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (repository / "large" / "config.pbtxt").read_text()
    assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40", "--json"]) == 0
    stderr = capsys.readouterr().err
    assert "text of the repository is not planned: python executes it" in stderr
    assert "--model-config-name=node0" in stderr
    assert (repository / "large" / "config.pbtxt").read_text() == before
    for name in ("small", "large"):
        planned = _read(repository / name / "configs" / "node0.pbtxt")
        assert (planned.name, planned.backend, planned.optimization.graph.level) == (name, "onnxruntime", 1)
        (group,) = planned.instance_group
        assert (group.kind, list(group.gpus)) == (group.KIND_GPU, [0])
        assert planned.max_batch_size >= 1
        if planned.max_batch_size > 1:
            assert list(planned.dynamic_batching.preferred_batch_size) == [planned.max_batch_size]


def _write_ensemble(repository: Path, needed: str = "middle") -> None:
    (repository / "whole" / "1").mkdir(parents=True)
    steps = (("large", needed, "output"), ("small", "input", "middle"))  # in no order, as Triton allows
    text = " ".join(
        f'step {{ model_name: "{model}" input_map {{ key: "x" value: "{source}" }} '
        f'output_map {{ key: "y" value: "{result}" }} }}'
        for model, source, result in steps
    )
    (repository / "whole" / "config.pbtxt").write_text(
        'platform: "ensemble" input { name: "input" data_type: TYPE_FP32 dims: 4 } '
        f'output {{ name: "output" data_type: TYPE_FP32 dims: 4 }} ensemble_scheduling {{ {text} }}'
    )


def test_an_ensemble_is_planned_as_a_chain_in_the_order_of_its_tensors(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_ensemble(repository)
    (repository.parent / "slo.csv").write_text("model,rate_rps,slo_ms\nwhole,100,50\nsmall,10,20\n")
    assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40"]) == 0
    chain = read_map(repository.parent / "map.json").chains["whole"]
    assert (chain.steps, chain.slo_ms) == (("whole.small", "large"), 50.0)
    assert (repository / "large" / "configs" / "node0.pbtxt").is_file()
    assert not (repository / "whole" / "configs").exists()
    assert _read(repository / "small" / "configs" / "node0.pbtxt").instance_group[0].count == 2  # both services
    capsys.readouterr()


def test_an_ensemble_with_a_tensor_that_no_step_makes_is_refused(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_ensemble(repository, "absent")
    assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40"]) == 3
    assert "whole has no step that makes 'absent' for large" in capsys.readouterr().err


def test_what_cannot_be_planned_is_refused_by_name(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in (
        ("text,1,50", "text cannot be planned: python executes it"),
        ("smal,1,50", "small"),
        ("small>text,1,50", "text cannot be planned: python executes it"),
    ):
        (repository.parent / "slo.csv").write_text(f"model,rate_rps,slo_ms\n{content}\n")
        assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40"]) == 3
        assert message in capsys.readouterr().err
    (repository / "small" / "config.pbtxt").write_text("max_batch_size: {")
    assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40"]) == 3
    assert "is not a model configuration of Triton" in capsys.readouterr().err
    assert main(["place", "--triton-repository", "nowhere", "--gpus", "a100-40"]) == 3
    assert "there is no Triton repository nowhere" in capsys.readouterr().err
