"""``gpuprof profile --engine ray``: the sweep of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpuprof.cli.output import Column, Format, number, print_rows, progress, say
from gpuprof.errors import UnstableError

_COLUMNS = (
    Column("model", "model", right=False),
    Column("batch", "batch"),
    Column("share", "share"),
    Column("processes", "processes"),
    Column("device", "device", right=False),
    Column("latency_p50_ms", "p50 ms", number()),
    Column("latency_p99_ms", "p99 ms", number()),
    Column("stable", "stable", lambda stable: "yes" if stable else "no", right=False),
)


def sweep_cluster(
    models: Sequence[str],
    batch: str,
    options: Sequence[str],
    where: tuple[Path, str | None, str],
    chosen: Format,
) -> None:
    """Measure models at batch sizes on the places of a Ray cluster.

    Parameters
    ----------
    models, batch : as ``gpuprof profile`` takes them
    options : sequence of str
        Its further options, for each place.
    where : tuple of Path, str or None, str
        Database, wanted device, address of the cluster.
    chosen : Format

    Raises
    ------
    GpuprofError
        When a model is not there, or something could not be measured or cannot be trusted.
    """
    from gpuprof.domain.share import Share
    from gpuprof.kernel_db.store import KernelDb
    from gpuprof.profiling.sweep.planning import parse_batches, parse_models
    from gpuprof.profiling.sweep.ray_sweep import RaySweep, task_of

    database, device, address = where
    tasks = [
        task_of(model.name, model.path, size, options)
        for model in parse_models(models)
        for size in parse_batches(batch)
    ]
    sweep = RaySweep(KernelDb.create(database), address)
    rows = []
    try:
        with progress() as bar:
            bar.add_task(f"{len(tasks)} models and batches", total=None)
            for row in sweep.run(tasks, device, say):
                rows.append({**row, "share": str(Share(row["sm_share_pct"], row["mig_profile"]))})
    finally:
        sweep.close()
        if rows:
            print_rows(rows, _COLUMNS, chosen)
    if not rows:
        say("everything was measured before; --force measures it again")
    if shaky := [row for row in rows if row["stable"] is False]:
        raise UnstableError(
            f"{len(shaky)} of {len(rows)} are unstable: the machines are too noisy", "measure them again"
        )
