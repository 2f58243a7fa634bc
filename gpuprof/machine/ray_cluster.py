"""Joins a Ray cluster, for serving and profiling alike."""

from __future__ import annotations

import os
import socket
from importlib import import_module
from typing import Any

from gpuprof.errors import UnavailableError, install_hint
from gpuprof.runtime.module_command import REACTION_S

_FIX = "ray start --head starts one; RAY_ADDRESS says where"


def join_cluster() -> Any:
    """Connect to the cluster of ``RAY_ADDRESS``, or of this machine, and return Ray's module.

    Raises `UnavailableError` when Ray is not installed or no cluster answers.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        ray = import_module("ray")
    except ImportError:
        raise UnavailableError("ray is not installed", install_hint("ray")) from None
    _probe_address(address)
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UnavailableError(f"no Ray cluster answers at {address or 'this machine'}: {reason}", _FIX) from None
    return ray


def _probe_address(address: str) -> None:
    """Fail at once if nothing listens at the address: Ray itself would retry for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "//" in address:
        return
    try:
        socket.create_connection((host, int(port)), REACTION_S).close()
    except (OSError, OverflowError) as error:
        raise UnavailableError(f"no Ray cluster answers at {address}: {error}", _FIX) from None
