"""Exports of models of ``transformers`` from their configurations, with random weights, through ``torch.onnx``."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprof.errors import UnavailableError, install_hint
from gpuprof.graph.dims import DEFAULT_DIM
from gpuprof.zoo.architecture import TransformersExport, ZooArchitecture

if TYPE_CHECKING:
    import torch

#: Batch of the example, not 1, which an exporter would treat as constant.
_EXAMPLE_BATCH = 2


def require_export_extra() -> None:
    """Check that torch, transformers and onnxscript are installed.

    Raises `UnavailableError` naming the command that installs them.
    """
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UnavailableError(f"exporting needs {', '.join(missing)}", install_hint("export"))


def export(architecture: ZooArchitecture, output: Path, seed: int = 0) -> None:
    """Write a model of ``transformers`` with a free batch to ``output``, its weights inside or in ``<output>.data``.

    Raises `UnavailableError` if torch, transformers or onnxscript is not installed.
    """
    require_export_extra()
    import onnx_ir
    import torch

    from gpuprof.graph.file import LARGEST_FILE_BYTES

    assert architecture.export is not None
    spec = architecture.export
    model = _model(spec, seed)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    examples = tuple(_make_example_input(name, spec.side) for name in spec.inputs)
    batch = torch.export.Dim("batch")
    with _silence_exporter():
        program = torch.onnx.export(
            _call_by_position(model, spec),
            examples,
            dynamo=True,
            dynamic_shapes=(tuple({0: batch} for _ in examples),),
            input_names=list(spec.inputs),
            output_names=list(spec.outputs),
            verbose=False,
        )
    assert program is not None
    _strip_metadata(program.model, architecture.stem)
    # A fifth is added for buffers, constants and the graph itself.
    external = 1.2 * parameters > LARGEST_FILE_BYTES
    onnx_ir.save(program.model, output, external_data=f"{output.name}.data" if external else None)


def _model(spec: TransformersExport, seed: int) -> torch.nn.Module:
    import torch
    import transformers

    torch.manual_seed(seed)
    with _silence_exporter():
        config = getattr(transformers, spec.config)(**spec.settings, attn_implementation="eager")
        model: torch.nn.Module = getattr(transformers, spec.model)(config)
    _replace_pool(model)
    _calibrate_batch_norms(model)
    return model.eval()


def _replace_pool(model: torch.nn.Module) -> None:
    """Replace average pooling windows larger than any image by averages of whole images.

    The average over a window mostly outside the image differs between ONNX and torch.
    """
    import torch

    for module in model.modules():
        pool = getattr(module, "pooler", None)
        if isinstance(pool, torch.nn.AvgPool2d):
            module.pooler = torch.nn.AdaptiveAvgPool2d(1)


def _calibrate_batch_norms(model: torch.nn.Module) -> None:
    """Set the statistics of batch normalisations to those of random images, like after training.

    Kernels are first drawn as proposed by He et al. (2015), because with the initial kernels of some configurations the
    values of a deep untrained network vanish.
    """
    import torch

    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    if not norms:
        return
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same order of sums on every machine
    for norm in norms:
        norm.reset_parameters()
        # The statistics become this batch's; the default 0.1 would keep nine tenths of the initial statistics.
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(4, 3, 224, 224))
    torch.set_num_threads(threads)


def _make_example_input(name: str, side: int) -> torch.Tensor:
    import torch

    if name == "pixel_values":
        return torch.randn(_EXAMPLE_BATCH, 3, side, side)
    if name == "attention_mask":
        return torch.ones(_EXAMPLE_BATCH, DEFAULT_DIM, dtype=torch.int64)
    return torch.randint(2, 100, (_EXAMPLE_BATCH, DEFAULT_DIM))


def _call_by_position(model: torch.nn.Module, spec: TransformersExport) -> torch.nn.Module:
    """Return a module around a model, with positional inputs and selected outputs."""
    import torch

    class Positional(torch.nn.Module):  # type: ignore[misc] # torch is not there for every check
        """The model, called by position."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> tuple[Any, ...]:
            arguments = dict(zip(spec.inputs, inputs, strict=True))
            arguments |= {name: arguments[name].to(torch.float32) for name in spec.floats}
            result = self.model(**arguments, **spec.fixed)
            return tuple(result[name] for name in spec.outputs)

    return Positional().eval()


def _strip_metadata(model: Any, name: str) -> None:
    """Remove the exporter's metadata about its code and machine."""
    model.producer_name, model.producer_version, model.graph.name = "gpuprof", None, name
    model.doc_string = model.graph.doc_string = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(v for n in model.graph for v in n.outputs)]
    for value in values:
        value.metadata_props.clear()


@contextlib.contextmanager
def _silence_exporter() -> Iterator[None]:
    """Suppress the exporter's output on the terminal; its errors are still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
