"""Reads and writes deployment maps as files: JSON with a published schema (``gpuprof.deployment/1``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpuprof.domain.deployment import SCHEMA, DeploymentMap, find_duplicate
from gpuprof.domain.file_access import read_input, write_atomically
from gpuprof.errors import InputError, refuse_unwritable

_FIX = "gpuprof place writes maps that keep the schema"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a deployment map."""
    schema = DeploymentMap.model_json_schema(by_alias=True, mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **schema}


def read_map(path: Path) -> DeploymentMap:
    """Read a deployment map.

    Raises
    ------
    InputError
        When the file is not JSON, has another or a newer schema, or violates the schema.
    """
    try:
        text = read_input(path, "gpuprof place writes a map").decode("utf-8-sig")
        content = json.loads(text, object_pairs_hook=_require_distinct_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}", "gpuprof place writes a map") from None
    return parse_map(content, str(path))


def _require_distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises `ValueError` for a repeated key, whose value depends on the reader."""
    if (twin := find_duplicate(key for key, _ in pairs)) is not None:
        raise ValueError(f"the key {twin!r} occurs in one object twice")
    return dict(pairs)


def parse_map(content: object, where: str) -> DeploymentMap:
    """Return the map in decoded JSON; ``where`` names it in errors. Raises `InputError` as `read_map` does."""
    if not isinstance(content, dict) or not isinstance(content.get("schema"), str):
        raise InputError(f"{where} is not a deployment map: it has no schema", f'its "schema" must be "{SCHEMA}"')
    _check_schema(content["schema"], where)
    try:
        # Strict mode: neither ``true`` nor a string of digits is accepted as a number.
        return DeploymentMap.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{where}: {place}: {first['msg']}", _FIX) from None


def _check_schema(schema: str, where: str) -> None:
    name, _, version = schema.partition("/")
    ours, _, newest = SCHEMA.partition("/")
    if name != ours or not version.isdigit():
        raise InputError(f"{where} is not a deployment map: its schema is {schema!r}", f"expected {SCHEMA!r}")
    if int(version) > int(newest):
        raise InputError(f"{where} has schema {schema}, newer than {SCHEMA}", "update gpuprof to read it")


def write_map(deployment: DeploymentMap, path: Path) -> None:
    """Write the map atomically.

    Raises
    ------
    InputError
        When the directory is not writable.
    """
    with refuse_unwritable(path):
        write_atomically(path, deployment.to_json().encode())
