from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpuprof.runtime.torch_session import set_tf32


@pytest.fixture
def torch() -> Iterator[Any]:
    """PyTorch, whose switches are afterwards as they were."""
    library = pytest.importorskip("torch")
    matmul, cudnn = library.backends.cuda.matmul, library.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    yield library
    matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.parametrize("wanted", [True, False])
def test_products_and_convolutions_get_the_same_precision(torch: Any, wanted: bool) -> None:
    set_tf32(torch, wanted)
    assert torch.backends.cuda.matmul.allow_tf32 is wanted and torch.backends.cudnn.allow_tf32 is wanted


@pytest.mark.parametrize("wanted", [True, False])
def test_pytorch_can_still_read_its_switches_as_its_export_does(torch: Any, wanted: bool) -> None:
    set_tf32(torch, wanted)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        pass
    assert torch.backends.cudnn.allow_tf32 is wanted
