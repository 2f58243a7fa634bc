"""Builds an architecture of the zoo into a file, atomically, those of the ``onnx`` package with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper

from gpuprof.domain.file_access import write_beside
from gpuprof.errors import InputError, UnavailableError
from gpuprof.graph.batch_plan import apply_rewrite, plan_rewrite
from gpuprof.graph.file import read_onnx
from gpuprof.graph.load import load_graph
from gpuprof.zoo.architecture import ONNX, OURS, ZooArchitecture
from gpuprof.zoo.network import IR_VERSION, random_weights
from gpuprof.zoo.small_networks import build_small_network


def build(architecture: ZooArchitecture, output: Path, batch: int | None = None, seed: int = 0) -> Path:
    """Write a network with random weights to ``output`` and return the path; the same seed gives the same bytes.

    Networks beyond two gibibytes keep their weights in ``<output>.data`` in the same directory. Raises `InputError` if
    the directory cannot be written, the batch is below 1 or the seed below 0; `UnavailableError` if packages needed for
    building are not installed. ``output``: replaced if it exists; ``batch``: the batch to fix; free by default.
    """
    if batch is not None and batch < 1:
        raise InputError(f"the batch must be at least 1 but is {batch}")
    if seed < 0:
        raise InputError(f"the seed must be at least 0 but is {seed}")
    if not output.parent.is_dir():
        raise InputError(f"cannot write {output}: {output.parent} is not a directory", "create it first")
    with write_beside(output, "choose another place with -o") as path:
        _write(architecture, path, seed)
        if batch is not None:
            _fix_batch(path, batch)
    return output


def _write(architecture: ZooArchitecture, output: Path, seed: int) -> None:
    if architecture.origin == ONNX:
        onnx.save(build_light(architecture.stem, seed), output)
    elif architecture.origin == OURS:
        onnx.save(build_small_network(architecture.stem, seed), output)
    else:
        from gpuprof.zoo.exports import export

        export(architecture, output, seed)


def _fix_batch(path: Path, batch: int) -> None:
    """Set the dimensions called ``batch`` of the inputs and outputs."""
    model = onnx.load(path, load_external_data=False)
    for info in (*model.graph.input, *model.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param == "batch":
                dim.dim_value = batch
    # Shapes of intermediate values contain the free batch.
    del model.graph.value_info[:]
    onnx.save(model, path)


def build_light(stem: str, seed: int = 0) -> ModelProto:
    """Return the network ``light_<stem>.onnx`` with a free batch and weights as initializers.

    The shipped file computes each weight as a constant of its shape to stay small; the result has no such nodes. Raises
    `UnavailableError` if the installed ``onnx`` package does not ship the network.
    """
    path = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{stem}.onnx"
    if not path.is_file():
        raise UnavailableError(f"the onnx package {onnx.__version__} does not ship {path.name}", "pip install -U onnx")
    shipped = onnx.load(path)
    rewrite = plan_rewrite(read_onnx(path))
    apply_rewrite(shipped, rewrite)
    graph = load_graph(path)
    # The ops of `load_graph` depend on the input; all other nodes computed the weights.
    computed = {tensor.name for op in graph.ops for tensor in op.outputs}
    nodes = [node for node in shipped.graph.node if node.output[0] in computed]
    shapes = {tensor.name: tensor.shape for tensor in graph.weights if tensor.dtype == "float32"}
    return _assemble(shipped, nodes, random_weights(nodes, shapes, seed))


def _assemble(shipped: ModelProto, nodes: list[NodeProto], weights: dict[str, np.ndarray]) -> ModelProto:
    used_names = {name for node in nodes for name in node.input} - set(weights)
    model = ModelProto(ir_version=IR_VERSION, producer_name="gpuprof", opset_import=shipped.opset_import)
    graph = model.graph
    graph.name = shipped.graph.name
    graph.node.extend(nodes)
    used_tensors = [tensor for tensor in shipped.graph.initializer if tensor.name in used_names]
    graph.initializer.extend(used_tensors)
    for name, values in weights.items():
        graph.initializer.append(numpy_helper.from_array(values, name))
    constants = {tensor.name for tensor in shipped.graph.initializer}
    graph.input.extend(info for info in shipped.graph.input if info.name not in constants)
    graph.output.extend(shipped.graph.output)
    return model
