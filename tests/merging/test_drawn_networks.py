"""Networks drawn at random, some layers of the copies changed: merged they give what they give apart."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, numpy_helper

from gpuprof.graph.inputs import random_inputs
from gpuprof.graph.load import load_graph
from gpuprof.graph.merged_model import read_merged
from gpuprof.merging.gain import TYPICAL_CPU, Rates
from gpuprof.merging.pipeline import MergeOptions, merge_sources, read_sources, write_merged
from gpuprof.runtime.session import open_session
from gpuprof.zoo.network import Network
from gpuprof.zoo.random_cnns import draw_cnn
from gpuprof.zoo.random_sequence_nets import draw_mlp, draw_rnn, draw_transformer
from tests.merging.models import Array, save

_MOST_PARAMETERS = 3e6
_DRAWN: dict[str, Callable[[Network, int], ModelProto]] = {
    "cnn": draw_cnn,
    "transformer": draw_transformer,
    "rnn": draw_rnn,
    "mlp": draw_mlp,
}
#: Where copies cost nothing all is run once, where reading weights costs nothing little is, else what pays.
_RATES = {
    "weights": Rates(1e9, 1e-3, cache_bytes=1e12),
    "copies": Rates(1e6, 0.0, cache_bytes=1.0),
    "usual": TYPICAL_CPU,
}


def perturb_weights(model: ModelProto, seed: int, part: float) -> ModelProto:
    """Return a copy with about ``part`` of its weights changed, wherever in the network they are."""
    copy, random = ModelProto(), np.random.default_rng(seed)
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        value = numpy_helper.to_array(tensor)
        if value.dtype == np.float32 and value.size > 1 and random.random() < part:
            value = value * (1 + 0.05 * np.abs(random.standard_normal(value.shape)))  # variances stay positive
            tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float32), tensor.name))
    return copy


def answers(path: Path, fed: dict[str, Array]) -> dict[str, Array]:
    """Return the outputs of a model by name."""
    session = open_session(path, threads=1)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, fed), strict=True))


def check(models: list[ModelProto], options: MergeOptions, batches: list[int | None], directory: Path) -> None:
    """Merge models and compare a call with these batches, None for an absent model, with each model alone."""
    paths = [save(model, directory, f"m{i}") for i, model in enumerate(models)]
    output = directory / "merged.onnx"
    write_merged(merge_sources(read_sources(paths), options), output, options)
    described = read_merged(output)
    assert described is not None
    fed = {f"m{i}": random_inputs(load_graph(paths[i], batch), i) for i, batch in enumerate(batches) if batch}
    results = answers(output, described.feeds(fed))
    for i, path in enumerate(paths):
        if f"m{i}" in fed:
            for name, expected in answers(path, fed[f"m{i}"]).items():
                answer = described.answers(results, f"m{i}")[name]
                assert np.abs(answer - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(sorted(_DRAWN)),
    seed=st.integers(0, 10_000),
    part=st.sampled_from([0.0, 0.1, 0.4]),
    batches=st.lists(st.one_of(st.none(), st.integers(1, 3)), min_size=2, max_size=3).filter(any),
    rates=st.sampled_from(sorted(_RATES)),
    force=st.booleans(),
)
def test_a_merged_drawn_network_gives_what_its_models_give(
    kind: str, seed: int, part: float, batches: list[int | None], rates: str, force: bool
) -> None:
    network = _DRAWN[kind](Network(), seed)
    if sum(np.prod(tensor.dims) for tensor in network.graph.initializer) > _MOST_PARAMETERS:
        network = _DRAWN[kind](Network(), seed % 4 + 1)
    models = [network, *(perturb_weights(network, m, part) for m in range(1, len(batches)))]
    with tempfile.TemporaryDirectory() as directory:
        sizes = {f"m{i}": batch for i, batch in enumerate(batches) if batch}
        check(models, MergeOptions(force=force, rates=_RATES[rates], batches=sizes), batches, Path(directory))
