"""Turns a user's request, and the needs of interference models, into the cells of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from pathlib import Path

from gpuprof.domain.deployment import LARGEST_BATCH
from gpuprof.domain.device import Device
from gpuprof.domain.estimate import read_neighbour
from gpuprof.domain.model import ModelGraph
from gpuprof.domain.share import Share, parse_share
from gpuprof.domain.sizes import Sizes, require_dimensions
from gpuprof.errors import InputError, unknown_name
from gpuprof.graph.batch_plan import NoBatchError
from gpuprof.graph.inputs import InputData, Sample, group_by_sizes, model_inputs, random_inputs, read_input_data
from gpuprof.graph.load import load_runnable, read_fixed_batch, read_free_dims, require_sizes
from gpuprof.profiling.sweep.campaign import Cell
from gpuprof.profiling.worker.job import Job
from gpuprof.profiling.worker.process import Worker
from gpuprof.profiling.worker.tasks import WorkerSetup, compare_outputs
from gpuprof.runtime.child_process import call_apart
from gpuprof.runtime.free_batch import TOLERANCE, convert_to_float16, ensure_dynamic_batch


@dataclass(frozen=True, slots=True)
class NamedModel:
    """An ONNX file, its name, the given sizes of its free dimensions, and its inputs.

    ``batches``: the model's own batch sizes, if they differ from those of all models.
    """

    name: str
    path: Path
    sizes: Sizes = ()
    data: InputData | None = field(default=None, compare=False)
    samples: tuple[Sample, ...] = field(default=(), compare=False)
    batches: tuple[int, ...] | None = None

    def load_graph(self, batch: int) -> ModelGraph:
        """Return the model's graph at a batch size.

        Raises `InputError` as `gpuprof.graph.load.load_runnable` does.
        """
        return load_runnable(self.path, batch, self.name, dict(self.sizes))

    def job(self, batch: int, share: Share, processes: int = 1) -> Job:
        """Return the model as a job at a batch size.

        Raises `InputError` when the model cannot be read at this batch, or a dimension has neither a given nor a usual
        size.
        """
        return Job(require_sizes(self.load_graph(batch)), self.path, share, processes, self.data, self.samples)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A model to run as a neighbour.

    ``batch`` None: the job's batch; ``share`` None: an equal part of the free share.
    """

    model: NamedModel
    batch: int | None = None
    share: Share | None = None


def parse_model(text: str) -> NamedModel:
    """Read ``"path/to/model.onnx"``, named by its stem, or ``"name=path/to/model.onnx"``.

    Raises `InputError` when there is no such file.
    """
    name, separator, path = text.partition("=")
    if not separator or "/" in name or Path(text).exists():
        name, path = Path(text).stem, text
    if not name.strip():
        raise InputError(f"{text!r} gives the model no name", "write NAME=FILE, or the file alone")
    if not Path(path).is_file():
        fix = "give the path of an ONNX file; gpuprof zoo build makes some"
        raise InputError(f"there is no model file {path}", "download it first" if "://" in path else fix)
    return NamedModel(name, Path(path))


def parse_models(texts: Sequence[str]) -> tuple[NamedModel, ...]:
    """Read several models with distinct names. Raises `InputError` when two different files have the same name."""
    models = dict.fromkeys(parse_model(text) for text in texts)
    by_name: dict[str, NamedModel] = {}
    for model in models:
        namesake = by_name.setdefault(model.name, model)
        if namesake.path != model.path:
            raise InputError(
                f"{namesake.path} and {model.path} are both called {model.name}", f"name one: other={model.path}"
            )
    return tuple(models)


def convert_models(models: Sequence[NamedModel], directory: Path, provider: str) -> tuple[NamedModel, ...]:
    """Return copies of the models in float16, compared with the originals on ``provider``.

    A CPU computes in float32, so that only a GPU shows whether values overflow. Raises `InputError` when a model cannot
    be converted, or its outputs differ.
    """
    copies = []
    with Worker(WorkerSetup(provider=provider), "float16") as worker:
        for model in models:
            path, feeds = convert_to_float16(model.path, directory), random_inputs(model.load_graph(1))
            tolerance = TOLERANCE["float16"]
            if difference := worker.call(compare_outputs, model.path, path, feeds, tolerance):
                raise InputError(f"{model.name} cannot be run in float16: {difference}", "leave out --precision")
            copies.append(replace(model, name=f"{model.name}-float16", path=path))
    return tuple(copies)


def size_models(models: Sequence[NamedModel], sweep: Sequence[Sizes]) -> list[NamedModel]:
    """Return each model at every combination of sizes of its own free dimensions.

    Raises `InputError` when a model cannot be read, or no model has a given dimension.
    """
    free = {model: {dim.name for dim in read_free_dims(model.path)} for model in models}
    require_dimensions((name for name, _ in sweep[0]), free.values())
    return [
        replace(model, sizes=sizes)
        for model, dims in free.items()
        for sizes in dict.fromkeys(tuple(pair for pair in sizes if pair[0] in dims) for sizes in sweep)
    ]


def attach_data(models: Sequence[NamedModel], files: Mapping[str, Path]) -> list[NamedModel]:
    """Return the models with inputs from files, each at the sizes of its inputs.

    Raises `InputError` when a file does not fit its model, or names no model. ``files``: by the models' names;
    ``""``: for all models not named.
    """
    if unknown := [name for name in files if name and name not in {model.name for model in models}]:
        raise unknown_name("model", unknown[0], [model.name for model in models])
    named_models = []
    for model in models:
        file = files.get(model.name, files.get(""))
        if file is None:
            named_models.append(model)
            continue
        data = read_input_data(file, model_inputs(model.path))
        for sizes, samples in group_by_sizes(data, model.path).items():
            data_sizes = dict(sizes)
            if wrong := [f"{name}={size}" for name, size in model.sizes if data_sizes.get(name, size) != size]:
                continue
            named_models.append(replace(model, sizes=sizes, data=data, samples=samples))
        if not any(m.data is data for m in named_models):
            raise InputError(
                f"{file} holds no sample with {', '.join(wrong)}", "leave out --dim, or give other samples"
            )
    return list({(m.name, m.path, m.sizes): m for m in named_models}.values())


def free_batch_model(model: NamedModel, batches: Sequence[int], directory: Path) -> NamedModel:
    """Return ``model`` or, if its file fixes another batch, a verified copy that takes any batch.

    ``directory``: parent of the copies. Raises `InputError` when the model cannot be read, or its batch cannot be
    freed, naming the node.
    """
    try:
        for batch in batches:
            model.load_graph(batch)
    except InputError:
        only = read_fixed_batch(model.path) or 1
        model.load_graph(only)  # an error at the model's own batch is reported as such
        try:
            return replace(model, path=call_apart(ensure_dynamic_batch, model.path, directory))
        except InputError as error:
            fix = f"export the model with a dynamic batch, or measure it at the one that it has: --batch {only}"
            if isinstance(error, NoBatchError):
                fix = "measure it at batch 1: --batch 1"
            raise InputError(error.message, fix) from error
    return model


def free_batch_or_keep(model: NamedModel, batches: Sequence[int], directory: Path) -> tuple[NamedModel, str | None]:
    """Return ``model`` as `free_batch_model` does or, if its batch cannot be freed, with its fixed batch alone.

    The text is the reason for the restriction. Raises `InputError` when the model cannot be read.
    """
    try:
        return free_batch_model(model, batches, directory), None
    except InputError as error:
        only = read_fixed_batch(model.path) or 1
        model.load_graph(only)
        why = f"{model.name} is measured at batch {only} alone: {error.message}"
        return replace(model, batches=(only,)), why


def parse_shares(text: str | None, device: Device) -> tuple[Share, ...]:
    """Read ``"50,100"`` or ``"1core,2cores"``; None: of a CPU 1, 2, 4, … and all cores, of a GPU the whole.

    Raises `InputError` as `gpuprof.domain.share.parse_share` does.
    """
    if text is not None:
        return tuple(sorted({parse_share(word, device.compute_units) for word in text.split(",")}))
    if device.kind != "cpu":
        return (Share(),)
    units = device.compute_units
    powers = {1 << exponent for exponent in range(units.bit_length())}
    return tuple(Share(100.0 * cores / units) for cores in sorted(core for core in powers | {units} if core <= units))


def parse_neighbour(text: str, device: Device) -> Neighbour:
    """Return the file that `gpuprof.domain.estimate.read_neighbour` reads from a text, with its batch and share.

    Raises `InputError` when the file, the batch or the share is wrong.
    """
    model, batch, share = read_neighbour(text, device)
    if batch is not None and not 1 <= batch <= LARGEST_BATCH:
        raise InputError(f"a batch size must be a whole number from 1 to {LARGEST_BATCH} but got {batch}")
    return Neighbour(parse_model(model), batch, share)


def plan_cells(
    models: Sequence[NamedModel],
    batches: Sequence[int],
    shares: Sequence[Share],
    processes: Sequence[int] = (1,),
    neighbours: Sequence[Neighbour] = (),
) -> tuple[Cell, ...]:
    """Return a cell for each model, share, batch and number of processes, alone and with the neighbours.

    All workloads, neighbours included, are measured alone first: a slowdown compares both. Raises `InputError`
    when a model cannot be read or bound to a batch, or the neighbours leave no room.
    """
    cells: list[Cell] = []
    for model in models:
        for share in shares:
            for batch in model.batches or batches:
                for count in processes:
                    job = model.job(batch, share, count)
                    cells.append(Cell(job))
                    if neighbours:
                        beside = tuple(_beside(job, neighbours))
                        cells += [*map(Cell, beside), Cell(job, beside)]
    return tuple({_identity(cell): cell for cell in cells}.values())


def _identity(cell: Cell) -> tuple[object, ...]:
    """Return a key of the cell that is quicker to compare than graphs of thousands of ops."""
    return tuple((job.path, job.workload) for job in (cell.job, *cell.beside))


def _beside(job: Job, neighbours: Sequence[Neighbour]) -> Iterator[Job]:
    total_pct = job.share.sm_pct + sum(each.share.sm_pct for each in neighbours if each.share)
    open_shares = sum(each.share is None for each in neighbours)
    free_pct = 100.0 - total_pct
    if free_pct < -1e-6 or (open_shares and free_pct <= 0):
        raise InputError(
            f"shares of {total_pct:g}% leave no room for what is to run beside {job.graph.name}",
            "give smaller shares, with --share and MODEL:batch:share",
        )
    for each in neighbours:
        share = each.share or Share(free_pct / open_shares)
        yield each.model.job(each.batch or job.graph.batch, share)


#: Batches of both sides of a pair.
COLOCATED_BATCHES = (1, 8)


def colocation_cells(models: Sequence[NamedModel]) -> tuple[Cell, ...]:
    """Return each workload alone, every pair of models at each batch, and groups of three and four at the first batch.

    Raises `InputError` when a model cannot be bound to a batch size.
    """
    together = [
        tuple(_colocated_job(model, batch, 2) for model in pair)
        for batch in COLOCATED_BATCHES
        for pair in combinations_with_replacement(models, 2)
    ]
    for crowd in (3, 4):  # of neighbours in the given order
        ring = [*models] * crowd
        together += [
            tuple(_colocated_job(model, COLOCATED_BATCHES[0], crowd) for model in ring[start : start + crowd])
            for start in range(len(models))
        ]
    alone = {(job.graph.sized_name, job.graph.batch, job.share): job for jobs in together for job in jobs}
    return (*map(Cell, alone.values()), *(Cell(jobs[0], jobs[1:]) for jobs in together))


def _colocated_job(model: NamedModel, batch: int, parts: int) -> Job:
    return model.job(batch, Share(100.0 / parts))


#: Batch and share in percent of iGniter's eleven configurations (section 3.1). The paper does not name them: the first
#: nine are those of its published profiles; the others are an intermediate batch, and a share of which five copies fit.
CONFIGURATIONS = (*((batch, share) for batch in (1, 16, 32) for share in (10.0, 50.0, 100.0)), (8, 50.0), (16, 20.0))
#: Concurrent copies of the last configuration: for the coefficients of power, scheduling and cache.
IGNITER_COPIES = range(2, 6)


def igniter_cells(model: NamedModel) -> tuple[Cell, ...]:
    """Return iGniter's configurations alone, then two to five copies at once.

    Raises `InputError` when the model cannot be bound to a batch size.
    """
    alone = [Cell(model.job(batch, Share(share))) for batch, share in CONFIGURATIONS]
    job = alone[-1].job
    return (*alone, *(Cell(job, (job,) * (copies - 1)) for copies in IGNITER_COPIES))
