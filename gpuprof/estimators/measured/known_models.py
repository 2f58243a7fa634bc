"""The models of the database and of given files, with their measurements, and workloads ruled out by failures.

A failure rules out what demands at least as much with at most its resources, alone or together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import NOTHING_TRIED, FailedRun, TriedRuns, Workload
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.runtime_variant import SERVED_BY, Padding, rank_variants
from gpuprof.domain.share import Share
from gpuprof.domain.sizes import Sizes, describe_sizes, sized_name, split_name
from gpuprof.errors import InputError, unknown_name
from gpuprof.estimators.measured.measured import (
    MeasuredModel,
    Point,
    choose_sizes,
    group_by_model,
    read_measured,
    unmeasured_at,
)
from gpuprof.estimators.roofline import WorkByBatch
from gpuprof.graph.file import list_op_types, read_onnx
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ColocationRow, model_at_dims
from gpuprof.kernel_db.store import COPIES, KernelDb
from gpuprof.rules.batching import needs_padding


class KnownModels:
    """The models of a kernel database and of given files.

    ``graphs``: as for `gpuprof.estimators.database.DatabaseEstimator`.

    Attributes
    ----------
    measured : mapping of str to MeasuredModel
        Models of the database, by name and sizes.
    groups : TriedRuns
        Groups of workloads that ran, or failed, at the same time.
    """

    def __init__(self, db: KernelDb | None, graphs: Mapping[str, Path] | None = None) -> None:
        self.measured = read_measured(db) if db is not None else {}
        self.groups = read_groups(db, self.measured) if db is not None else NOTHING_TRIED
        self._copies = None if db is None else db.path / COPIES
        self._graphs = dict(graphs or {})
        self._sized = group_by_model(self.measured)
        self._files: dict[str, MeasuredModel] = {}
        self._works: dict[str, WorkByBatch | None] = {}
        self._only_batches: dict[str, int | None] = {}
        self._least_failures: dict[tuple[str, str, Share, int], FailedRun | None] = {}

    def has_measured(self, model: str) -> bool:
        """Return whether the database holds a model of this name, at any sizes."""
        return split_name(model)[0] in self._sized

    def is_known(self, model: str) -> bool:
        """Return whether ``model`` was measured, or its file is at hand."""
        name, _ = split_name(model)
        return name in self._sized or name in self._graphs or _is_path(name)

    def list_dims(self, model: str) -> tuple[str, ...]:
        """Return the names of the free dimensions of ``model`` except its batch: of its file, else as measured.

        Raises `InputError` when the model is unknown.
        """
        from gpuprof.graph.load import read_free_dims, read_turns

        name, _ = split_name(model)
        by_sizes = self._sized.get(name, {})
        path = self._graphs.get(name) or (Path(name) if not by_sizes and _is_path(name) else None)
        if path is None and not by_sizes:
            raise unknown_name("model", name, [*self._sized, *self._graphs])
        recorded = path or Path(next((size.path or "" for size in by_sizes.values()), ""))
        if recorded.is_file() or not by_sizes:  # a missing file without measurements is reported by name
            try:
                return (*(dim.name for dim in read_free_dims(recorded)), *read_turns(recorded))
            except InputError:
                if not by_sizes:
                    raise  # without measurements there is no other source
        return tuple(dict.fromkeys(dim for sizes in by_sizes for dim, _ in sizes))

    def describe_sizes(self, model: str) -> str | None:
        """Return a remark on sizes omitted from ``model``, with the option to set them; None if none were omitted.

        Raises `InputError` when the model is unknown, or the sizes are ambiguous.
        """
        from gpuprof.graph.load import explain_numbered_names

        name, dims = split_name(model)
        record = self.find_model(model)
        sizes = [(dim, size) for dim, size in record.sizes if dim not in dict(dims)]
        if not sizes:
            return None
        how = "as it was measured" if record.points else "assumed"
        places = explain_numbered_names(Path(record.path or ""), (dim for dim, _ in sizes))
        return f"{name}: {describe_sizes(sizes)}{places} {how}; another size: --dim {sizes[0][0]}=SIZE"

    def devices_of(self, model: str) -> tuple[str, ...]:
        """Return the names of the devices with measurements of ``model``, sorted."""
        record = self.find_model(model)
        return tuple(sorted({device for peer in (record, *record.others) for device in peer.points}))

    def unknown_ops(self, model: str) -> tuple[str, ...]:
        """Return the op types of ``model`` of unknown cost; empty where its file is missing."""
        work = self.read_work(self.find_model(model))
        return () if work is None else work.smallest.unknown_ops

    def find_recorded_name(self, model: str) -> str:
        """Return the database's name for ``model`` at its sizes; unchanged where the database lacks it."""
        try:
            record = self.find_model(model)
        except InputError:
            return model
        same = (name for name, m in self.measured.items() if m.sha256 == record.sha256 and m.sizes == record.sizes)
        return record.name if record.name in self.measured or record.sha256 is None else next(same, model)

    def require_no_failure(
        self, model: MeasuredModel, device: Device, workload: Workload, beside: Sequence[Workload]
    ) -> None:
        """Raise `InputError` with the failure where a failure rules out a workload of ``model``, alone
        or with ``beside``.
        """
        failure = self.find_least_failure(model, device, workload.share, workload.processes)
        if failure and workload.batch >= failure.workload.batch and not model.has_run(device.name, workload):
            processes = "process" if workload.processes == 1 else "processes"
            raise InputError(
                f"{workload.model} at batch {workload.batch} with {workload.processes} {processes} "
                f"under {workload.share} is ruled out: {failure}",
                "choose a smaller batch, fewer processes or more memory, or measure it again if that was an accident",
            )
        if beside and self.groups.failed:
            group = [replace(member, model=self.find_recorded_name(member.model)) for member in (workload, *beside)]
            require_no_failed_group(device, group[0], group[1:], self.groups)

    def find_least_failure(
        self, model: MeasuredModel, device: Device, share: Share, processes: int
    ) -> FailedRun | None:
        """Return the failed run of the smallest batch that rules out this batch and larger ones; None without one.

        It had no more processes than these and no less memory; and, unless memory was the cause of the failure, no
        fewer compute units. Batches that ran are not ruled out.
        """
        key = model.name, device.name, share, processes
        if key not in self._least_failures:
            failed = [run for run in model.failed_on(device.name) if not run.beside]
            workload = Workload(model.name, max((run.workload.batch for run in failed), default=1), share, processes)
            failed = [run for run in failed if _dominates(device, workload, run.workload, run)]
            self._least_failures[key] = min(failed, key=lambda run: run.workload.batch, default=None)
        return self._least_failures[key]

    def read_graph(self, model: str, batch: int) -> ModelGraph:
        """Return the graph of ``model`` bound to ``batch``.

        Raises `InputError` when the model is unknown or its file is missing, has changed or does not take the batch.
        """
        record = self.find_model(model)
        if self.read_work(record) is None:
            require_readable(record)
            raise InputError(f"the ONNX file of {model} is not there", "give the file instead of the name")
        return self.bind_graph(record, batch)

    def find_model(self, model: str) -> MeasuredModel:
        """Return a model by its name in the database, the name of a given file, or a path."""
        if model not in self._files:
            name, sizes = split_name(model)
            path = self._graphs.get(name)
            if path is not None or (name not in self._sized and _is_path(name)):
                self._files[model] = self._of_file(name, sizes, path or Path(name))
            elif name in self._sized:
                self._files[model] = choose_sizes(name, self._sized[name], sizes)
            elif self._sized or self._graphs:
                raise unknown_name("model", name, [*self._sized, *self._graphs])
            else:
                raise InputError(
                    f"unknown model {name!r}: nothing was measured, and it is no file",
                    "give an ONNX file, or measure one first: gpuprof profile MODEL.onnx",
                )
        return self._files[model]

    def list_points(self, model: str, device: Device) -> list[Point]:
        """Return the measured points of a model on a device; at other sizes where these sizes were not measured."""
        record = self.find_model(model)
        points = record.points.get(device.name)
        return points or [point for peer in record.others for point in peer.points.get(device.name, ())]

    def read_fixed_batch(self, model: str) -> int | None:
        """Return the fixed batch of a model's file, None where it takes any batch or is missing."""
        from gpuprof.graph.load import read_fixed_batch

        path = self.find_model(model).path
        if path is None or not Path(path).is_file():
            return None
        if path not in self._only_batches:  # a plan asks for every share
            self._only_batches[path] = read_fixed_batch(Path(path))
        return self._only_batches[path]

    def hash_content(self, model: MeasuredModel) -> str | None:
        """Return the hash of a model's content: as measured, else of its file; None where the file is missing."""
        path = Path(model.path or "")
        return model.sha256 or (read_onnx(path).sha256 if path.is_file() else None)

    def read_work(self, model: MeasuredModel) -> WorkByBatch | None:
        """Return the work of a model by batch, None where its file is gone or has changed."""
        if model.name not in self._works:
            self._works[model.name] = _read_work(model)
        return self._works[model.name]

    def bind_graph(self, model: MeasuredModel, batch: int) -> ModelGraph:
        """Return the graph of a model at its own sizes and ``batch``.

        Raises `InputError` as `gpuprof.graph.load.load_graph` does.
        """
        from gpuprof.graph.load import load_graph

        return load_graph(Path(model.path or ""), batch, dims=dict(model.sizes))

    def select_comparable(self, device: Device) -> dict[str, MeasuredModel]:
        """Return the models whose figures on ``device`` are comparable in a fit."""
        variants = {
            name: record.variants[device.name][0]
            for name, record in self.measured.items()
            if device.name in record.variants
        }
        first = next(iter(rank_variants(variants.values())), None)
        return {
            name: record
            for name, record in self.measured.items()
            if first is not None and name in variants and variants[name].is_comparable(first)
        }

    def _of_file(self, name: str, sizes: Sizes, path: Path) -> MeasuredModel:
        """Return the model of a file, with the measurements of its content, or of its copy with a free batch."""
        from gpuprof.graph.load import load_runnable, read_fixed_batch, require_sizes
        from gpuprof.runtime.free_batch import copy_with_free_batch

        path = (self._copies and copy_with_free_batch(path, self._copies)) or path
        graph = load_runnable(path, read_fixed_batch(path) or 1, dims=dict(sizes))
        weight_bytes = None if graph.unread else graph.weight_bytes
        # Hashing gigabytes takes longer than all the rest, and only serves to find measurements of the same content.
        file = MeasuredModel(name, str(path), graph.sha256 if self.measured else None, weight_bytes)
        same = {  # the measurements of the content, under the name and path of the file
            m.sizes: replace(
                m,
                name=sized_name(name, m.sizes),
                path=file.path,
                sha256=file.sha256,
                weight_bytes=weight_bytes,
                superseded=0,
            )
            for m in self.measured.values()
            if m.sha256 == file.sha256
        }
        return choose_sizes(name, same, sizes) if same else unmeasured_at(file, name, require_sizes(graph).sizes)


def _is_path(model: str) -> bool:
    return model.endswith(".onnx") or "/" in model or Path(model).is_file()


def _read_work(model: MeasuredModel) -> WorkByBatch | None:
    """Return the work of a model, None where its file is gone or has changed."""
    from gpuprof.graph.load import load_graph, read_fixed_batch

    path = Path(model.path or "")
    if not path.is_file():
        return None
    try:
        work = WorkByBatch(lambda batch: load_graph(path, batch, dims=dict(model.sizes)), read_fixed_batch(path))
    except InputError:
        return None
    return work if model.sha256 is None or model.sha256 == work.graph.sha256 else None


def require_readable(model: MeasuredModel) -> None:
    """Raise `InputError` as `gpuprof.graph.load.load_graph` does: the reason why the graph gives no estimate.

    Does nothing where the file of the model is gone, has changed, or can be read.
    """
    from gpuprof.graph.load import load_graph, read_fixed_batch

    path = Path(model.path or "")
    if path.is_file() and (model.sha256 is None or model.sha256 == read_onnx(path).sha256):
        load_graph(path, read_fixed_batch(path) or 1, dims=dict(model.sizes))


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


def _dominates(device: Device, workload: Workload, tried: Workload, run: FailedRun) -> bool:
    """Return whether ``workload`` demands at least as much as ``tried``, a part of ``run``, with no more resources."""
    if workload.batch < tried.batch or workload.processes < tried.processes:
        return False
    try:
        if device.memory_bytes(workload.share) > device.memory_bytes(tried.share):
            return False
        parts = device.fraction(workload.share), device.fraction(tried.share)
    except InputError:  # an instance unknown to the device
        return False
    return run.is_memory or parts[0] <= parts[1] * (1.0 + 1e-9)


def require_success(model: str, device: Device, failed: Sequence[FailedRun]) -> None:
    """Raise `InputError` with the last failure where all measurements on a device failed."""
    if failed:
        raise InputError(
            f"every measurement of {model} on {device.name} failed, the last: {failed[-1]}",
            "profile it again, at a smaller batch or under a larger share",
        )


def require_no_failed_group(device: Device, workload: Workload, beside: Sequence[Workload], tried: TriedRuns) -> None:
    """Raise `InputError` with the failure if these workloads demand at least as much as a group that failed together.

    Each workload of the failed group must be dominated by a workload of its own.
    """
    running = (workload, *beside)
    if not beside or not tried.failed or (device.name, tuple(sorted(running))) in tried.together:
        return
    for run in tried.failed:
        if run.device == device.name and run.beside and _holds(device, running, (run.workload, *run.beside), run):
            names = " and ".join(neighbour.model for neighbour in beside)
            raise InputError(
                f"{workload.model} at batch {workload.batch} under {workload.share} beside {names} is ruled out: {run}",
                "put them on devices of their own, or measure them again if that was an accident",
            )


def _holds(device: Device, running: Sequence[Workload], members: Sequence[Workload], run: FailedRun) -> bool:
    """Return whether each member of a failed group has a running workload of its own that dominates it."""
    if not members:
        return True
    first, *rest = members
    return any(
        workload.model == first.model
        and _dominates(device, workload, first, run)
        and _holds(device, (*running[:place], *running[place + 1 :]), rest, run)
        for place, workload in enumerate(running)
    )


_LABEL = re.compile(r"(?P<model>.+):(?P<batch>\d+):(?:(?P<mig>[^/:]+)/)?(?P<share>[0-9.e+-]+)%(?:x(?P<processes>\d+))?")


def parse_label(label: str) -> Workload:
    """Return the workload of a `gpuprof.kernel_db.schema.workload_label`. Raises `InputError` for other texts.

    Examples
    --------
    >>> workload = parse_label("bert:4:50%")
    >>> workload.model, workload.batch, workload.share.sm_pct
    ('bert', 4, 50.0)
    """
    match = _LABEL.fullmatch(label)
    if match is None:
        raise InputError(f"{label!r} does not say what ran beside", "model:batch:share%")
    share = Share(float(match["share"]), match["mig"])
    return Workload(match["model"], int(match["batch"]), share, int(match["processes"] or 1))


def read_groups(db: KernelDb, models: Mapping[str, MeasuredModel]) -> TriedRuns:
    """Return the groups of workloads that ran together, and that failed together.

    A failure is ignored if the same group ran later or in the same run. Runs of older files of ``models`` are ignored.
    """
    failed: dict[tuple[str, tuple[Workload, ...]], FailedRun] = {}
    run_ids: dict[tuple[str, tuple[Workload, ...]], str] = {}
    # Run ids begin with the time of their start.
    for row in sorted(read_records(db, ColocationRow), key=lambda row: row.run_id):
        name = model_at_dims(row.model, row.dims)
        current = None if name not in models else models[name].sha256
        if current is not None and row.model_sha256 not in (None, current):
            continue
        workload = Workload(name, row.batch, Share(row.sm_share_pct, row.mig_profile), row.processes)
        try:
            beside = tuple(parse_label(label) for label in row.beside.split(" + "))
        except InputError:  # labels of other tools, in another format
            continue
        key = (row.device, tuple(sorted((workload, *beside))))
        if row.error is None:
            run_ids[key] = row.run_id
            failed.pop(key, None)
        elif run_ids.get(key) != row.run_id:
            failed[key] = FailedRun(row.device, workload, row.error, beside)
            run_ids.pop(key, None)
    return TriedRuns(tuple(failed.values()), together=frozenset(run_ids))
