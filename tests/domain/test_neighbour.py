from __future__ import annotations

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.estimate import read_neighbour
from gpuprof.domain.share import Share
from gpuprof.errors import InputError


@pytest.mark.parametrize(
    ("text", "neighbour"),
    [
        ("net", ("net", None, None)),
        ("net@4", ("net", 4, None)),
        ("net:4", ("net", 4, None)),
        ("folder/net.onnx@4:50%", ("folder/net.onnx", 4, Share(50.0))),
        ("net[seq=128]@2:25", ("net[seq=128]", 2, Share(25.0))),
    ],
)
def test_a_neighbour_is_a_model_with_or_without_its_batch_and_share(
    text: str, neighbour: tuple[str, int | None, Share | None]
) -> None:
    assert read_neighbour(text, device("a100-80")) == neighbour


def test_without_a_model_there_is_no_neighbour() -> None:
    with pytest.raises(InputError, match="cannot read the neighbour ''"):
        read_neighbour("", device("a100-80"))
