from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuprof.runtime.tf32 import set_tf32

torch = pytest.importorskip("torch")


@pytest.fixture
def as_it_was() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


@pytest.mark.parametrize("wanted", [True, False])
def test_products_and_convolutions_get_the_same_precision(as_it_was: None, wanted: bool) -> None:
    set_tf32(torch, wanted)
    assert torch.backends.cuda.matmul.allow_tf32 is wanted and torch.backends.cudnn.allow_tf32 is wanted


@pytest.mark.parametrize("wanted", [True, False])
def test_pytorch_can_still_read_its_switches_as_its_export_does(as_it_was: None, wanted: bool) -> None:
    set_tf32(torch, wanted)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        pass
    assert torch.backends.cudnn.allow_tf32 is wanted
