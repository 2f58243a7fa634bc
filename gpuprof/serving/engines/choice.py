"""Which engine keeps the machines: this machine's own, or Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuprof.errors import unknown_name

if TYPE_CHECKING:
    from gpuprof.serving.server import EngineMaker

LOCAL, RAY = "local", "ray"


def chosen_engine(name: str, ray_address: str | None, insecure: bool) -> EngineMaker | None:
    """Return what makes the engine of this name; None: the server's own.

    Parameters
    ----------
    name : str
    ray_address : str or None
        Of the Ray cluster; None: the one of this machine.
    insecure : bool
        Whether workers on other machines may be spoken to without TLS.

    Raises
    ------
    InputError
        When there is no engine of this name.
    UnavailableError
        When Ray is not installed.
    """
    if name == LOCAL:
        return None
    if name != RAY:
        raise unknown_name("engine", name, [LOCAL, RAY])
    from gpuprof.serving.engines.ray_engine import ray_engine

    return ray_engine(ray_address, insecure)
