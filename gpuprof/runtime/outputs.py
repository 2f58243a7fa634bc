"""Outputs of models: their comparison, and outputs other than tensors.

Scikit-learn's converters write sequences of maps, maps, and sequences of tensors. The Open Inference Protocol has only
tensors, so such an output is served as texts: each element, or the whole map, as JSON. Keys of maps become strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpuprof.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


#: Largest difference of the outputs of a quantising model, relative to the largest value. Another order of operations
#: can move a rounding by a step, which later layers propagate; rounding by the largest value depends on all items.
QUANTISED_TOLERANCE = 1e-1


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
    """Return an output as one array for comparison: maps with equal keys become rows of values in key order."""
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


#: Tolerance relative to the largest value of an output: with other SMs, layouts or batches a library picks other
#: kernels with another order of additions, in TF32 to about three digits.
DEFAULT_TOLERANCE = 1e-2


def outputs_differ(
    expected: Mapping[str, Any],
    outputs: Mapping[str, Any],
    condition: str = "under the share",
    tolerance: float = DEFAULT_TOLERANCE,
) -> str | None:
    """Return a line on outputs that differ from the expected ones beyond the tolerance; None: equal.

    ``condition``: the difference between the two runs, for the line.
    """
    import numpy as np

    if expected.keys() != outputs.keys():
        raise InputError("the outputs of both runs have different names", "were they of one model?")
    for name, value in expected.items():
        wanted, actual = to_numbers(value), to_numbers(outputs[name])
        if wanted.shape != actual.shape:
            return f"output {name} has shape {actual.shape} {condition} and {wanted.shape} without"
        if wanted.dtype.kind != "f":
            if not np.array_equal(wanted, actual):
                return f"output {name} differs {condition}"
            continue
        if not np.array_equal(np.isfinite(wanted), np.isfinite(actual)):
            return f"output {name} {condition} is not finite where it is without, or the other way round"
        is_finite = np.isfinite(wanted)
        scale = float(np.max(np.abs(wanted), initial=0.0, where=is_finite))
        gap = float(np.max(np.abs(wanted - actual), initial=0.0, where=is_finite))
        if gap > tolerance * scale:
            return f"output {name} differs {condition} by {gap:.3g} at values up to {scale:.3g}"
    return None


def is_close(expected: Array, actual: Array, tolerance: float | None) -> bool:
    """Return whether two outputs have the same shape and values.

    ``tolerance``: largest difference, relative to the largest finite value; None: none, as for whole numbers and texts.
    """
    import numpy as np

    if expected.shape != actual.shape:
        return False
    if tolerance is None:
        return bool(np.array_equal(expected, actual))
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    # Attention masks give infinities, and relative errors near zero mean nothing.
    scale = float(np.abs(a[np.isfinite(a)]).max(initial=1e-6))
    return bool(np.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True))
