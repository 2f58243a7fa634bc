"""Decides whether replicas of a model pad partial batches, by the file and runtime behind its figures."""

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


def is_padded(model: MeasuredModel, device: Device) -> bool:
    """Return whether `gpuprof serve` pads partial batches of a model on a device.

    It pads on GPUs where ONNX Runtime runs the model, the assumption without measurements. A model without its file
    cannot be served, and its batches are taken as measured.
    """
    variants = model.variants.get(device.name)
    if device.kind != "gpu" or model.path is None or (variants and variants[0].runtime != SERVED_BY):
        return False
    try:
        return _needs_padding(model.path, read_onnx(Path(model.path)).stamp)
    except InputError:
        return False


@lru_cache(maxsize=1024)
def _needs_padding(path: str, stamp: object) -> bool:
    """Return whether the file needs padding; ``stamp``: the file's version, a part of the cache's key."""
    return needs_padding(list_op_types(Path(path)))
