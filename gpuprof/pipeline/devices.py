"""Device and database of a verb."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.errors import GpuprofError, InputError, UnavailableError, unknown_name
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.result import NoteCallback, say_nothing

if TYPE_CHECKING:
    from gpuprof.domain.device import Device
    from gpuprof.domain.estimate import Estimator
    from gpuprof.estimators.cross_gpu.kernels import Execution
    from gpuprof.estimators.database import DatabaseEstimator
    from gpuprof.estimators.learned.learned import LearnedModel
    from gpuprof.kernel_db.store import KernelDb

_DEFAULT_DATABASE = "gpuprof-db"


def resolve_device(
    name: str | None,
    db: KernelDb | None,
    own_devices: Mapping[str, Device] | None = None,
    note: NoteCallback = say_nothing,
) -> Device:
    """Return the device called ``name``, with the rates measured in ``db``.

    Raises `InputError` for an unknown device, or a device without known peak rates. ``name``: a name of the catalogue,
    in common or driver spelling, of ``own_devices``, of the database, of a GPU of this machine, or ``"cpu"`` for its
    CPU; None: the device with most measurements in the database, or this machine's CPU when there are none; ``note``:
    called with the chosen board where the name is ambiguous, and where ONNX Runtime here has no code for it.
    """
    from gpuprof.domain.catalogue import devices
    from gpuprof.estimators.ceilings import profiled_devices, recorded_device, with_ceilings
    from gpuprof.machine.cpu import local_cpu
    from gpuprof.machine.gpu import local_gpus
    from gpuprof.runtime.providers import describe_missing_code

    if name is not None and not name.strip():  # an empty shell variable gives such a name
        raise InputError("the name of the device is empty", "leave --device out for the default, or name one")
    profiled = profiled_devices(db) if db is not None else ()
    key = (name or (profiled[0] if profiled else "cpu")).lower()
    here = local_cpu()
    if key in ("cpu", here.name):
        return with_ceilings(here, db)
    catalogue = {**devices(), **(own_devices or {})}
    # The catalogue before the database: a measured device has its measured rates all the same (`with_ceilings`).
    if key in catalogue:
        if (remark := describe_missing_code(catalogue[key])) is not None:
            note(remark)
        return with_ceilings(catalogue[key], db)
    recorded = recorded_device(key, db) if db is not None else None
    if recorded is None:  # a GPU of this machine missing in the catalogue
        recorded = next((with_ceilings(gpu, db) for gpu in local_gpus() if gpu.name == key), None)
    if recorded is None and key in profiled:
        raise InputError(
            f"{key!r} was profiled, but its peak rates are not known, neither to the catalogue nor to the database",
            "measure them on its machine: python -m bench.gpu.ceilings --db DATABASE",
        )
    if recorded is not None:
        return recorded
    if board := _board_meant(name or key, note):
        return with_ceilings(board, db)
    error = unknown_name("device", key, sorted({"cpu", *catalogue, *profiled}))
    raise InputError(error.message, f"{error.fix}; a GPU that gpuprof does not know: --device-file FILE")


def _board_meant(name: str, note: NoteCallback) -> Device | None:
    """Return the board of the catalogue with this name; if several match, the first, with a note."""
    from gpuprof.domain.catalogue import device_of_driver, devices, matching_names

    device = device_of_driver(name)
    if device is not None:
        return device
    names = matching_names(name)
    if len(names) > 1:
        note(f"{name} is taken for {names[0]}; it may also mean {', '.join(names[1:])}")
    return devices()[names[0]] if names else None


def read_own_devices(path: PathArgument | None) -> Mapping[str, Device]:
    """Return the devices of the file ``--device-file``; none without a file.

    Raises `InputError` when the file is wrong.
    """
    if path is None:
        return {}
    from gpuprof.domain.catalogue import read_device_file

    return read_device_file(Path(path))


def database_path(path: PathArgument | None) -> Path:
    """Return where the kernel database is: as given, else ``GPUPROF_DB``, else ``./gpuprof-db``."""
    return Path(path or os.environ.get("GPUPROF_DB") or _DEFAULT_DATABASE)


def open_database(db: PathArgument | None, *, needed: bool = True) -> KernelDb | None:
    """Open the kernel database.

    Raises `InputError` when the database does not exist although it is needed or was named, or the directory holds no
    database. ``db``: the option ``--db``; ``needed``: False returns None where the default database does not exist.
    """
    path = database_path(db)
    if not needed and db is None and not path.exists():
        return None
    return open_existing(path)


def open_existing(path: Path) -> KernelDb:
    """Open a database. Raises `InputError` when there is none, as in a directory with only foreign files."""
    from gpuprof.kernel_db.store import KernelDb

    database = KernelDb(path)
    files = [path for path in database.path.iterdir() if path.is_file() and not path.name.startswith(".")]
    if files and not database.segments():
        raise InputError(
            f"{database.path} is no kernel database: it holds {min(files).name} and no run",
            "give with --db the directory that gpuprof profile wrote",
        )
    return database


def describe_empty(path: PathArgument | None, database: KernelDb | None) -> list[str]:
    """Return a remark on a named but empty database, in case the user meant another."""
    if path is None or database is None or database.segments():
        return []
    return [f"the kernel database {database.path} is empty: nothing in it was measured (is another meant with --db?)"]


def make_database_estimator(
    db: KernelDb | None,
    graphs: Mapping[str, Path] | None = None,
    note: NoteCallback = say_nothing,
    execution: Execution | None = None,
    *,
    alone: bool = False,
) -> DatabaseEstimator:
    """Return the default estimator: the database, the regressors trained on it, and ONNX files.

    ``graphs``: ONNX files of models that the database may lack; ``note``: called with the reason why regressors are
    left out, on their first use; ``execution``: precision and runtime of models on GPUs without measurements;
    ``alone``: whether predicted shares have an idle board to themselves.
    """
    from gpuprof.estimators.database import DatabaseEstimator

    return DatabaseEstimator(db, graphs, lambda device: load_regressors(device, db, note), execution, alone=alone)


def make_named_estimator(
    source: str | Estimator,
    db: KernelDb | None,
    graphs: Mapping[str, Path] | None = None,
    note: NoteCallback = say_nothing,
    execution: Execution | None = None,
    *,
    alone: bool = False,
) -> Estimator:
    """Return an estimator given by its name or as an object; the default one includes the trained regressors.

    Raises `InputError` for an unknown name, or a database without the data that the estimator needs.
    """
    from gpuprof.estimators.builtin import DEFAULT, make_estimator

    if source == DEFAULT:
        return make_database_estimator(db, graphs, note, execution, alone=alone)
    return make_estimator(source, db, graphs)


def describe_choice(estimator: object, models: Iterable[str], devices: Iterable[str]) -> list[str]:
    """Return a note for each model with several measured files, or execution variants on a device: the one in use."""
    from gpuprof.estimators.database import DatabaseEstimator

    if not isinstance(estimator, DatabaseEstimator):
        return []
    notes, names = [], list(models)
    for model in names:
        if older := estimator.known.find_model(model).superseded:
            notes.append(
                f"{older + 1} different files were measured as {model}: the last one counts (measure each "
                "under a name of its own: NAME=FILE)"
            )
    for device, model in product(dict.fromkeys(devices), names):
        if len(variants := estimator.known.find_model(model).variants.get(device, ())) > 1:
            ways = " and by ".join(map(str, variants))
            notes.append(f"{model} was measured on {device} by {ways}: figures are of {variants[0]} alone")
    return notes


def load_regressors(device: Device, db: KernelDb | None, note: NoteCallback = say_nothing) -> LearnedModel | None:
    """Return the regressors trained for ``device``; None where absent or, with a note, out of date."""
    if db is None or not (db.path / ".trained" / device.name).is_dir():
        return None
    from gpuprof.estimators.learned.learned import load_model

    try:
        return load_model(db.path, device)
    except GpuprofError as error:
        note(f"{error}; the roofline is used instead")
        return None


def resolve_local_device(name: str | None, collector: str, note: NoteCallback = say_nothing) -> Device:
    """Return this machine's device: ``"cpu"``, ``"gpu"``, or a device's name; None: the first GPU, else the CPU.

    Raises `InputError` when this machine has no device of this name; `UnavailableError` when a GPU was requested and
    there is none. ``collector``: which must be able to measure the GPU; ``note``: called with the reason why the GPU
    was not used.
    """
    from gpuprof.machine.cpu import local_cpu
    from gpuprof.machine.gpu import local_gpus
    from gpuprof.profiling.collector import choose_collector

    cpu = local_cpu()
    if name in ("cpu", cpu.name):
        return cpu
    gpus = local_gpus()
    if name is None:
        if not gpus:
            return cpu
        try:
            choose_collector(collector, "gpu")
        except UnavailableError as error:
            note(f"{gpus[0].name} is not measured: {error.message}")
            return cpu
        return gpus[0]
    if not gpus:
        raise UnavailableError(f"this machine has no GPU that gpuprof can describe, asked for {name!r}", "--device cpu")
    if name == "gpu":
        return gpus[0]
    for gpu in gpus:
        if gpu.name == name:
            return gpu
    raise unknown_name("device of this machine", name, ["cpu", "gpu", *(gpu.name for gpu in gpus)])
