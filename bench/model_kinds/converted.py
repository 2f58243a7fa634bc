"""Models made of others: quantised, optimised, in half precision, with their data outside, with a fixed batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from bench.model_kinds import Kind
from bench.model_kinds.networks import write_bert, write_unet


def _of(source: Callable[[Path], None], convert: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    """Return what writes a source beside the path, and then what is made of it."""

    def build(path: Path) -> None:
        plain = path.with_name(f"{path.stem}-plain.onnx")
        source(plain)
        logging.disable(logging.WARNING)
        try:
            convert(plain, path)
        finally:
            logging.disable(logging.NOTSET)

    return build


def _quantise_static(plain: Path, path: Path) -> None:
    import numpy as np
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Pictures(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = [{"images": np.random.default_rng(0).random((1, 3, 64, 64), np.float32)} for _ in range(4)]

        def get_next(self) -> Any:
            return self._left.pop() if self._left else None

    quantize_static(plain, path, Pictures(), quant_format=QuantFormat.QDQ)


def _quantise_dynamic(plain: Path, path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(plain, path)


def _optimise(plain: Path, path: Path) -> None:
    """Write what ONNX Runtime makes of a model for any CPU, with ops of its own."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    ort.InferenceSession(plain, options, providers=["CPUExecutionProvider"])


def _halve(plain: Path, path: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(plain), keep_io_types=False), path)


def _put_data_outside(plain: Path, path: Path) -> None:
    onnx.save(onnx.load(plain), path, save_as_external_data=True, location=f"{path.stem}.data", size_threshold=256)


def _fix_batch(plain: Path, path: Path) -> None:
    model = onnx.load(plain)
    sizes = {"batch": 4, "height": 64, "width": 64}
    for info in (*model.graph.input, *model.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    del model.graph.value_info[:]
    onnx.save(model, path)


CONVERTED = (
    Kind("QDQ int8", _of(write_unet, _quantise_static)),
    Kind("dynamic int8", _of(write_bert, _quantise_dynamic)),
    Kind("optimised by ONNX Runtime", _of(write_bert, _optimise)),
    Kind("float16", _of(write_unet, _halve)),
    Kind("external data", _of(write_bert, _put_data_outside)),
    Kind("fixed batch of 4", _of(write_unet, _fix_batch)),
)
