"""Builds the merged graph of a plan, in standard ONNX operators only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gpuprof.errors import InputError
from gpuprof.graph.element_types import elem_type
from gpuprof.graph.merged_model import MergedMember, MergedModel, MergedValue, write_description
from gpuprof.graph.nodes import graphs_of
from gpuprof.merging.plan import MergePlan, Step, SuperOperator, bias_of, weight_part
from gpuprof.merging.source import Array, Size, SourceModel, digest_tensor

_TO_THE_END = np.iinfo(np.int64).max


def build_merged(plan: MergePlan) -> tuple[ModelProto, MergedModel]:
    """Return the merged model of a plan and its description, which is also stored in the model's metadata.

    Each model's inputs and outputs are called ``<model>/<name>``. The free batch of a model is the dimension
    ``m<number>_<model>_batch``; a batch of 0 leaves the model out of a call. Raises `InputError` when the models need
    different versions of the same operator set.
    """
    return _Builder(plan).build()


class _Builder:
    def __init__(self, plan: MergePlan) -> None:
        self.plan = plan
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, TensorProto] = {}
        self._by_digest: dict[str, str] = {}
        self._names: dict[tuple[int, str], str] = {}
        self._laid: dict[tuple[int, int], str] = {}
        self._cache: dict[object, str] = {}
        self._taken: set[str] = set()
        self._outputs: dict[tuple[int, str], str] = {}

    def build(self) -> tuple[ModelProto, MergedModel]:
        """Return the merged model and the description of its members."""
        sources = self.plan.sources
        for m, source in enumerate(sources):
            for name in source.inputs:
                self._names[m, name] = self._new_name(f"{source.name}/{name}")
        for step in self.plan.steps:
            if step.once:
                self._add_merged_step(step)
            elif step.super_operator is not None:
                self._add_super_operator(step, step.super_operator)
            else:
                for m in step.models:
                    self._add_separate_node(m, step.node_positions[m])
        inputs = [self._info(m, name, self._names[m, name]) for m, s in enumerate(sources) for name in s.inputs]
        outputs = [self._output(m, name) for m, s in enumerate(sources) for name in s.outputs]
        graph = helper.make_graph(self.nodes, "merged", inputs, outputs, list(self.weights.values()))
        model = helper.make_model(graph, producer_name="gpuprof", opset_imports=self._opsets())
        model.ir_version = max(source.ir_version for source in sources)
        described = self._description()
        write_description(model, described)
        return model, described

    # nodes, constants and values of the graph

    def add(self, op_type: str, inputs: Sequence[str], hint: str, **attributes: Any) -> str:
        """Add a node with a single output and return the output's name; equal nodes are added once."""
        key = (op_type, tuple(inputs), repr(sorted(attributes.items())))
        if key not in self._cache:
            output = self._new_name(hint)
            self.nodes.append(helper.make_node(op_type, list(inputs), [output], name=output, **attributes))
            self._cache[key] = output
        return self._cache[key]

    def constant(self, value: Array, hint: str) -> str:
        """Return the name of a weight with this value, adding the weight if necessary."""
        return self._weight(numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), hint), hint)

    def numbers(self, *values: int) -> str:
        """Return the name of a constant list of whole numbers."""
        return self.constant(np.array(values, np.int64), "numbers/" + "_".join(map(str, values)))

    def value(self, model: int, name: str) -> str:
        """Return the name of a model's own value, split from a concatenation if necessary."""
        if not name:
            return ""
        if (model, name) in self._names:
            return self._names[model, name]
        source = self.plan.sources[model]
        if name in source.weights:
            m, weight = self.plan.shared.get((model, name), (model, name))
            holder = self.plan.sources[m]
            tensor_name = self._weight(holder.weights[weight], f"{holder.name}/{weight}", holder.digest(weight))
        else:
            place = self.plan.produced_once[model, name]
            step = self.plan.steps[place[0]]
            tensor_name = self._laid[place]
            if step.is_concatenated:
                names = [self.plan.node(step, m).output[place[1]] for m in step.models]
                tensor_name = self.part(tensor_name, step.models, names, model, f"{source.name}/{name}")
        self._names[model, name] = tensor_name
        return tensor_name

    def concat_values(self, models: Sequence[int], names: Sequence[str]) -> str:
        """Return the name of several models' values concatenated."""
        places = {self.plan.produced_once.get((m, name)) for m, name in zip(models, names, strict=True)}
        if len(places) == 1 and (place := places.pop()) is not None:
            step = self.plan.steps[place[0]]
            if step.models == tuple(models) and step.is_concatenated:
                return self._laid[place]
        parts = [self.value(m, name) for m, name in zip(models, names, strict=True)]
        return self.add("Concat", parts, f"shared/{names[0]}/inputs", axis=0)

    def part(self, whole: str, models: Sequence[int], names: Sequence[str], model: int, hint: str) -> str:
        """Return the name of ``model``'s part of ``whole``, the concatenation of the models' values ``names``."""
        sizes = [self.plan.sources[m].values[name].dims[0] for m, name in zip(models, names, strict=True)]
        at = list(models).index(model)
        begin = self._sum(models[:at], sizes[:at])
        last = at == len(models) - 1
        end = self.numbers(_TO_THE_END) if last else self._sum(models[: at + 1], sizes[: at + 1])
        return self.add("Slice", [whole, begin, end, self.numbers(0)], hint)

    def _sum(self, models: Sequence[int], sizes: Sequence[Size]) -> str:
        total = ""
        for model, size in zip(models, sizes, strict=True):
            term = self._size(model, size.per_batch)
            total = self.add("Add", [total, term], "batch/sum") if total else term
        return total or self.numbers(0)

    def _size(self, model: int, factor: int) -> str:
        source = self.plan.sources[model]
        assert source.batch_input is not None
        name, axis = source.batch_input
        shape = self.add("Shape", [self._names[model, name]], f"batch/{source.name}/shape")
        batch = self.add("Slice", [shape, self.numbers(axis), self.numbers(axis + 1)], f"batch/{source.name}")
        return batch if factor == 1 else self.add("Mul", [batch, self.numbers(factor)], f"batch/{source.name}/{factor}")

    # nodes of a step

    def _add_merged_step(self, step: Step) -> None:
        first = step.models[0]
        node = self.plan.node(step, first)
        inputs = [
            self.concat_values(step.models, [self.plan.node(step, m).input[i] for m in step.models])
            if is_concatenated
            else self.value(first, node.input[i])
            for i, is_concatenated in enumerate(step.concatenated_inputs)
        ]
        if node.op_type == "Reshape":
            inputs.append(self._target(step))
        if node.op_type == "Flatten":  # the leading axes may multiply to the batch, which is then no longer in front
            node = helper.make_node("Reshape", ["", ""], list(node.output), name=node.name)
            inputs.append(self._target(step))
        merged_node = NodeProto.FromString(node.SerializeToString())
        if node.op_type == "Reshape":
            del merged_node.attribute[:]
        merged_node.name = self._new_name(f"shared/{node.name or node.op_type}")
        outputs = [self._new_name(f"shared/{name}") if name else "" for name in node.output]
        merged_node.input[:], merged_node.output[:] = inputs, outputs
        self.nodes.append(merged_node)
        index = self.plan.produced_once[first, next(name for name in node.output if name)][0]
        self._laid |= {(index, i): name for i, name in enumerate(outputs) if name}

    def _target(self, step: Step) -> str:
        first = step.models[0]
        dims = self.plan.sources[first].values[self.plan.node(step, first).output[0]].dims
        sizes = [dim.fixed for dim in dims]
        return self.numbers(*([-1, *sizes[1:]] if step.is_concatenated else sizes))

    def _add_separate_node(self, model: int, position: int) -> None:
        source = self.plan.sources[model]
        node = NodeProto.FromString(source.nodes[position].SerializeToString())
        node.name = self._new_name(f"{source.name}/{node.name or node.op_type}")
        node.input[:] = [self.value(model, name) for name in node.input]
        self._rename_nested(model, node)
        for i, name in enumerate(node.output):
            if name:
                node.output[i] = self._names[model, name] = self._new_name(f"{source.name}/{name}")
        self.nodes.append(node)

    def _rename_nested(self, model: int, node: NodeProto) -> None:
        for item in node.attribute:
            for nested in (*([item.g] if item.HasField("g") else []), *item.graphs):
                graphs = list(graphs_of(nested))
                inner_names = {name for graph in graphs for inner in graph.node for name in inner.output}
                inner_names |= {x.name for graph in graphs for x in (*graph.input, *graph.initializer)}
                for graph in graphs:
                    for inner in graph.node:
                        inner.input[:] = [n if not n or n in inner_names else self.value(model, n) for n in inner.input]
                    for info in graph.output:
                        info.name = info.name if info.name in inner_names else self.value(model, info.name)

    def _add_super_operator(self, step: Step, shared: SuperOperator) -> None:
        names = [self.plan.node(step, m).input[0] for m in step.models]
        first, end = step.models[0], shared.begins[step.models[0]] + shared.outputs
        product = self._multiply(step, first, self.concat_values(step.models, names), shared.begins[first], end)
        for m in step.models:
            node, operators = self.plan.node(step, m), self.plan.group(step).operators
            source, begin, end = self.plan.sources[m], shared.begins[m], shared.begins[m] + shared.outputs
            hint = f"{source.name}/{node.output[0]}"
            data = self.value(m, names[step.models.index(m)])
            pieces = [self.part(product, step.models, names, m, f"{hint}/shared")]
            if begin > 0:
                pieces.insert(0, self._multiply(step, m, data, 0, begin))
            if end < shared.totals[m]:
                pieces.append(self._multiply(step, m, data, end, shared.totals[m]))
            is_conv, rank = operators[m].kind == "conv", len(source.values[node.output[0]].dims)
            axis = 1 if is_conv else rank - 1
            result = pieces[0] if len(pieces) == 1 else self.add("Concat", pieces, f"{hint}/placed", axis=axis)
            bias = bias_of(self.plan.group(step), m)
            if bias is not None:
                added = source.array(bias)
                added = added.reshape(1, -1, *(1 for _ in range(rank - 2))) if is_conv else added
                result = self.add("Add", [result, self.constant(added, f"{source.name}/{bias}")], f"{hint}/biased")
            self._names[m, node.output[0]] = result

    def _multiply(self, step: Step, model: int, data: str, begin: int, end: int) -> str:
        """Return the name of the product of ``data`` with the weights of some of a model's output features."""
        source, operator = self.plan.sources[model], self.plan.group(step).operators[model]
        hint = f"{source.name}/{operator.name}"
        weight = self.constant(weight_part(source, operator, begin, end), f"{hint}/weight")
        if operator.kind != "conv":
            return self.add("MatMul", [data, weight], f"{hint}/product")
        attributes = {a.name: helper.get_attribute_value(a) for a in operator.node.attribute}
        return self.add("Conv", [data, weight], f"{hint}/product", **attributes)

    # names, inputs, outputs and metadata of the graph

    def _weight(self, tensor: TensorProto, hint: str, digest: str | None = None) -> str:
        digest = digest or digest_tensor(tensor)
        if digest not in self._by_digest:
            name = self._new_name(hint)
            weight = TensorProto()
            weight.CopyFrom(tensor)
            weight.name = name
            self.weights[name] = weight
            self._by_digest[digest] = name
        return self._by_digest[digest]

    def _new_name(self, hint: str) -> str:
        name, count = hint, 1
        while name in self._taken:
            count += 1
            name = f"{hint}_{count}"
        self._taken.add(name)
        return name

    def _info(self, model: int, name: str, merged: str) -> onnx.ValueInfoProto:
        source = self.plan.sources[model]
        value = source.values[name]
        dims = [_dim(model, source, dim) for dim in value.dims]
        return helper.make_tensor_value_info(merged, elem_type(value.dtype), dims)

    def _output(self, model: int, name: str) -> onnx.ValueInfoProto:
        source = self.plan.sources[model]
        merged = f"{source.name}/{name}"
        current = self.value(model, name)
        if current != merged:
            merged = self._new_name(merged)
            self.nodes.append(helper.make_node("Identity", [current], [merged], name=f"{merged}/out"))
        self._outputs[model, name] = merged
        return self._info(model, name, merged)

    def _opsets(self) -> list[onnx.OperatorSetIdProto]:
        versions: dict[str, int] = {}
        for source in self.plan.sources:
            for domain, version in source.opsets.items():
                if versions.setdefault(domain, version) != version:
                    raise InputError(
                        f"the models need operators of {domain or 'ONNX'} in versions {versions[domain]} and {version}",
                        "export them with the same versions",
                    )
        return [helper.make_opsetid(domain, version) for domain, version in versions.items()]

    def _description(self) -> MergedModel:
        members = []
        for m, source in enumerate(self.plan.sources):
            values = [
                tuple(
                    MergedValue(name, merged[m, name], source.values[name].dtype, _static_dims(source, name))
                    for name in names
                )
                for names, merged in ((source.inputs, self._names), (source.outputs, self._outputs))
            ]
            members.append(MergedMember(source.name, str(source.path), source.sha256, values[0], values[1]))
        return MergedModel(tuple(members))


def _dim(model: int, source: SourceModel, size: Size) -> int | str | None:
    if not size.per_batch:
        return size.fixed
    name = re.sub(r"\W", "_", f"m{model}_{source.name}")  # dimension names must be identifiers
    if size == Size(0, 1):
        return f"{name}_batch"
    return f"{name}_{size.per_batch}_batch_{size.fixed}"


def _static_dims(source: SourceModel, name: str) -> tuple[int | None, ...]:
    return tuple(None if size.per_batch else size.fixed for size in source.values[name].dims)
