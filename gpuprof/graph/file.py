"""Reads untrusted ONNX files: bounded, validated, and without the data of large weights.

Large weights become declarations (name, type, shape), so all later work costs the same for a network of two gigabytes
as for two kilobytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import onnx
import onnx.checker
import onnx.inliner
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper
from onnx.external_data_helper import load_external_data_for_tensor

from gpuprof.domain.model import Tensor
from gpuprof.errors import InputError
from gpuprof.graph.element_types import dtype_name, elem_type
from gpuprof.graph.nodes import MOST_VALUES, constant_tensor, graphs_of, label, sort_nodes

#: Limit of a Protocol Buffers message; larger models keep their weights in external data.
LARGEST_FILE_BYTES = onnx.checker.MAXIMUM_PROTOBUF
#: Most elements of a tensor: larger than any device holds is an error or an attack, and products would overflow.
MOST_ELEMENTS = 2**42
#: Ops of ONNX Runtime's optimizer in ONNX's own domain, unknown to ONNX's checker.
_RUNTIMES_OWN, _RUNTIMES_DOMAIN = {"SimplifiedLayerNormalization"}, "com.microsoft"
#: First IR version in which weights need not be inputs, too.
_WEIGHTS_APART = 4
#: Most parsed files in the cache, the oldest dropped first: enough for a fleet's models, not for a long campaign.
_MOST_FILES = 64
#: Other formats: first bytes (possibly after four others), name, and the way to convert them to ONNX.
_OTHER_FORMATS = (
    (b"PK\x03\x04", "a ZIP archive, as PyTorch and Keras write", "export the model with torch.onnx.export, or tf2onnx"),
    (b"\x89HDF", "HDF5, as Keras writes", "export the model with tf2onnx"),
    (b"TFL3", "TensorFlow Lite's", "export the model with tf2onnx"),
    (b"ORTM", "ONNX Runtime's own format", "give the ONNX file that it was made of"),
    (b"GGUF", "GGUF, as llama.cpp takes", "export the model with torch.onnx.export"),
    (b"\x80\x02", "a pickle of Python", "load the model and export it with torch.onnx.export, or skl2onnx"),
    (b"\x80\x04", "a pickle of Python", "load the model and export it with torch.onnx.export, or skl2onnx"),
    (b"\0\0\0\0{", "safetensors: weights without a graph", "load the model and export it with torch.onnx.export"),
    (b"\x1f\x8b", "compressed by gzip", "decompress it: gunzip"),
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch the file itself: git lfs pull"),
)


# No slots: ``cached_property`` stores its value in the instance's ``__dict__``.
@dataclass(frozen=True)
class ContentHash:
    """SHA-256 of a file and its external data, computed when needed: gigabytes of weights take time."""

    paths: tuple[Path, ...]
    stamp: tuple[tuple[int, int], ...]  #: Size and modification time of each file.

    @cached_property
    def sha256(self) -> str:
        """Hash in hexadecimal digits. Raises `InputError` if a file can no longer be read."""
        digest = hashlib.sha256()
        try:
            for path in self.paths:
                with path.open("rb") as stream:
                    hashlib.file_digest(stream, lambda: digest)
        except OSError as error:
            raise InputError(f"cannot read model {self.paths[0]}: {error.strerror}") from error
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """A model read from a file."""

    model: ModelProto  #: Model without the data of large weights, to be treated as read-only.
    weights: dict[str, Tensor]  #: Weights of the main graph by name.
    path: Path
    content: ContentHash | str  #: Hash of the file followed by its external data files in the order of their names.
    external: tuple[str, ...]  #: Names of the external data files, relative to the model's directory.
    #: Size and modification time of the file and of each external file when read.
    stamp: tuple[tuple[int, int], ...]

    @property
    def inputs(self) -> list[ValueInfoProto]:
        """Inputs that a caller gives: those without weights."""
        return [info for info in self.model.graph.input if info.name not in self.weights]

    @property
    def opsets(self) -> dict[str, int]:
        """Opset by domain, ONNX's own as ``""``."""
        return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in self.model.opset_import}

    @property
    def sha256(self) -> str:
        """Hash of the content. Raises `InputError` if the file can no longer be read."""
        return self.content if isinstance(self.content, str) else self.content.sha256


def read_onnx(path: Path) -> OnnxFile:
    """Return the model in ``path``; parsed files are cached.

    Raises `InputError` if the file is missing, not ONNX or truncated, or if weights contradict their declarations or
    lie outside the model's directory.
    """
    try:
        status = path.stat()
    except OSError as error:
        is_url = path.parts[:1] != () and path.parts[0].endswith(":")
        fix = "download it first" if is_url else "give the path of an ONNX file"
        raise InputError(f"cannot read model {path}: {error.strerror}", fix) from error
    if not path.is_file():
        raise InputError(f"cannot read model {path}: not a file", "give the path of an ONNX file")
    if status.st_size == 0:
        raise InputError(f"{path} is not an ONNX model: the file is empty", "export it again")
    if status.st_size > LARGEST_FILE_BYTES:
        raise InputError(
            f"{path} has {status.st_size} bytes, an ONNX file at most {LARGEST_FILE_BYTES}",
            "save it with its weights as external data",
        )
    # Links are resolved: external data lies beside the target.
    resolved = path.resolve()
    file = _files.get(resolved)
    if file is None or _stamp(resolved, file.external) != file.stamp:
        while len(_files) >= _MOST_FILES:
            _files.pop(next(iter(_files)))
        file = _files[resolved] = _read_file(resolved)
    return file


def list_op_types(path: Path) -> frozenset[str]:
    """Return the op types of all nodes of a file, subgraphs included, readable even where shapes are unknown.

    Raises `InputError` as `read_onnx` does.
    """
    return frozenset(node.op_type for graph in graphs_of(read_onnx(path).model.graph) for node in graph.node)


_files: dict[Path, OnnxFile] = {}


def _stamp(path: Path, external: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Return size and modification time of the file and its external data, to detect changes."""
    stamps = []
    for file in (path, *(path.parent / name for name in external)):
        try:
            status = file.stat()
        except OSError:
            stamps.append((-1, -1))
        else:
            stamps.append((status.st_size, status.st_mtime_ns))
    return tuple(stamps)


def _read_file(path: Path) -> OnnxFile:
    # Before reading: a file changed during the read has a newer stamp and is read again.
    stamp = _stamp(path, ())
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read model {path}: {error.strerror}") from error
    model = _parse(content, path)
    tensors = list(_tensors(model))
    for tensor in tensors:
        _check_size(tensor, path)
    names = tuple(sorted({_check_external(tensor, path) for tensor in tensors if _is_external(tensor)}))
    stamp += _stamp(path, names)[1:]
    files = (path, *(path.parent / name for name in names))
    hashed = ContentHash(files, stamp) if names else hashlib.sha256(content).hexdigest()
    weights = _extract_weights(model, path)
    # The parsed message owns its memory as a whole: only a copy frees the memory of dropped fields.
    light = _normalize_model(ModelProto.FromString(model.SerializeToString()), path.name)
    return OnnxFile(light, weights, path, hashed, names, stamp)


def _normalize_model(model: ModelProto, name: str) -> ModelProto:
    """Return the model with functions inlined and nodes sorted, after ONNX's own checker."""
    try:
        # Without inlining, every later step would need rules for ops defined only in this file.
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        if model.functions:
            model = _inline_other_opsets(model)
        for nested in graphs_of(model.graph):
            for node in nested.node:
                # Two names of the same domain (ONNX IR specification); all later look-ups use "".
                node.domain = "" if node.domain == "ai.onnx" else node.domain
        graph = model.graph
        names = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in sort_nodes(graph.node, names, name)]
        del graph.node[:]
        graph.node.extend(nodes)
        _check(model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split("==>")[0].split())
        remedy = f"export it for IR version {onnx.IR_VERSION} or before" if "ir_version" in text else "export it again"
        raise InputError(f"{name} is not a valid model: {text}", remedy) from error
    return model


def _inline_other_opsets(model: ModelProto) -> ModelProto:
    """Return the model with those functions inlined that are of another opset than the model."""
    try:
        return onnx.inliner.inline_local_functions(model, convert_version=True)
    except RuntimeError:  # it cannot convert some ops; most are equal in both opsets
        versions = {opset.domain: opset.version for opset in model.opset_import}
        for opset in (opset for function in model.functions for opset in function.opset_import):
            opset.version = versions.get(opset.domain, opset.version)
        return onnx.inliner.inline_local_functions(model)


def _check(model: ModelProto) -> None:
    """Run ONNX's checker, without requirements that runtimes do not have.

    It does not require shapes of inputs and outputs, types of outputs, the graph's name, unique metadata, weights
    listed as inputs before IR version 4 (omitted by tools that rewrite old models), deprecated ops, and the runtime's
    own ops in ONNX's domain. Raises `ValueError` for a damaged node.
    """
    _refuse_damaged_nodes(model)
    tolerant = ModelProto.FromString(model.SerializeToString())
    del tolerant.metadata_props[:]
    tolerant.ir_version = max(model.ir_version, _WEIGHTS_APART)
    opset = next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 1)
    for graph in graphs_of(tolerant.graph):
        graph.name = graph.name or "graph"
        for node in graph.node:
            if node.op_type in _RUNTIMES_OWN or _is_deprecated(node, opset):
                node.domain = _RUNTIMES_DOMAIN
        for info in (*graph.input, *graph.output):
            if info.type.WhichOneof("value") is None and info in graph.output:
                info.type.tensor_type.elem_type = TensorProto.FLOAT
            kind = info.type.tensor_type
            if info.type.HasField("tensor_type") and kind.elem_type and not kind.HasField("shape"):
                # The checker accepts an empty shape, which protobuf serialises only when marked as present.
                kind.shape.SetInParent()
    if all(opset.domain != _RUNTIMES_DOMAIN for opset in tolerant.opset_import):
        tolerant.opset_import.append(helper.make_opsetid(_RUNTIMES_DOMAIN, 1))
    onnx.checker.check_model(tolerant)


def _is_deprecated(node: NodeProto, opset: int) -> bool:
    """Return whether an op of ONNX's own domain is deprecated in the opset; runtimes still run such ops."""
    try:
        return not node.domain and bool(onnx.defs.get_schema(node.op_type, opset, "").deprecated)
    except (onnx.defs.SchemaError, TypeError):  # TypeError: a name with invalid text in a damaged file
        return False


def _refuse_damaged_nodes(model: ModelProto) -> None:
    """Raise `ValueError` for a node that ONNX's checker accepts, and on which its inference fails, hangs or aborts."""
    for opset in model.opset_import:
        if isinstance(opset.domain, bytes):  # protobuf's way of reading what is no text
            raise ValueError(f"the name of the opset {opset.domain!r} is no text")
    for graph in graphs_of(model.graph):
        for node in graph.node:
            for attribute in node.attribute if not node.domain else ():
                for text in (attribute.s, *attribute.strings):
                    text.decode()
                if node.op_type == "If" and attribute.g.input:
                    raise ValueError(
                        f"{attribute.name} of node {label(node)} declares the input {attribute.g.input[0].name!r}, "
                        "and a branch of If can have none"
                    )
                if node.op_type == "Split" and attribute.name == "num_outputs" and attribute.i != len(node.output):
                    raise ValueError(f"node {label(node)} has {len(node.output)} outputs, not {attribute.i}")


def _refuse_other_format(content: bytes, path: Path) -> None:
    for start, form, fix in _OTHER_FORMATS:
        if start in (content[: len(start)], content[4 : 4 + len(start)]):
            raise InputError(f"{path} is not an ONNX model but {form}", fix) from None


def _parse(content: bytes, path: Path) -> ModelProto:
    try:
        model: ModelProto = ModelProto.FromString(content)
    except Exception as error:  # DecodeError's module differs between protobuf implementations
        _refuse_other_format(content, path)
        # 0x08 is the tag of field 1, ir_version, the first byte of exported models: such a file is a damaged model.
        reason = "truncated or damaged" if content[:1] == b"\x08" else "not Protocol Buffers"
        raise InputError(
            f"{path} is not an ONNX model: {reason}", "export it again, or fetch it again whole"
        ) from error
    if not model.ir_version or not model.graph.node or not model.graph.output:
        _refuse_other_format(content, path)
        missing = "nodes" if not model.graph.node else "outputs"
        reason = f"its graph has no {missing}" if model.ir_version else "it declares no IR version"
        raise InputError(f"{path} is not an ONNX model: {reason}", "export it again, or fetch it again whole")
    return model


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    for graph in graphs_of(model.graph):
        yield from graph.initializer
        yield from _tensors_of(graph.node)
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for function in model.functions:
        yield from _tensors_of(function.node)


def _tensors_of(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _check_size(tensor: TensorProto, path: Path) -> None:
    """Raise `InputError` for a tensor whose data does not match the size of its shape."""
    name = tensor.name or "of a node"
    if any(dim < 0 for dim in tensor.dims):
        raise InputError(f"{path}: weight {name} has a negative dimension: {list(tensor.dims)}")
    try:
        declared = Tensor(name, dtype_name(tensor.data_type), tuple(tensor.dims))
        nbytes = declared.bytes
    except InputError as error:
        raise InputError(f"{path}: weight {name}: {error.message}", error.fix) from error
    if declared.elements > MOST_ELEMENTS:
        raise InputError(f"{path}: weight {name} declares {declared.elements} elements, at most {MOST_ELEMENTS}")
    size = len(tensor.raw_data)
    if tensor.HasField("raw_data") and not _is_external(tensor) and size != nbytes:
        raise InputError(
            f"{path}: weight {name} of shape {list(tensor.dims)} needs {nbytes} bytes but has {size}",
            "the file is damaged: export it again",
        )


def _is_external(tensor: TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL


def _check_external(tensor: TensorProto, path: Path) -> str:
    """Return the name of the external file. Raises `InputError` if outside the directory, missing or too short."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = str(entries.get("location", ""))
    target = path.parent / location
    # Both the text and the resolved path are checked: a link inside the directory may lead out of it, and a model could
    # then read any file of the server as weights.
    inside = target.resolve().is_relative_to(path.parent.resolve())
    if not location or Path(location).is_absolute() or ".." in Path(location).parts or not inside:
        raise InputError(
            f"{path}: weight {tensor.name} keeps its data outside the model's directory: {location!r}",
            "put the data file beside the model",
        )
    if not target.is_file():
        raise InputError(f"{path}: external data file {location!r} is missing", "put the data file beside the model")
    size = target.stat().st_size
    needed = Tensor(tensor.name, dtype_name(tensor.data_type), tuple(tensor.dims)).bytes
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", size - offset))
    except ValueError as error:
        raise InputError(
            f"{path}: weight {tensor.name} has an external offset or length that is no number",
            "the model is damaged: export it again",
        ) from error
    if offset < 0 or length != needed or offset + length > size:
        raise InputError(
            f"{path}: weight {tensor.name} needs {needed} bytes at {offset} of {location!r}, which has {size}",
            "the data file is damaged: export the model again",
        )
    return location


def _extract_weights(model: ModelProto, path: Path) -> dict[str, Tensor]:
    """Remove the data of large weights from the main graph, and return all its weights by name."""
    graph = model.graph
    # Before IR version 4 every weight is also listed as an input. From then on, callers may override such a weight: it
    # is an input with a default, which is used here.
    weights: dict[str, Tensor] = {}
    for i in reversed(range(len(graph.initializer))):
        tensor = graph.initializer[i]
        if not tensor.name:
            raise InputError(f"{path}: a weight has no name")
        if tensor.name in weights:  # runtimes take the last one
            del graph.initializer[i]
        else:
            weights[tensor.name] = Tensor(tensor.name, dtype_name(tensor.data_type), tuple(tensor.dims))
    for sparse in graph.sparse_initializer:
        name = sparse.values.name
        weights[name] = Tensor(name, dtype_name(sparse.values.data_type), tuple(sparse.dims))
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.output) == 1:
            value = constant_tensor(node)
            weights[value.name] = Tensor(value.name, dtype_name(value.data_type), tuple(value.dims))
    _check_declared(graph, weights, path)
    _strip_weight_data(graph, weights, path.parent)
    return weights


def _check_declared(graph: onnx.GraphProto, weights: dict[str, Tensor], path: Path) -> None:
    for info in graph.input:
        weight = weights.get(info.name)
        declared = info.type.tensor_type
        if weight is None or not declared.HasField("shape"):
            continue
        shape = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in declared.shape.dim)
        same = len(shape) == len(weight.shape) and all(a in (None, b) for a, b in zip(shape, weight.shape, strict=True))
        if not same or dtype_name(declared.elem_type) != weight.dtype:
            raise InputError(f"{path}: weight {info.name} has shape {list(weight.shape)} but is declared {list(shape)}")


def _strip_weight_data(graph: onnx.GraphProto, weights: dict[str, Tensor], directory: Path) -> None:
    """Remove the data of large weights, and load external data of small weights, which may be shapes."""
    declared = {info.name for info in graph.input}
    for i in reversed(range(len(graph.initializer))):
        if not _is_small(graph.initializer[i]):
            del graph.initializer[i]
        elif _is_external(graph.initializer[i]):
            load_external_data_for_tensor(graph.initializer[i], str(directory))
            graph.initializer[i].ClearField("data_location")
            del graph.initializer[i].external_data[:]
    # Reverse order above and below: removing an element moves all later elements.
    del graph.sparse_initializer[:]
    for i in reversed(range(len(graph.node))):
        tensors = [attribute.t for attribute in graph.node[i].attribute if attribute.HasField("t")]
        if graph.node[i].op_type == "Constant" and not all(_is_small(tensor) for tensor in tensors):
            del graph.node[i]
    # Weights without data are declared as inputs, which keeps the graph valid.
    names = {tensor.name for tensor in graph.initializer} | {name for node in graph.node for name in node.output}
    for name, weight in weights.items():
        if name not in names and name not in declared:
            graph.input.append(helper.make_tensor_value_info(name, elem_type(weight.dtype), weight.shape))


def _is_small(tensor: TensorProto) -> bool:
    return bool(prod(tensor.dims) <= MOST_VALUES)
