"""Compares outputs of two runs of a model on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuprof.errors import InputError
from gpuprof.runtime.sequence_outputs import to_numbers

#: Tolerance relative to the largest value of an output: with other SMs, layouts or batches a library picks other
#: kernels with another order of additions, in TF32 to about three digits.
_TOLERANCE = 1e-2


def outputs_differ(
    expected: Mapping[str, Any],
    outputs: Mapping[str, Any],
    condition: str = "under the share",
    tolerance: float = _TOLERANCE,
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
