import hashlib
import json
from pathlib import Path

import pytest
from onnx import helper

import gpuprof
from gpuprof.errors import InputError, UnavailableError, UnstableError
from gpuprof.kernel_db.store import KernelDb
from gpuprof.pipeline.profile import ProfileResult
from gpuprof.pipeline.result import Progress
from tests.profiling.models import write_mlp
from tests.small_models import write_model, write_text_model

QUICK = gpuprof.ProfileSettings(time_limit_s=0.2)


def test_rows_and_profilers_have_limits_of_their_own() -> None:
    limits = gpuprof.ProfileSettings(time_limit_s=0.2, profiler_limit_s=7.0).limits()
    assert (limits.max_time_s, limits.tool_s) == (0.2, 7.0)


@pytest.fixture(autouse=True)
def _no_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    # What serving costs has tests of its own.
    monkeypatch.setattr("gpuprof.pipeline.profile.measure_serving", lambda database, device, note: None)


@pytest.mark.slow
def test_rows_are_told_once_on_disk_and_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, db = write_mlp(tmp_path / "mlp.onnx"), tmp_path / "db"
    steps: list[Progress] = []
    kept: list[tuple[int, int]] = []

    def watch(step: Progress) -> None:
        steps.append(step)
        if step.total and db.exists():
            kept.append((step.done, KernelDb(db).read_table("models").num_rows))

    result = gpuprof.profile(
        [file], batches=(1, 2), shares=("100",), device="cpu", db=db, settings=QUICK, progress=watch
    )
    assert {done: rows for done, rows in kept if done} == {1: 1, 2: 2}
    assert steps[0].total == 0 and "collector" in steps[0].step  # what measures, before anything is
    assert max(step.done for step in steps) == 2 and {step.total for step in steps[1:]} == {2}
    assert result.to_frame()["batch"].tolist() == [1, 2]
    assert [row["batch"] for row in result.rows() if row["measured_now"]] == [1, 2]
    assert capfd.readouterr() == ("", "")


def a_result(failures: tuple[str, ...] = (), unstable: tuple[str, ...] = ()) -> ProfileResult:
    return ProfileResult(device="cpu", measured=(), cells=3, failures=failures, unstable=unstable, database=Path("db"))


def test_what_failed_or_is_unstable_is_refused_only_when_that_is_asked() -> None:
    a_result().require_trusted()
    with pytest.raises(UnavailableError, match="1 of 3 could not be measured: it died"):
        a_result(failures=("it died",), unstable=("m:1:100%",)).require_trusted()
    with pytest.raises(UnstableError, match="2 of 3 are unstable, first m:1:100%"):
        a_result(unstable=("m:1:100%", "m:2:100%")).require_trusted()
    with pytest.raises(UnstableError, match="1 of 3 is unstable, first m:1:100%"):
        a_result(unstable=("m:1:100%",)).require_trusted()


@pytest.mark.parametrize("batches", [(0,), (-1,), (70_000,)])
def test_a_batch_that_is_none_is_refused_before_anything_is_measured(tmp_path: Path, batches: tuple[int, ...]) -> None:
    file = write_mlp(tmp_path / "mlp.onnx")
    with pytest.raises(InputError, match="batches of ProfileWorkloads must be"):
        gpuprof.profile([file], batches=batches, device="cpu", db=tmp_path / "db")
    assert not (tmp_path / "db").exists()


@pytest.mark.slow
def test_each_size_is_measured_once_and_what_was_assumed_is_noted(tmp_path: Path) -> None:
    file, db = write_text_model(tmp_path / "text.onnx"), tmp_path / "db"
    swept = QUICK.replace(dims={"seq": (8, 32)}, keep_unstable=True)

    def measure(settings: gpuprof.ProfileSettings) -> ProfileResult:
        return gpuprof.profile([file], batches=(1,), shares=("100",), device="cpu", db=db, settings=settings)

    first = measure(swept)
    assert [row["dims"] for row in first.rows()] == ["seq=8", "seq=32"]
    assert not any("assumed" in note for note in first.notes)
    again = measure(swept)
    assert [row["measured_now"] for row in again.rows()] == [False, False]
    usual = measure(QUICK.replace(keep_unstable=True))
    assert "text: seq=128 assumed; another size: --dim seq=SIZE" in usual.notes
    assert [row["dims"] for row in usual.rows()] == ["seq=128"]
    database = KernelDb(db)
    assert set(database.read_table("runs", ["dims"])["dims"].to_pylist()) >= {"seq=8", "seq=32", "seq=128"}
    assert set(database.read_table("ops", ["dims"])["dims"].to_pylist()) == {"seq=8", "seq=32", "seq=128"}
    between = gpuprof.estimate(["text"], dims={"seq": (8, 16)}, db=db)
    assert gpuprof.estimate(["text"], dims={"seq": 8}, db=db).rows() == between.rows()[:1]
    sources = dict(between.to_frame()[["dims", "latency_source"]].values.tolist())
    # On a busy machine rows are marked unstable.
    assert sources["seq=8"].removeprefix("unstable, ") == "measured"
    assert sources["seq=16"].removeprefix("unstable, ") == "interpolated"


def test_the_length_of_a_sound_is_asked_for_before_anything_is_measured(tmp_path: Path) -> None:
    relu = helper.make_node("Relu", ["x"], ["y"])
    file = write_model(tmp_path / "sound.onnx", [relu], {"x": ["batch", "samples"]}, {"y": None})
    with pytest.raises(InputError, match=r"sound: nothing says how large samples is .*--dim samples=SIZE"):
        gpuprof.profile([file], device="cpu", db=tmp_path / "db")
    with pytest.raises(InputError, match=r"--dim samples=SIZE"):
        gpuprof.estimate([file], device="a100-40")
    assert gpuprof.estimate([file], device="a100-40", dims={"samples": (16_000,)}).estimates


@pytest.mark.slow
def test_inputs_of_a_file_are_measured_at_their_sizes_and_recorded(tmp_path: Path) -> None:
    file, db, data = write_text_model(tmp_path / "text.onnx"), tmp_path / "db", tmp_path / "data.json"
    data.write_text('{"data": [{"ids": [1, 2, 3]}, {"ids": [4, 5, 6]}, {"ids": [7, 8]}]}')
    given = QUICK.replace(input_data={"": data}, keep_unstable=True)

    def measure(settings: gpuprof.ProfileSettings) -> ProfileResult:
        return gpuprof.profile([file], batches=(4,), shares=("100",), device="cpu", db=db, settings=settings)

    assert [row["dims"] for row in measure(given).rows()] == ["seq=3", "seq=2"]
    settings = [
        json.loads(text) for text in KernelDb(db).read_table("runs", ["settings"])["settings"].to_pylist() if text
    ]
    hashes = [row["input_data_sha256"] for row in settings if "input_data_sha256" in row]
    assert hashes == [hashlib.sha256(data.read_bytes()).hexdigest()] * 2
    assert [row["measured_now"] for row in measure(given).rows()] == [False, False]
    data.write_text('{"data": [{"ids": [9, 9, 9]}]}')  # other values, which may take another time
    assert [row["measured_now"] for row in measure(given).rows()] == [True]
    data.write_text('{"data": [{"ids": [[1.5]]}]}')
    with pytest.raises(InputError, match="int64 cannot hold"):
        measure(given)
    with pytest.raises(InputError, match="model 'other'"):
        measure(QUICK.replace(input_data={"other": data}))


@pytest.mark.slow
def test_told_no_batch_a_model_without_one_is_measured_as_it_is_and_others_at_the_usual_ones(tmp_path: Path) -> None:
    # Its maximum is over what would be the batch, which therefore cannot be freed.
    node = helper.make_node("ReduceMax", ["x"], ["y"], axes=[0], keepdims=1)
    fixed = write_model(tmp_path / "fixed.onnx", [node], {"x": [3, 4]}, {"y": [1, 4]})
    free = write_mlp(tmp_path / "mlp.onnx")
    given = {"shares": ("100",), "device": "cpu", "db": tmp_path / "db", "settings": QUICK}
    result = gpuprof.profile([fixed, free], **given)  # type: ignore[arg-type]
    measured = {(row["model"], row["batch"]) for row in result.rows()}
    assert measured == {("fixed", 3), *(("mlp", batch) for batch in (1, 2, 4, 8))}
    assert any(note.startswith("fixed is measured at batch 3 alone: ") for note in result.notes)
    with pytest.raises(InputError, match="fixed"):
        gpuprof.profile([fixed], batches=(2,), **given)  # type: ignore[arg-type]
