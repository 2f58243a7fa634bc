"""A merged model: one ONNX file that computes several models, and which inputs and outputs belong to which.

The description stands in the file's own metadata, so that a merged file can be run without other files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprof.errors import InputError, unknown_name

if TYPE_CHECKING:
    import numpy.typing as npt
    from onnx import ModelProto

    Array = npt.NDArray[Any]

#: Key of the description in the metadata of an ONNX file, and its version.
METADATA_KEY = "gpuprof.merged"
SCHEMA = "gpuprof.merged/1"


@dataclass(frozen=True, slots=True)
class MergedValue:
    """An input or output of a model and what it is called in the merged file."""

    name: str
    merged: str
    dtype: str
    shape: tuple[int | None, ...]  #: None where it follows the model's batch.


@dataclass(frozen=True, slots=True)
class MergedMember:
    """One of the models in a merged file."""

    name: str  #: The model's name, which is the prefix of its inputs and outputs.
    #: ``path``, ``sha256``: The file that it was read from.
    path: str
    sha256: str
    inputs: tuple[MergedValue, ...]
    outputs: tuple[MergedValue, ...]
    fixed_batch: int | None = None  #: The batch of a model that has a fixed one; None where any will do.
    #: What stands for the model in a call without it: batches of 0 rows, or of 1 row of zeros where one of its ops
    #: cannot do with an empty batch. Models with a fixed batch get zeros of that batch.
    absent_rows: int = 0

    def nothing(self) -> dict[str, Array]:
        """Return inputs that stand for the model in a call without it."""
        import numpy as np
        from onnx.helper import tensor_dtype_to_np_dtype

        from gpuprof.graph.element_types import elem_type

        rows = self.absent_rows if self.fixed_batch is None else self.fixed_batch
        return {
            value.merged: np.zeros(
                tuple(rows if dim is None else dim for dim in value.shape),
                tensor_dtype_to_np_dtype(elem_type(value.dtype)),
            )
            for value in self.inputs
        }


@dataclass(frozen=True, slots=True)
class MergedModel:
    """The models of a merged file, in the order in which their batches are concatenated."""

    members: tuple[MergedMember, ...]

    def member(self, name: str) -> MergedMember:
        """Return the member called ``name``. Raises `InputError` when there is none."""
        for member in self.members:
            if member.name == name:
                return member
        raise unknown_name("merged model", name, [member.name for member in self.members])

    def feeds(self, requests: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
        """Return the inputs of one call of the merged file.

        Raises `InputError` for a model or an input that does not exist, or an input that is missing. ``requests``: for
        each model that takes part its inputs under its own names; the others are absent.
        """
        # All names first, so that nothing is computed for a call that is refused.
        for name in requests:
            self.member(name)
        fed: dict[str, Array] = {}
        for member in self.members:
            given = requests.get(member.name)
            if given is None:
                fed |= member.nothing()
                continue
            known = {value.name: value.merged for value in member.inputs}
            for name in given:
                if name not in known:
                    raise unknown_name(f"input of {member.name}", name, list(known))
            missing = sorted(set(known) - set(given))
            if missing:
                raise InputError(f"{member.name} needs the input {missing[0]!r}")
            fed |= {known[name]: value for name, value in given.items()}
        return fed

    def output_names(self, name: str) -> list[str]:
        """Return what the outputs of a model are called in the merged file, in the model's order."""
        return [value.merged for value in self.member(name).outputs]

    def answers(self, results: Mapping[str, Array], name: str) -> dict[str, Array]:
        """Return a model's outputs under its own names, out of those of the merged file by their names."""
        return {value.name: results[value.merged] for value in self.member(name).outputs}


def write_description(model: ModelProto, described: MergedModel) -> None:
    """Put the description into a model's metadata, in the place of an older one."""
    from dataclasses import asdict

    document = {"schema": SCHEMA, "models": [asdict(member) for member in described.members]}
    kept = [(entry.key, entry.value) for entry in model.metadata_props if entry.key != METADATA_KEY]
    del model.metadata_props[:]
    for key, value in (*kept, (METADATA_KEY, json.dumps(document, sort_keys=True))):
        model.metadata_props.add(key=key, value=value)


def read_description(metadata: Mapping[str, str], where: str) -> MergedModel | None:
    """Return what the metadata of an ONNX file say of the models merged in it; None for any other file.

    Raises `InputError` when the description is damaged or of a newer version. ``metadata``: as ONNX Runtime gives it:
    ``session.get_modelmeta().custom_metadata_map``; ``where``: names the file in errors.
    """
    text = metadata.get(METADATA_KEY)
    if text is None:
        return None
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise InputError(f"{where} is described by {document['schema']}, not {SCHEMA}", "merge it again")
        return MergedModel(tuple(_member(entry) for entry in document["models"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{where} has a damaged description of its merged models: {error}", "merge it again") from None


def read_merged(path: Path) -> MergedModel | None:
    """Return the description in an ONNX file, None where it is no merged one.

    Raises `InputError` when the file is no ONNX model, or its description is damaged.
    """
    from gpuprof.graph.file import read_onnx

    model = read_onnx(path).model
    return read_description({entry.key: entry.value for entry in model.metadata_props}, str(path))


def _member(entry: Mapping[str, Any]) -> MergedMember:
    inputs, outputs = (tuple(_value(item) for item in entry[key]) for key in ("inputs", "outputs"))
    fixed = entry["fixed_batch"]
    return MergedMember(
        str(entry["name"]),
        str(entry["path"]),
        str(entry["sha256"]),
        inputs,
        outputs,
        None if fixed is None else int(fixed),
        int(entry["absent_rows"]),
    )


def _value(entry: Mapping[str, Any]) -> MergedValue:
    shape = tuple(None if dim is None else int(dim) for dim in entry["shape"])
    return MergedValue(str(entry["name"]), str(entry["merged"]), str(entry["dtype"]), shape)
