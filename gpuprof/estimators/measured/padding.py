"""Padding of partial batches by replicas of a model, by the file and runtime behind its figures."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.domain.runtime_variant import SERVED_BY, Padding
from gpuprof.errors import InputError
from gpuprof.estimators.measured.measured import MeasuredModel
from gpuprof.graph.file import read_onnx
from gpuprof.graph.op_types import list_op_types
from gpuprof.rules.padding import needs_padding


def padding_of(model: MeasuredModel, device: Device) -> Padding:
    """Return the size to which `gpuprof serve` pads partial batches of a model on a device.

    It pads on GPUs where ONNX Runtime runs the model, the assumption without measurements: to the full batch unless the
    measured sessions kept a plan for each power of two. A model without its file cannot be served, and its batches are
    taken as measured.
    """
    variants = model.variants.get(device.name)
    if device.kind != "gpu" or model.path is None or (variants and variants[0].runtime != SERVED_BY):
        return Padding.NONE
    try:
        if not _needs_padding(model.path, read_onnx(Path(model.path)).stamp):
            return Padding.NONE
    except InputError:
        return Padding.NONE
    return Padding.POWERS_OF_TWO if variants and variants[0].has_size_classes else Padding.FULL


@lru_cache(maxsize=1024)
def _needs_padding(path: str, stamp: object) -> bool:
    """Return whether the file needs padding; ``stamp``: the file's version, a part of the cache's key."""
    return needs_padding(list_op_types(Path(path)))
