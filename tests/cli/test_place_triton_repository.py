"""Plans for a Triton model repository: configurations for the plan beside the present ones."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from gpuprof.cli.main import main
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


def test_what_cannot_be_planned_is_refused_by_name(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, message in (
        ("text,1,50", "text cannot be planned: python executes it"),
        ("smal,1,50", "small"),
    ):
        (repository.parent / "slo.csv").write_text(f"model,rate_rps,slo_ms\n{content}\n")
        assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40"]) == 3
        assert message in capsys.readouterr().err
    (repository / "small" / "config.pbtxt").write_text("max_batch_size: {")
    assert main(["place", "--triton-repository", "repo", "--gpus", "a100-40"]) == 3
    assert "is not a model configuration of Triton" in capsys.readouterr().err
    assert main(["place", "--triton-repository", "nowhere", "--gpus", "a100-40"]) == 3
    assert "there is no Triton repository nowhere" in capsys.readouterr().err
