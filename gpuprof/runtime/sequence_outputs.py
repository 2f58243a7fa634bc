"""Outputs other than tensors, as written by scikit-learn's converters: sequences of maps, maps, sequences of tensors.

The Open Inference Protocol has only tensors, so such an output is served as texts: each element, or the whole map, as
JSON. Keys of maps become strings.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def is_sequence_of_maps(onnx_type: str) -> bool:
    """Return whether an output, by its type as written by ONNX Runtime, has a map per item, as ZipMap gives."""
    return onnx_type.startswith("seq(map(")


def is_collection(onnx_type: str) -> bool:
    """Return whether a type as written by ONNX Runtime is a sequence or a map."""
    return onnx_type.startswith(("seq(", "map("))


def to_texts(value: object) -> Array:
    """Return a sequence or a map as JSON texts of shape (elements,), (1,) for a map; NaN and infinities are null."""
    import numpy as np

    elements = value if isinstance(value, list) else [value]
    texts = [json.dumps(_to_json(element), separators=(",", ":")) for element in elements]
    return np.array(texts, dtype=object)


def to_numbers(value: object) -> Array:
    """Return an output as a single array for comparison: maps of equal keys become rows of values in key order."""
    import numpy as np

    if not isinstance(value, list | dict):
        return np.asarray(value)
    elements = value if isinstance(value, list) else [value]
    if elements and all(isinstance(element, dict) and element.keys() == elements[0].keys() for element in elements):
        rows = [[element[key] for key in sorted(element)] for element in elements]
        return np.asarray(rows)
    return to_texts(value)


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {_key(key): _to_json(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _key(key: object) -> str:
    return key.decode(errors="replace") if isinstance(key, bytes) else str(key)
