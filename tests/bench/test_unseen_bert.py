"""Models of alike layers have the kernels that their one and two layers tell of."""

from __future__ import annotations

import numpy as np

from bench.unseen_bert import deepen, read_latencies
from gpuprof.estimators.cross_gpu.kernels import KernelList
from gpuprof.estimators.cross_gpu.op_table import make_table, stack_tables


def _list_kernels(layers: int) -> KernelList:
    embedding, head = make_table("movement", 1, elements=7.0), make_table("matmul", 1, n=2.0)
    layer = [make_table("matmul", 2, n=768.0), make_table("norm", 1, elements=9.0)]
    types = ("Gather", *("MatMul", "MatMul", "LayerNormalization") * layers, "MatMul")
    return KernelList(stack_tables([embedding, *layer * layers, head]), (1,) * len(types), types, ())


def test_twelve_layers_have_twelve_times_the_kernels_of_one_and_what_stands_around_them_once() -> None:
    deep = deepen(_list_kernels(1), _list_kernels(2), 12)
    found = {(kind, n): count for kind, n, count in zip(deep.op_types, deep.ops.n.tolist(), deep.count, strict=True)}
    assert found == {("Gather", 1.0): 1, ("MatMul", 768.0): 24, ("LayerNormalization", 1.0): 12, ("MatMul", 2.0): 1}
    assert len(deep.ops) == len(deep.count)


def test_published_latencies_of_bert_rise_with_the_batch() -> None:
    by_model: dict[tuple[str, str, int], list[float]] = {}
    for one in read_latencies():
        by_model.setdefault((one.device, one.model, one.length), []).append(one.batch_ms)
    assert len(by_model) == 24
    assert all((np.diff(times) > 0.0).all() for times in by_model.values())
