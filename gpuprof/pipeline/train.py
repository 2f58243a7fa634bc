"""Training of the regressors that estimate unprofiled models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpuprof.domain.plural import count_of
from gpuprof.pipeline.devices import database_path, open_database, resolve_device
from gpuprof.pipeline.result import Progress, ProgressCallback, Result, say_nothing
from gpuprof.pipeline.settings import Names, Settings, option

if TYPE_CHECKING:
    from gpuprof.estimators.learned.training_set import TrainingSet


class TrainOptions(Settings):
    """Training data, and regressors to stack."""

    title: ClassVar[str] = "Data and regressors"

    device: str | None = option(None, "Device that was profiled; default: the one with most data.", values="devices")
    regressors: Names = option(
        ("lasso", "kernel_ridge", "gradient_boosting", "xgboost"),
        "Regressors to stack, separated by commas; lightgbm may be added.",
    )
    db: Path | None = option(None, "Kernel database; default: GPUPROF_DB, or gpuprof-db.")


@dataclass(frozen=True, kw_only=True)
class TrainResult(Result):
    """The training set and the errors of fitted regressors.

    Attributes
    ----------
    device : str
    architectures, ops, points : int
        Networks, distinct ops, and models at a batch size, in the training set.
    latency_factor, memory_factor, creq_factor : float or None
        90% of left-out figures are within this factor of the prediction; None: too few architectures to say. Creq is
        judged by the metric with the largest factor.
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
    creq_factor: float | None
    data_hash: str
    folder: Path

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a single row."""
        factors = ("latency_factor", "memory_factor", "creq_factor")
        names = ("device", "architectures", "ops", "points", *factors, "data_hash")
        return [{name: getattr(self, name) for name in names}]


def train(
    options: TrainOptions | None = None, *, progress: ProgressCallback = say_nothing, **fields: Any
) -> TrainResult:
    """Fit regressors to the measured ops and models of a device; `gpuprof.estimate` uses them from then on.

    Parameters
    ----------
    options : TrainOptions, optional
        Fields may be given as keywords instead.
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
    from gpuprof.estimators.learned.learned import fit_with_intervals, save_model
    from gpuprof.estimators.learned.regressors import MREQ, make_constituents

    chosen = TrainOptions.collect(options, fields)
    names = list(chosen.regressors)
    make_constituents(names)  # reject an unknown name before any data is read
    progress(Progress("reading what was measured", 0, 1))
    data = load_training_data(chosen)
    ops = 0 if data.ops is None else len(data.ops.times_ns)
    what = f"fitting to {ops:,} ops of {count_of(len(data.architectures), 'architecture')}"
    model = fit_with_intervals(data, names, lambda count, total: progress(Progress(what, count, total)))
    folder = save_model(model, database_path(chosen.db), data.data_hash, data.architectures)
    factors = {quantity: interval_factor(errors) for quantity, errors in model.residuals.items()}
    creq = [factor for quantity, factor in factors.items() if factor and quantity not in ("latency", MREQ)]
    return TrainResult(
        notes=(f"wrote {folder}",),
        device=data.device.name,
        architectures=len(data.architectures),
        ops=ops,
        points=len(data.cases),
        latency_factor=factors.get("latency"),
        memory_factor=factors.get(MREQ),
        creq_factor=max(creq, default=None),
        data_hash=data.data_hash,
        folder=folder,
    )


def load_training_data(options: TrainOptions) -> TrainingSet:
    """Return the measurements on a device. Raises `InputError` when there is no database, or its data are too few."""
    from gpuprof.estimators.learned.training_set import database_graphs, load_training_set

    database = open_database(options.db)
    assert database is not None
    return load_training_set(database, resolve_device(options.device, database), database_graphs(database))
