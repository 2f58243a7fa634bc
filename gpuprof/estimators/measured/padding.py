"""Whether replicas of a model fill partial batches up: of whichever file and runtime its figures are."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.domain.runtime_variant import SERVED_BY
from gpuprof.errors import InputError
from gpuprof.estimators.measured.measured import MeasuredModel
from gpuprof.graph.file import read_onnx
from gpuprof.graph.op_types import list_op_types
from gpuprof.rules.padding import needs_padding


def is_padded(known: MeasuredModel, device: Device) -> bool:
    """Return whether `gpuprof serve` fills partial batches of a model up on a device.

    It does on GPUs where ONNX Runtime runs the model, as it is taken to where nothing was measured. A model whose file
    is not there is none that could be served, and is taken as it was measured.
    """
    variants = known.variants.get(device.name)
    if device.kind != "gpu" or known.path is None or (variants and variants[0].runtime != SERVED_BY):
        return False
    try:
        return _needs_padding(known.path, read_onnx(Path(known.path)).stamp)
    except InputError:
        return False


@lru_cache(maxsize=1024)
def _needs_padding(path: str, stamp: object) -> bool:
    """Return what holds for the file as it was at ``stamp``."""
    return needs_padding(list_op_types(Path(path)))
