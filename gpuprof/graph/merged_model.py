"""Merged models: an ONNX file of several models, with a description of each member's inputs and outputs.

The description is in the file's metadata, so a merged file can be run without other files.
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
    """An input or output of a member, with its name in the model and in the merged file."""

    name: str
    merged: str
    dtype: str
    shape: tuple[int | None, ...]  #: None for dimensions that follow the model's batch.


@dataclass(frozen=True, slots=True)
class MergedMember:
    """A model in a merged file."""

    name: str  #: The model's name, which is the prefix of its inputs and outputs.
    #: ``path``, ``sha256``: Source file of the model.
    path: str
    sha256: str
    inputs: tuple[MergedValue, ...]
    outputs: tuple[MergedValue, ...]
    #: Rows of the model in a call without its requests: 0, or 1 row of zeros where an op does not support an empty
    #: batch.
    absent_rows: int = 0

    def nothing(self) -> dict[str, Array]:
        """Return placeholder inputs for the model in a call without requests for it."""
        import numpy as np
        from onnx.helper import tensor_dtype_to_np_dtype

        from gpuprof.graph.element_types import elem_type

        return {
            value.merged: np.zeros(
                tuple(self.absent_rows if dim is None else dim for dim in value.shape),
                tensor_dtype_to_np_dtype(elem_type(value.dtype)),
            )
            for value in self.inputs
        }


@dataclass(frozen=True, slots=True)
class MergedModel:
    """The models of a merged file, in the order in which their batches are concatenated."""

    members: tuple[MergedMember, ...]

    def member(self, name: str) -> MergedMember:
        """Return the member called ``name``. Raises `InputError` for an unknown name."""
        for member in self.members:
            if member.name == name:
                return member
        raise unknown_name("merged model", name, [member.name for member in self.members])

    def feeds(self, requests: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
        """Return the inputs for a call of the merged file.

        Raises `InputError` for an unknown model or input, or a missing input. ``requests``: for each participating
        model, its inputs by the model's own names; other models are absent.
        """
        # All names are checked first, so that no work is done for a refused call.
        for name in requests:
            self.member(name)
        feeds: dict[str, Array] = {}
        for member in self.members:
            arrays = requests.get(member.name)
            if arrays is None:
                feeds |= member.nothing()
                continue
            merged_names = {value.name: value.merged for value in member.inputs}
            for name in arrays:
                if name not in merged_names:
                    raise unknown_name(f"input of {member.name}", name, list(merged_names))
            missing = sorted(set(merged_names) - set(arrays))
            if missing:
                raise InputError(f"{member.name} needs the input {missing[0]!r}")
            feeds |= {merged_names[name]: value for name, value in arrays.items()}
        return feeds

    def output_names(self, name: str) -> list[str]:
        """Return the names of a model's outputs in the merged file, in the model's order."""
        return [value.merged for value in self.member(name).outputs]

    def answers(self, results: Mapping[str, Array], name: str) -> dict[str, Array]:
        """Return a model's outputs by its own names, selected from the outputs of the merged file."""
        return {value.name: results[value.merged] for value in self.member(name).outputs}


def write_description(model: ModelProto, described: MergedModel) -> None:
    """Write the description into a model's metadata, replacing any older description."""
    from dataclasses import asdict

    document = {"schema": SCHEMA, "models": [asdict(member) for member in described.members]}
    entries = [(entry.key, entry.value) for entry in model.metadata_props if entry.key != METADATA_KEY]
    del model.metadata_props[:]
    for key, value in (*entries, (METADATA_KEY, json.dumps(document, sort_keys=True))):
        model.metadata_props.add(key=key, value=value)


def read_description(metadata: Mapping[str, str], where: str) -> MergedModel | None:
    """Return the description of merged models in an ONNX file's metadata; None for other files.

    Raises `InputError` when the description is damaged or of another version. ``metadata``: in ONNX Runtime,
    ``session.get_modelmeta().custom_metadata_map``; ``where``: name of the file in errors.
    """
    from pydantic import TypeAdapter

    text = metadata.get(METADATA_KEY)
    if text is None:
        return None
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise InputError(f"{where} is described by {document['schema']}, not {SCHEMA}", "merge it again")
        return MergedModel(TypeAdapter(tuple[MergedMember, ...]).validate_python(document["models"]))
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{where} has a damaged description of merged models: {reason}", "merge it again") from None


def read_merged(path: Path) -> MergedModel | None:
    """Return the description in an ONNX file, None for a file without merged models.

    Raises `InputError` when the file is not an ONNX model, or its description is damaged.
    """
    from gpuprof.graph.file import read_onnx

    model = read_onnx(path).model
    return read_description({entry.key: entry.value for entry in model.metadata_props}, str(path))
