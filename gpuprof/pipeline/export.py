"""``export``: a deployment map for mig-parted, MPS, Triton, Kubernetes, KServe or Ray Serve."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.domain.deployment import DeploymentMap
from gpuprof.domain.map_sources import describe_basis, describe_unshared
from gpuprof.errors import InputError, refuse_unwritable
from gpuprof.export.targets import export as export_map
from gpuprof.pipeline.arguments import (
    MapArgument,
    PathArgument,
    locate_files,
    map_folder,
    map_label,
    require_planned_files,
    resolve_map,
)
from gpuprof.pipeline.recorded_problem import collect_map_evidence
from gpuprof.pipeline.result import NoteCallback, NoteList, Result, say_nothing
from gpuprof.placement.feasibility import check_layout


@dataclass(frozen=True, kw_only=True)
class MapExportResult(Result):
    """The files for another tool, by their path below the output folder.

    Attributes
    ----------
    files : mapping of str to str
        Texts.
    models : mapping of str to Path
        Paths of the model files, which `write` links.
    target : str
        Name of the tool.
    """

    files: Mapping[str, str]
    models: Mapping[str, Path]
    target: str = ""

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each file: its path and text."""
        return [{"path": path, "content": content} for path, content in self.files.items()]

    def write(self, folder: PathArgument) -> None:
        """Write the files below ``folder``; make hard links to the model files, or copies on another file system.

        Raises `InputError` when the folder cannot be written.
        """
        with refuse_unwritable(folder):
            for name, content in self.files.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
            for name, source in self.models.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                # The old file is removed first: writing through a hard link would change the link's source.
                path.unlink(missing_ok=True)
                try:
                    path.hardlink_to(source.resolve())
                except OSError:
                    shutil.copyfile(source.resolve(), path)


def _pick_target(deployment: DeploymentMap) -> str:
    is_cut = any(partition.mig is not None for _, _, partition, _ in deployment.places())
    return "mig-parted" if is_cut else "triton"


def export(
    deployment: MapArgument = Path("map.json"),
    to: str | None = None,
    *,
    image: str | None = None,
    allow_changed: bool = False,
    note: NoteCallback = say_nothing,
) -> MapExportResult:
    """Convert a map to the files of another tool.

    Raises `InputError` when no machine can be configured as the map requires, the format is unknown or cannot express
    the map, or a model file to write changed since the map was planned.

    Parameters
    ----------
    to : str, optional
        ``"json"``, ``"mig-parted"``, ``"mps"``, ``"triton"``, ``"k8s"``, ``"k8s-dra"``, ``"k8s-kai"``,
        ``"k8s-hami"``, ``"kserve"``, ``"ray-serve"`` or ``"envoy"``; by default ``"mig-parted"`` for a map with MIG
        instances, else ``"triton"``.
    image : str, optional
        Container image with gpuprof, for the manifests of Kubernetes and KServe.
    allow_changed : bool
        Accept model files that changed since the map was planned.

    Examples
    --------
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(20.0))
    >>> plan = gpuprof.place([demand], fleet="a100-40")
    >>> print(gpuprof.export(plan.deployment, "mig-parted").files["mig-parted.yaml"].splitlines()[0])
    version: v1
    """
    notes, resolved = NoteList(note), resolve_map(deployment)
    to = to or _pick_target(resolved)
    broken = check_layout(resolved, collect_map_evidence(resolved, map_folder(deployment), note=notes.add))
    if broken:
        label = map_label(deployment)
        raise InputError(f"{label} cannot be set up: {broken[0]}", f"gpuprof check {label} says everything")
    bundle = export_map(resolved, to, image, map_folder(deployment))
    if bundle.models and not allow_changed:
        require_planned_files(locate_files(resolved, map_folder(deployment)))
    notes.add(*bundle.notes)
    if to not in ("json", "mig-parted", "mps") and (unshared := describe_unshared(resolved)):
        notes.add(f"{unshared[0].lower()}{unshared[1:]}, and nothing makes batches take turns: they run at once")
    if basis := describe_basis(resolved):
        notes.add(basis)
    return MapExportResult(notes=notes.all(), files=bundle.files, models=bundle.models, target=to)
