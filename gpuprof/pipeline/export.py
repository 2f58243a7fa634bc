"""``export``: a deployment map for mig-parted, Triton or Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuprof.errors import InputError
from gpuprof.pipeline.arguments import MapArgument, PathArgument, map_folder, map_label, resolve_map
from gpuprof.pipeline.recorded_problem import collect_map_evidence
from gpuprof.pipeline.result import NoteCallback, NoteList, Result, ignore_note
from gpuprof.placement.export import export as export_map
from gpuprof.placement.feasibility import check_layout


@dataclass(frozen=True, kw_only=True)
class MapExportResult(Result):
    """The files of another tool, by their path below the folder that they are written to."""

    files: Mapping[str, str]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a record for each file: its path and what stands in it."""
        return [{"path": path, "content": content} for path, content in self.files.items()]

    def write(self, folder: PathArgument) -> None:
        """Write the files below ``folder``.

        Raises
        ------
        InputError
            When it cannot be written to.
        """
        try:
            for name, content in self.files.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {folder}: {error.strerror or error}") from None


def export(
    deployment: MapArgument = Path("map.json"),
    to: str = "mig-parted",
    *,
    image: str | None = None,
    note: NoteCallback = ignore_note,
) -> MapExportResult:
    """Return a map as the files of another tool.

    Parameters
    ----------
    deployment : path or DeploymentMap
    to : str
        ``"json"``, ``"mig-parted"``, ``"triton"`` or ``"k8s"``.
    image : str, optional
        Container image of the Kubernetes manifest.
    note : callable, optional
        Told each remark as soon as it is known.

    Raises
    ------
    InputError
        When no machine could be set up so, or the format is unknown or cannot say what the map does.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import gpuprof
    >>> file = gpuprof.build_model("mlp", Path(tempfile.mkdtemp()) / "mlp.onnx")
    >>> demand = gpuprof.Demand(str(file), rate_rps=200.0, slo=gpuprof.Slo(20.0))
    >>> plan = gpuprof.place([demand], fleet="a100-40")
    >>> print(gpuprof.export(plan.deployment, "mig-parted").files["mig-parted.yaml"].splitlines()[0])
    version: v1
    """
    notes, found = NoteList(note), resolve_map(deployment)
    broken = check_layout(found, collect_map_evidence(found, None, None, map_folder(deployment), notes.add))
    if broken:
        label = map_label(deployment)
        raise InputError(f"{label} cannot be set up: {broken[0]}", f"gpuprof check {label} says everything")
    return MapExportResult(notes=notes.all(), files=export_map(found, to, image))
