from __future__ import annotations

from types import SimpleNamespace

from gpuprof.runtime.tf32 import set_tf32


def _torch(kinds: SimpleNamespace, cudnn: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(backends=SimpleNamespace(cuda=SimpleNamespace(matmul=kinds), cudnn=cudnn))


def test_products_and_convolutions_get_the_same_precision_by_the_names_of_pytorch_2_9() -> None:
    products, conv, rnn = (SimpleNamespace(fp32_precision=None) for _ in range(3))
    torch = _torch(products, SimpleNamespace(conv=conv, rnn=rnn, allow_tf32="untouched"))
    for wanted, said in ((True, "tf32"), (False, "ieee")):
        set_tf32(torch, wanted)
        assert [kind.fp32_precision for kind in (products, conv, rnn)] == [said] * 3
    assert torch.backends.cudnn.allow_tf32 == "untouched"


def test_products_and_convolutions_get_the_same_precision_by_the_older_names() -> None:
    torch = _torch(SimpleNamespace(allow_tf32=None), SimpleNamespace(allow_tf32=None))
    set_tf32(torch, True)
    assert torch.backends.cuda.matmul.allow_tf32 is True and torch.backends.cudnn.allow_tf32 is True
    set_tf32(torch, False)
    assert torch.backends.cuda.matmul.allow_tf32 is False and torch.backends.cudnn.allow_tf32 is False
