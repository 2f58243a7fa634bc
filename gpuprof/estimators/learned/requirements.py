"""Creq and Mreq of models by the stack of regressors, from the work of their graphs (USHER, OSDI'24, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuprof.domain.device import Device
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share
from gpuprof.estimators.learned.features import KINDS, kind_of, roofline_ns
from gpuprof.estimators.learned.op_facts import facts_of_op
from gpuprof.estimators.learned.regressors import STACKED, fit_regressors
from gpuprof.estimators.memory.liveness import peak_activation_bytes

Array = NDArray[Any]
#: Name of Mreq among the requirements; the others are metrics of Creq.
MREQ = "memory"


def graph_features(graph: ModelGraph, device: Device) -> Array:
    """Return the features of a graph at its batch on a whole device: an ndarray of shape (F,).

    They are logarithms of its work and sizes, and the parts of the kinds of ops in its least time.
    """
    facts = [facts_of_op(op, graph.batch) for op in graph.ops]
    times_ns = roofline_ns(facts, device, Share())
    parts = times_ns / max(float(times_ns.sum()), 1.0)
    outputs = np.array([math.log1p(sum(math.prod(shape) for shape in fact.outputs)) for fact in facts])
    flops, traffic = sum(fact.flops for fact in facts), sum(fact.bytes_read + fact.bytes_written for fact in facts)
    kinds = np.array([kind_of(fact) for fact in facts])
    sizes = (flops, traffic, graph.weight_bytes, peak_activation_bytes(graph), float(times_ns.sum()), len(facts))
    return np.array(
        [
            *(math.log1p(size) for size in sizes),
            math.log(graph.batch),
            math.log((flops + 1.0) / (traffic + 1.0)),
            float(parts @ outputs),
            float(outputs.max()),
            *(float(parts[kinds == kind].sum()) for kind in KINDS),
        ]
    )


def fit_requirements(
    graphs: Sequence[ModelGraph],
    measured: Sequence[Mapping[str, float]],
    architectures: Sequence[str],
    device: Device,
    names: Sequence[str] = STACKED,
) -> dict[str, Mapping[str, Any]]:
    """Return the regressors of each requirement's logarithm, with their stack, by requirement and name.

    ``measured``: requirements of each graph, Creq in percent, Mreq in bytes; ``architectures``: of each graph.
    """
    features = [graph_features(graph, device) for graph in graphs]
    fitted = {}
    for requirement in sorted({name for values in measured for name in values}):
        rows = [row for row, values in enumerate(measured) if values.get(requirement, 0.0) > 0.0]
        if len(rows) > 1:
            target = np.log([measured[row][requirement] for row in rows])
            groups = [architectures[row] for row in rows]
            fitted[requirement] = fit_regressors(np.array([features[row] for row in rows]), target, groups, names)
    return fitted


def predict_requirement(regressor: Any, requirement: str, graph: ModelGraph, device: Device) -> float:
    """Return Creq in percent, at most 100, or Mreq in bytes."""
    value = math.exp(float(regressor.predict(graph_features(graph, device)[None, :])[0]))
    return value if requirement == MREQ else min(100.0, value)
