"""Builds standard networks as ONNX files with random weights, and changes the batch of any network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpuprof.domain.plural import count_of
from gpuprof.domain.validation import Seed
from gpuprof.pipeline.arguments import PathArgument
from gpuprof.pipeline.result import Result
from gpuprof.pipeline.settings import Batch
from gpuprof.runtime.free_batch import is_dynamic, rebatch
from gpuprof.zoo.architecture import ARCHITECTURES, ZooArchitecture, find_architecture
from gpuprof.zoo.build import build


@dataclass(frozen=True, kw_only=True)
class ZooResult(Result):
    """The networks of the zoo."""

    architectures: tuple[ZooArchitecture, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """Return a row for each network."""
        return [{**asdict(network), "needs": network.needs} for network in self.architectures]


def list_models() -> ZooResult:
    """Return the networks that `gpuprof.build_model` builds.

    Examples
    --------
    >>> import gpuprof
    >>> "resnet50" in set(gpuprof.list_models().to_frame()["name"])
    True
    """
    return ZooResult(architectures=tuple(ARCHITECTURES.values()))


def build_model(name: str, output: PathArgument | None = None, *, batch: Batch | None = None, seed: Seed = 0) -> Path:
    """Build a network of the zoo as an ONNX file with random weights, offline; return the file.

    Raises `InputError` when there is no network of this name, or the file cannot be written; `UnavailableError` when
    the exporting library is not installed.

    Parameters
    ----------
    name : str
        As `gpuprof.list_models` names it.
    output : path, optional
        File to write; by default ``NAME.onnx``.
    batch : int, optional
        Fixed batch; by default free.
    seed : int
        Seed of the random weights, and of the layers of networks named random.

    Examples
    --------
    >>> import gpuprof
    >>> gpuprof.build_model("mlp", "mlp.onnx").name
    'mlp.onnx'
    """
    architecture = find_architecture(name)
    return build(architecture, Path(output or f"{architecture.name}.onnx"), batch, seed)


def rebatch_model(model: PathArgument, output: PathArgument, *, batch: int | None = None) -> str:
    """Change a model's fixed batch, and prove equal outputs by running both models; return a remark for people.

    Raises `InputError` when the model cannot be read or changed, naming the node, or the results differ. ``batch``: new
    fixed batch; by default free.

    Examples
    --------
    >>> import gpuprof
    >>> from gpuprof.pipeline.zoo import rebatch_model
    >>> file = gpuprof.build_model("mlp", "mlp.onnx", batch=4)
    >>> "its batch was 4" in rebatch_model(file, "free.onnx")
    True
    """
    free = is_dynamic(Path(model))
    changed = rebatch(Path(model), Path(output), batch)
    before = "its batch was free already" if free else f"its batch was {changed.batch}"
    # The proof runs for a model with a fixed batch, and for a model with changed nodes.
    is_proven = bool(changed.nodes) or not free
    info = [before] + [f"it is {batch} now"] * (batch is not None) + [f"{count_of(len(changed.nodes), 'node')} changed"]
    info += [f"same outputs at batches {changed.batch} and more"] * is_proven
    return f"wrote {output}: {', '.join(info)}"
