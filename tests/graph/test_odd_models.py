"""Model files that ONNX allows and few exporters write, and damaged ones, as the loader meets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuprof.errors import InputError
from gpuprof.graph.load import load_runnable, read_fixed_batch
from tests.graph.odd_models import ODD, OddModel

#: Their files take seconds to write.
_SLOW = {"weights of 128 MB inside", "chain of 5,000 nodes"}


@pytest.mark.parametrize("odd", [odd for odd in ODD if odd.name not in _SLOW], ids=lambda odd: odd.name)
def test_an_odd_model_is_read_or_refused_with_a_remedy(odd: OddModel, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    odd.build(path)
    try:
        load_runnable(path, read_fixed_batch(path) or 1, dims=odd.dims)
    except InputError as error:
        assert error.fix, str(error)
