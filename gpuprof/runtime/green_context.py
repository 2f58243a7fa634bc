"""Limits PyTorch to some of a GPU's SMs by a green context where MPS cannot start; for one process only.

Source: CUDA Driver API, "Green Contexts"; PyTorch 2.11 and later, ``torch.cuda.green_contexts``.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gpuprof.errors import UnavailableError
from gpuprof.runtime.providers import GREEN_SMS


def green_stream(torch: Any) -> Any | None:
    """Return a stream whose kernels keep to the SMs that the environment names; None where it names none.

    Raises `UnavailableError` when this PyTorch or this driver has no green contexts, or not of so few SMs.
    """
    wanted = os.environ.get(GREEN_SMS)
    if wanted is None:
        return None
    try:
        contexts = importlib.import_module("torch.cuda.green_contexts")
        return contexts.GreenContext.create(num_sms=int(wanted), device_id=0).Stream()
    except (ImportError, AttributeError) as error:
        raise UnavailableError(
            f"PyTorch {torch.__version__} has no green contexts, and MPS does not start", "PyTorch 2.11 has them"
        ) from error
    except RuntimeError as error:
        detail = str(error).strip().split("\n", 1)[0]
        raise UnavailableError(
            f"no green context of {wanted} SMs can be made: {detail}", "try another share"
        ) from error


def use_stream(torch: Any, stream: Any | None) -> AbstractContextManager[Any]:
    """Return what puts PyTorch's work on ``stream`` while it is open; nothing where there is none."""
    opened: AbstractContextManager[Any] = nullcontext() if stream is None else torch.cuda.stream(stream)
    return opened
