"""Finds the measurements of a model at given sizes of its free dimensions, or around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from gpuprof.domain.model import ModelGraph
from gpuprof.domain.sizes import Sizes, describe_sizes, interpolate_sizes, sized_name
from gpuprof.errors import InputError
from gpuprof.estimators.measured.measured import MeasuredModel


def group_by_model(measured: Mapping[str, MeasuredModel]) -> dict[str, dict[Sizes, MeasuredModel]]:
    """Return the measurements by the models' names without sizes, then by sizes; ``()``: the rows have no sizes."""
    by_model: dict[str, dict[Sizes, MeasuredModel]] = {}
    for model in measured.values():
        by_model.setdefault(model.model, {})[model.sizes] = model
    return by_model


def read_at_sizes(path: str | None, sizes: Sizes, sha256: str | None = None) -> ModelGraph | None:
    """Return the graph of the file at ``sizes``, omitted dimensions at usual sizes; None where the file is gone or
    changed.

    Raises `InputError` when the model has no such dimension, or cannot be read at these sizes.
    """
    from gpuprof.graph.load import load_runnable, read_fixed_batch

    file = Path(path or "")
    if not file.is_file():
        return None
    graph = load_runnable(file, read_fixed_batch(file) or 1, dims=dict(sizes))
    return graph if sha256 is None or sha256 == graph.sha256 else None


def choose_sizes(name: str, by_sizes: Mapping[Sizes, MeasuredModel], sizes: Sizes) -> MeasuredModel:
    """Return the model at ``sizes``, which may omit dimensions.

    Omitted dimensions take their measured sizes if only one size was measured; else the usual sizes. Rows without sizes
    are of the usual sizes. Raises `InputError` when several sizes were measured and the choice is ambiguous, or the
    model has no such dimension. ``name``: of the model, without sizes; ``by_sizes``: its measurements; ``sizes``:
    requested sizes.
    """
    with_sizes = {model_sizes: model for model_sizes, model in by_sizes.items() if model_sizes}
    if not with_sizes and not sizes:
        return by_sizes[()]
    agreeing = {model_sizes: model for model_sizes, model in with_sizes.items() if set(sizes) <= set(model_sizes)}
    if len(agreeing) == 1 and () not in by_sizes:
        return _beside_others(next(iter(agreeing.values())), with_sizes.values())
    any_one = next(iter(by_sizes.values()))
    graph = read_at_sizes(any_one.path, sizes, any_one.sha256)
    if graph is None:
        return _without_file(name, by_sizes, sizes)
    if graph.guessed and agreeing:
        raise _ask(name, with_sizes)
    if () in by_sizes:
        usual = read_at_sizes(any_one.path, ())
        if usual is not None and usual.sizes not in with_sizes:
            with_sizes[usual.sizes] = replace(by_sizes[()], name=sized_name(name, usual.sizes))
    if graph.sizes in with_sizes:
        return _beside_others(with_sizes[graph.sizes], with_sizes.values())
    if agreeing and not sizes:
        raise _ask(name, with_sizes)
    return unmeasured_at(any_one, name, graph.sizes, with_sizes.values())


def unmeasured_at(like: MeasuredModel, name: str, sizes: Sizes, peers: Iterable[MeasuredModel] = ()) -> MeasuredModel:
    """Return a model at unmeasured sizes."""
    peers = tuple(peers)
    variants = {device: variant for peer in peers for device, variant in peer.variants.items()}
    return MeasuredModel(
        sized_name(name, sizes), like.path, like.sha256, like.weight_bytes, {}, {}, like.superseded, variants, peers
    )


def blend_measured(model: MeasuredModel, device: str) -> list[tuple[MeasuredModel, float]]:
    """Return the measured sizes on a device around those of ``model``, with the weight of each; empty outside."""
    if not model.others:
        return []
    measured = {peer.sizes: peer for peer in model.others if peer.points.get(device)}
    weights = interpolate_sizes(measured, model.sizes) or {}
    return [(measured[sizes], weight) for sizes, weight in weights.items() if weight > 0.0]


def _beside_others(model: MeasuredModel, peers: Iterable[MeasuredModel]) -> MeasuredModel:
    return replace(model, others=tuple(peer for peer in peers if peer is not model))


def _without_file(name: str, by_sizes: Mapping[Sizes, MeasuredModel], sizes: Sizes) -> MeasuredModel:
    """Return the model at ``sizes`` where its file, and so its dimensions, are missing."""
    with_sizes = {model_sizes: model for model_sizes, model in by_sizes.items() if model_sizes}
    if sizes in with_sizes:
        return _beside_others(with_sizes[sizes], with_sizes.values())
    if not sizes and () in by_sizes:
        return by_sizes[()]
    if not with_sizes:
        raise InputError(
            f"{name} was measured at sizes that the database does not say, and its ONNX file is not there",
            f"give the file, or measure it: gpuprof profile MODEL --dim {describe_sizes(sizes[:1])}",
        )
    names = {size: {dim for dim, _ in size} for size in with_sizes}
    if {dim for dim, _ in sizes} not in names.values():
        raise _ask(name, with_sizes)
    return unmeasured_at(next(iter(with_sizes.values())), name, sizes, with_sizes.values())


def _ask(name: str, known_sizes: Iterable[Sizes]) -> InputError:
    texts = list(map(describe_sizes, sorted(known_sizes)))
    dims = " ".join(f"--dim {dim}=SIZE" for dim in sorted({dim for sizes in known_sizes for dim, _ in sizes}))
    return InputError(f"{name} was measured at {' and at '.join(texts)}: say which is meant", dims)
