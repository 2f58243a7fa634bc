import pytest

from gpuprof.rules.padding import needs_padding


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "FusedConv", "NhwcConv"])
def test_models_with_convolutions_are_padded(op: str) -> None:
    assert needs_padding({"Relu", op})


def test_models_without_are_not() -> None:
    assert not needs_padding({"MatMul", "Softmax", "LSTM", "ConvInteger"})
    assert not needs_padding(())
