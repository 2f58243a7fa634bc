"""Wrong arguments of the Python API: each is refused as an `InputError` that names a remedy or the rule."""

import doctest
import importlib
import inspect
import math
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuprof
import gpuprof.pipeline
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.pipeline.result import NoteList, Result
from gpuprof.pipeline.settings import Settings
from gpuprof.placement.policies import Policy
from gpuprof.placement.published.ffd import FirstFitDecreasing
from gpuprof.placement.published.usher import Usher
from tests.export.test_export import MAP
from tests.reruns import measures_in_real_time


def _demand(rate_rps: Any = 5.0, latency_ms: Any = 50.0, percentile: Any = 99.0) -> gpuprof.Demand:
    return gpuprof.Demand("net", rate_rps, gpuprof.Slo(latency_ms, percentile))


@pytest.mark.parametrize(
    ("demand", "rule"),
    [
        (_demand(-1.0), "rate_rps of 'net' must be a number from 1e-09 to 1"),
        (_demand(math.inf), "but got inf"),
        (_demand(latency_ms=0.0), "latency_ms of the SLO of 'net' must be a number above 0"),
        (_demand(latency_ms=math.inf), "but got inf"),
        (_demand(latency_ms=math.nan), "but got nan"),
        (_demand(percentile=100.0), "percentile of the SLO of 'net' must be a number from 1 to 99.999 but got 100"),
        (_demand(percentile=0.99), "but got 0.99"),
    ],
)
def test_an_impossible_demand_is_refused_before_anything_is_planned(demand: gpuprof.Demand, rule: str) -> None:
    verbs: list[Callable[[], object]] = [
        lambda: gpuprof.place([demand], fleet="t4"),
        lambda: gpuprof.compare([demand], fleet="t4", policies=["ffd"]),
        lambda: gpuprof.check(MAP, against=[demand]),
    ]
    for verb in verbs:
        with pytest.raises(InputError) as raised:
            verb()
        assert rule in str(raised.value)


_ANY: Any = gpuprof


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _ANY.Demand("net", 5.0, None), "slo of Demand must be a Slo but got None"),
        (lambda: _ANY.Demand("net", "x", gpuprof.Slo(5.0)), "rate_rps of Demand must be a number but got 'x'"),
        (lambda: _ANY.Demand(3, 5.0, gpuprof.Slo(5.0)), "model of Demand must be a string but got 3"),
        (lambda: _ANY.Share("half"), "sm_pct of Share must be a number but got 'half'"),
        (
            lambda: _ANY.PlanningOptions(max_batch=1.5),
            "max_batch of PlanningOptions must be a whole number but got 1.5",
        ),
        (lambda: _ANY.PlanningOptions(strict=3), "strict of PlanningOptions must be True or False but got 3"),
        (
            lambda: gpuprof.Demand("net", 5.0, gpuprof.Slo(5.0), max_replicas=0),
            "max_replicas of Demand must be greater than or equal to 1 but got 0",
        ),
        (lambda: _ANY.PlanningOptions(dims={"seq": 1.5}), "dims of PlanningOptions must be a whole number but got 1.5"),
        (
            lambda: gpuprof.ServeSettings(port=70_000),
            "port of ServeSettings must be less than or equal to 65535 but got 70000",
        ),
        (lambda: gpuprof.Rescheduling(period_s=0.0), "period_s of Rescheduling must be greater than 0 but got 0"),
        (lambda: gpuprof.SimulatedTraffic(seed=-1), "seed of SimulatedTraffic must be greater than or equal to 0"),
        (lambda: gpuprof.SimulatedTraffic(duration_s=0.0), "duration_s of SimulatedTraffic must be greater than 0"),
        (lambda: _ANY.estimate(["net"], device=3), "device of EstimateOptions must be a string but got 3"),
        (
            lambda: _ANY.estimate(["net"], batches=[1.5]),
            "batches of EstimateOptions must be a whole number but got 1.5",
        ),
        (lambda: gpuprof.estimate(["net"], batches=[0]), "must be greater than or equal to 1 but got 0"),
        (lambda: _ANY.estimate(["net"], estimator=dict), "must be a string or an Estimator but got <class 'dict'>"),
        (lambda: _ANY.place(None), "demands of gpuprof.place must be a DemandFile or a Sequence or a string or a path"),
        (lambda: _ANY.record_trace({"net": -1.0}), "must be greater than or equal to 0 but got -1.0"),
        (lambda: _ANY.serve(3), "deployment of gpuprof.serve must be a DeploymentMap or a string or a path but got 3"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named_with_what_it_must_be(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as raised:
        call()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


class _Stranger:
    """What no parameter wants."""


def test_no_parameter_of_the_public_functions_and_settings_takes_what_it_is_not_annotated_with() -> None:
    checked = 0
    for name in gpuprof.__all__:
        public = getattr(gpuprof, name)
        fields = inspect.isclass(public) and (hasattr(public.__init__, "__wrapped__") or issubclass(public, Settings))
        parameters = inspect.signature(public).parameters.values() if inspect.isfunction(public) or fields else ()
        for parameter in (argument.name for argument in parameters if argument.kind is not argument.VAR_KEYWORD):
            with pytest.raises(InputError, match=f"^{parameter} of .*{name} must .* but got "):
                public(**{parameter: _Stranger()})
            checked += 1
    assert checked > 180


def test_numbers_of_numpy_and_whatever_can_be_iterated_over_are_taken(tmp_path: Path) -> None:
    options = gpuprof.PlanningOptions(max_batch=np.int64(4), confidence=np.float32(0.5), strict=np.bool_(False))
    assert [type(value) for value in (options.max_batch, options.confidence, options.strict)] == [int, float, bool]
    model = gpuprof.build_model("mlp", tmp_path / "mlp.onnx")
    listed = gpuprof.estimate([model], batches=[1, 2], device="t4").rows()
    for batches in (np.array([1, 2]), iter([1, 2]), {1: "a", 2: "b"}.keys()):
        assert gpuprof.estimate([model], batches=batches, device="t4").rows() == listed
    assert gpuprof.MapOutput(path="map.json").path == Path("map.json")


def test_what_is_right_is_passed_on_as_it_is() -> None:
    assert gpuprof.PlanningOptions(dims={"seq": 3}).dims == {"seq": 3}
    assert gpuprof.ServiceSettings(failures=["node0@1s"]).failures == ("node0@1s",)
    assert pickle.loads(pickle.dumps(gpuprof.place)) is gpuprof.place
    with pytest.raises(TypeError, match="unexpected keyword argument 'gpus'"):
        _ANY.place([_demand()], gpus="t4")


def test_what_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a report needs a source \(name a database"):
        gpuprof.report([], tmp_path / "r.html")
    with pytest.raises(InputError, match=r"no policy is named \(known: "):
        gpuprof.compare([_demand()], fleet="t4", policies=[])
    with pytest.raises(InputError, match=r"no regressor is named \(name some of lasso"):
        gpuprof.train(regressors=[], db=tmp_path)
    with pytest.raises(InputError, match=r"the map has several models \(name one: Net/A, b\)"):
        gpuprof.explain(MAP)


@dataclass(frozen=True)
class Two(Result):
    def rows(self) -> Sequence[Mapping[str, object]]:
        return [{"model": "a", "latency_ms": 1.5}, {"model": "b", "latency_ms": None}]


def test_a_result_is_a_frame_with_a_row_for_each_record() -> None:
    frame = Two().to_frame()
    assert list(frame.columns) == ["model", "latency_ms"]
    assert list(frame["model"]) == ["a", "b"]


def test_a_notebook_shows_the_rows_and_escapes_the_notes() -> None:
    html = Two(notes=("a < b",))._repr_html_()
    assert "<td>1.500</td>" in html
    assert "<p>a &lt; b</p>" in html
    assert "<td>–</td>" in html


def test_an_error_takes_the_notes_along_and_each_is_told_at_once() -> None:
    messages: list[str] = []
    with pytest.raises(ValueError, match="no more") as raised, NoteList(messages.append) as notes:
        notes.add("one", "two")
        assert messages == ["one", "two"]
        raise ValueError("no more")
    assert raised.value.__notes__ == ["one", "two"]


#: They measure, or compile the simulator.
_MEASURING = {"calibrate", "db", "explain", "load", "profile", "report", "simulate", "train"}
_MODULES = sorted(module.name for module in pkgutil.iter_modules(gpuprof.pipeline.__path__))


def _examples(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(f"gpuprof.pipeline.{name}")
    return [example for example in doctest.DocTestFinder().find(module, globs={}) if example.examples]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[measures_in_real_time] if name in _MEASURING else []) for name in _MODULES]
)
def test_the_examples_of_a_verb_do_what_they_show(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = doctest.DocTestRunner()
    for example in _examples(name):
        (tmp_path / example.name).mkdir()
        monkeypatch.chdir(tmp_path / example.name)
        runner.run(example)
    assert runner.failures == 0


_VERBS = (
    *("calibrate", "check", "compare", "estimate", "evaluate", "explain", "export", "load", "merge", "place"),
    *("profile", "report", "serve", "simulate", "train"),
)


@pytest.mark.parametrize("verb", _VERBS)
def test_every_public_verb_has_an_example(verb: str) -> None:
    function = getattr(gpuprof, verb)
    assert callable(function)
    module = gpuprof._PUBLIC[verb].removeprefix("gpuprof.pipeline.")
    assert any(example.name.endswith(f".{verb}") for example in _examples(module))


class OwnEstimator:
    """Times of any model, by a factor that only an object can have."""

    premise = "ours: neighbours cost nothing"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        latency_ms = self.factor * (1.0 + batch) / device.fraction(share)
        return Estimate(Workload(model, batch, share, processes), device.name, Figure(latency_ms, "assumed"))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return (1, 2, 4)

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        return (Share(25.0), Share(50.0), Share())


DEMANDS = [gpuprof.Demand(name, 50.0, gpuprof.Slo(60.0)) for name in ("theirs", "another")]


def test_an_estimator_object_answers_for_models_that_no_database_has(here: Path) -> None:
    estimator = OwnEstimator(2.0)
    options = gpuprof.PlanningOptions(estimator=estimator)
    plan = gpuprof.place(DEMANDS, fleet="a100-80", options=options)
    assert plan.is_complete
    assert plan.deployment.planned_with.estimator == f"{__name__}:OwnEstimator"
    assert plan.deployment.planned_with.premise == OwnEstimator.premise
    row = plan.rows()[0]
    share, batch, latency_ms = (row[key] for key in ("share_pct", "batch", "latency_ms"))
    assert isinstance(share, float) and isinstance(batch, int)
    assert latency_ms == pytest.approx(2.0 * (1.0 + batch) * 100.0 / share)
    assert gpuprof.check(plan.deployment, estimator=estimator).is_sound
    assert not gpuprof.check(plan.deployment, estimator=OwnEstimator(20.0)).is_sound
    assert gpuprof.explain(plan.deployment, "theirs", estimator=estimator).rows()
    slower = gpuprof.simulate(plan.deployment, estimator=OwnEstimator(4.0)).outcome.models[0]
    assert (slower.mean_ms or 0.0) > (gpuprof.simulate(plan.deployment).outcome.models[0].mean_ms or 0.0)


def test_policy_objects_stand_in_a_comparison_with_their_options() -> None:
    options = gpuprof.PlanningOptions(estimator=OwnEstimator(1.0))
    policies: list[str | Policy] = ["ffd", FirstFitDecreasing(), Usher(creq="wao")]
    rows = gpuprof.compare(DEMANDS, fleet="a100-80", policies=policies, options=options).rows()
    names = [str(row["policy"]) for row in rows]
    assert names[1].endswith("ffd:FirstFitDecreasing") and names[2].endswith("+creq=wao")
    assert rows[0]["gpus"] == rows[1]["gpus"] == 1


def test_batches_that_an_estimator_does_not_list_are_named(tmp_path: Path) -> None:
    demand = gpuprof.Demand(str(gpuprof.build_model("mlp", tmp_path / "mlp.onnx")), 50.0, gpuprof.Slo(60.0))
    options = gpuprof.PlanningOptions(estimator=OwnEstimator(1.0), max_batch=64)
    notes = gpuprof.place([demand], fleet="a100-80", options=options).notes
    assert "batches are those that the estimator lists: mlp up to 4 instead of 64" in notes


def test_a_map_makes_nobody_import_a_module_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside_map.py").write_text("from pathlib import Path\nPath('was-run').touch()\n")
    plan = gpuprof.place(DEMANDS, fleet="a100-80", options=gpuprof.PlanningOptions(estimator=OwnEstimator(1.0)))
    planned_with = plan.deployment.planned_with.model_copy(update={"estimator": "beside_map:Estimator"})
    gpuprof.write_map(plan.deployment.model_copy(update={"planned_with": planned_with}), tmp_path / "map.json")
    start = "from gpuprof.cli.main import console_script; console_script()"
    for command, code in ((["check", "map.json"], 0), (["explain", "map.json", "theirs"], 3)):
        ended = subprocess.run(
            [sys.executable, "-P", "-c", start, *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ended.returncode == code
        assert "'beside_map:Estimator'" in ended.stderr
        assert ("map.json is sound if its written times are right" in ended.stdout) == (code == 0)
        assert not (tmp_path / "was-run").exists()
