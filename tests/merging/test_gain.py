"""What runs once is what saves most time; weights are shared however ops run."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto

from gpuprof.merging.gain import GainContext, PlanGain, Rates
from gpuprof.merging.groups import group_nodes
from gpuprof.merging.pipeline import SHARED, MergeOptions, merge_sources, read_sources
from gpuprof.merging.plan import make_plan
from tests.merging.models import Builder, finetune_model, save, transformer

#: Nothing pays but bytes of copies, and every byte misses.
_SLOW_MEMORY = Rates(bytes_per_s=1e3, launch_s=0.0, cache_bytes=1.0)


def _chain(widths: list[int]) -> ModelProto:
    """Return products one after another, with an op in between that may run apart."""
    b, x = Builder(), "x"
    for k, (inputs, outputs) in enumerate(pairwise(widths)):
        x = b.add("MatMul", x, b.weight(inputs, outputs))
        x = b.add("Relu" if k % 2 else "Tanh", x)
    b.nodes[-1].output[0] = "y"
    return b.model(
        {"x": (TensorProto.FLOAT, ["batch", 4, widths[0]])}, {"y": (TensorProto.FLOAT, ["batch", 4, widths[-1]])}
    )


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    widths=st.lists(st.sampled_from([2, 16, 64]), min_size=3, max_size=5),
    batch=st.sampled_from([1, 8, 64]),
    launch_us=st.sampled_from([0.0, 0.1, 1.0]),
    cache=st.sampled_from([1.0, 1e4, 1e9]),
)
def test_no_other_choice_of_steps_saves_more_time(
    widths: list[int], batch: int, launch_us: float, cache: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("chain")
    paths = [save(_chain(widths), directory, name) for name in ("a", "b")]
    sources = read_sources(paths)
    setting = GainContext((batch, batch), Rates(1e9, launch_us * 1e-6, cache))
    worth = PlanGain(make_plan(sources, group_nodes(sources)), setting)
    steps = sorted(worth.steps)
    assert len(steps) == 2 * (len(widths) - 1)
    every = chain.from_iterable(combinations(steps, count) for count in range(len(steps) + 1))
    best = max(worth.gain_s(set(chosen)) for chosen in every)
    seconds = worth.gain_s(worth.best())
    assert seconds == pytest.approx(best, abs=len(steps) * 1e-11)  # capacities are whole picoseconds


def test_what_would_cost_time_runs_apart_on_weights_that_are_held_once(tmp_path: Path) -> None:
    base = transformer()
    paths = [save(base, tmp_path, "a"), save(finetune_model(base, 0.6), tmp_path, "b")]
    options = MergeOptions(rates=_SLOW_MEMORY, batches={"a": 64, "b": 64})
    merged = merge_sources(read_sources(paths), options)
    forced = merge_sources(read_sources(paths), replace(options, force=True))
    assert not merged.report.merged
    assert {row.how for row in merged.report.shared} == {SHARED}
    assert all("predicted to cost" in row.reason for row in merged.report.shared)
    assert merged.report.gain_s >= 0 > forced.report.gain_s
    assert [row.operators for row in merged.report.shared] == [row.operators for row in forced.report.merged]
    assert merged.report.saved_bytes == pytest.approx(forced.report.saved_bytes, rel=0.01)
    report = merged.write(tmp_path / "m.onnx")
    assert report.proof is not None
    assert report.proof.worst is not None
    assert report.proof.worst.relative == 0.0  # every model runs its own ops
