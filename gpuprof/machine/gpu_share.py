"""Binds a process to its share of a GPU: by MPS percentage, by MIG instance, or both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, UnavailableError
from gpuprof.machine.gpu import LocalMigInstance, list_local_gpus
from gpuprof.machine.mps import PERCENTAGE, mps_daemon

VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def bind_shares(device: Device, shares: Sequence[Share], nvml: Any = None) -> Iterator[tuple[dict[str, str], ...]]:
    """Yield the environment that binds a process to each of ``shares`` of a GPU while all are running.

    Partial shares of the same MIG profile share an instance; whole shares get an instance each. MPS runs when any share
    is partial or several share the whole GPU; if all of several shares are the whole GPU, no process is limited and
    each may use all SMs. ``nvml``: replaces ``pynvml``. Raises `InputError` when the shares exceed the GPU, or the
    device has no such profile; `UnavailableError` when MPS is missing, or no such instance exists: none is created
    here.
    """
    plain = [share for share in shares if share.mig is None]
    total = sum(share.sm_pct for share in plain)
    unshared = len(plain) > 1 and all(share.is_whole for share in plain)
    if total > 100.0 + 1e-6 and len(plain) > 1 and not unshared:
        raise InputError(f"shares of {total:g}% together do not fit a GPU", "give smaller shares")
    for share in shares:
        if share.mig is not None:
            device.mig_profile(share.mig)
    if any(share.mig for share in shares):
        if plain:
            raise InputError("a GPU is either cut into MIG instances or shared whole, not both")
        gpus = list_local_gpus(nvml)
        with _in_instances(shares, gpus[0].instances if gpus else ()) as environments:
            yield environments
    elif len(shares) == 1 and shares[0].is_whole:
        yield ({},)
    else:
        with mps_daemon() as daemon:
            yield tuple(daemon.environment(None if unshared else share.sm_pct) for share in shares)


def describe_share_means(environments: Sequence[Mapping[str, str]]) -> str:
    """Return the mechanism that enforces the shares in environments from `bind_shares`, for a run's settings."""
    names = {name for environment in environments for name in environment}
    means = [word for name, word in _MEANS.items() if name in names]
    return " and ".join(means) or "nothing: the whole device"


_MEANS = {VISIBLE: "MIG", PERCENTAGE: "MPS"}


@contextmanager
def _in_instances(
    shares: Sequence[Share], instances: Sequence[LocalMigInstance]
) -> Iterator[tuple[dict[str, str], ...]]:
    free = list(instances)
    uuids: list[str] = []
    open_parts: dict[str, tuple[str, float]] = {}  # profile → shared instance, and its free percentage
    for share in shares:
        assert share.mig is not None
        uuid, free_pct = open_parts.get(share.mig, ("", 0.0))
        if free_pct < share.sm_pct - 1e-6:
            uuid, free_pct = _take_instance(free, share.mig), 100.0
        open_parts[share.mig] = (uuid, free_pct - share.sm_pct)
        uuids.append(uuid)
    if all(share.sm_pct == 100.0 for share in shares):
        yield tuple({VISIBLE: uuid} for uuid in uuids)
        return
    # A daemon serves a single MIG instance, and a client finds its daemon by a single environment variable.
    if len(set(uuids)) > 1:
        raise UnavailableError("parts of several MIG instances at once need a daemon each", "measure them one by one")
    with mps_daemon(uuids[0]) as daemon:
        yield tuple({VISIBLE: uuids[0], **daemon.environment(share.sm_pct)} for share in shares)


def _take_instance(free: list[LocalMigInstance], profile: str) -> str:
    for instance in free:
        if instance.profile == profile:
            free.remove(instance)
            return instance.uuid
    profiles = ", ".join(instance.profile for instance in free) or "none"
    raise UnavailableError(
        f"no free MIG instance {profile}: there are {profiles}", f"nvidia-smi mig -cgi {profile} -C makes one"
    )
