"""Training of the regressors that estimate unprofiled models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprof.domain.plural import count_of
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.devices import database_path, open_database, resolve_device
from gpuprof.pipeline.result import Progress, ProgressCallback, Result, say_nothing

if TYPE_CHECKING:
    from gpuprof.estimators.learned.training_set import TrainingSet

#: Constituents of the stack; ``"lightgbm"`` may be added.
DEFAULT_REGRESSORS = ("lasso", "kernel_ridge", "gradient_boosting", "xgboost")


@dataclass(frozen=True, kw_only=True)
class TrainResult(Result):
    """The training set and the errors of fitted regressors.

    Attributes
    ----------
    device : str
    architectures, ops, points : int
        Networks, distinct ops, and models at a batch size, in the training set.
    latency_factor, memory_factor : float or None
        90% of left-out figures are within this factor of the prediction; None: too few architectures to say.
    data_hash : str
        Hash of the training set.
    folder : Path
        Folder of the regressors.
    """

    device: str
    architectures: int
    ops: int
    points: int
    latency_factor: float | None
    memory_factor: float | None
    data_hash: str
    folder: Path

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a single row."""
        names = ("device", "architectures", "ops", "points", "latency_factor", "memory_factor", "data_hash")
        return [{name: getattr(self, name) for name in names}]


def train(
    *,
    device: str | None = None,
    regressors: Sequence[str] = DEFAULT_REGRESSORS,
    db: PathArgument | None = None,
    progress: ProgressCallback = say_nothing,
) -> TrainResult:
    """Fit regressors to the measured ops and models of a device; `gpuprof.estimate` uses them from then on.

    Parameters
    ----------
    device : str, optional
        A profiled device; by default the device with most measurements.
    regressors : sequence of str
        Constituents of the stack: ``"lasso"``, ``"kernel_ridge"``, ``"gradient_boosting"``, ``"xgboost"``,
        ``"lightgbm"``.
    db : path, optional
        Kernel database; by default ``GPUPROF_DB``, else ``./gpuprof-db``.
    progress : callable, optional

    Raises
    ------
    InputError
        When there is no database, its data are too few to learn from, or a regressor is unknown.

    Examples
    --------
    Networks drawn at random are small, so that measuring and fitting take seconds:

    >>> import tempfile
    >>> from pathlib import Path
    >>> import gpuprof
    >>> folder = Path(tempfile.mkdtemp())
    >>> files = [gpuprof.build_model("random_mlp", folder / f"mlp{seed}.onnx", seed=seed) for seed in range(3)]
    >>> quick = gpuprof.ProfileSettings(time_limit_s=0.2)
    >>> measured = gpuprof.profile(files, batches=(1,), shares=("100",), device="cpu", db=folder / "db", settings=quick)
    >>> fitted = gpuprof.train(regressors=("lasso",), db=folder / "db")
    >>> fitted.architectures, fitted.folder.is_dir()
    (3, True)
    """
    from gpuprof.estimators.conformal import interval_factor
    from gpuprof.estimators.learned.learned import fit_with_intervals
    from gpuprof.estimators.learned.regressors import make_constituents
    from gpuprof.estimators.learned.store import save_model

    names = [regressors] if isinstance(regressors, str) else list(regressors)
    make_constituents(names)  # reject an unknown name before any data is read
    progress(Progress("reading what was measured", 0, 1))
    data = load_training_data(db, device)
    what = f"fitting to {len(data.ops.times_ns):,} ops of {count_of(len(data.architectures), 'architecture')}"
    model = fit_with_intervals(data, names, lambda done, total: progress(Progress(what, done, total)))
    folder = save_model(model, database_path(db), data.data_hash, data.architectures)
    residuals = model.residuals
    return TrainResult(
        notes=(f"wrote {folder}",),
        device=data.device.name,
        architectures=len(data.architectures),
        ops=len(data.ops.times_ns),
        points=len(data.cases),
        latency_factor=interval_factor(residuals.latency) if residuals else None,
        memory_factor=interval_factor(residuals.memory) if residuals else None,
        data_hash=data.data_hash,
        folder=folder,
    )


def load_training_data(db: PathArgument | None, device: str | None) -> TrainingSet:
    """Return the measurements on ``device``, by default on the device with most measurements.

    Raises `InputError` when there is no database, or its data are too few.
    """
    from gpuprof.estimators.learned.training_set import database_graphs, load_training_set

    database = open_database(db)
    assert database is not None
    return load_training_set(database, resolve_device(device, database), database_graphs(database))
