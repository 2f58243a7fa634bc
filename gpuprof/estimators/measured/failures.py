"""What measured failures rule out: whatever asks for no less and has no more."""

from __future__ import annotations

from collections.abc import Iterable

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import Workload
from gpuprof.domain.failure import FailedRun
from gpuprof.errors import InputError

_LITTLE = 1e-9


def find_failure(device: Device, workload: Workload, failed: Iterable[FailedRun]) -> FailedRun | None:
    """Return a failure on ``device`` that ``workload`` dominates, None where there is none.

    It does with a batch and a number of processes that are no smaller, in memory that is no larger; and, where memory
    was not what it failed for, with no more of the compute units. The model's name is not looked at.
    """
    for run in failed:
        tried = run.workload
        if workload.batch < tried.batch or workload.processes < tried.processes:
            continue
        try:
            if device.memory_bytes(workload.share) > device.memory_bytes(tried.share):
                continue
            parts = device.fraction(workload.share), device.fraction(tried.share)
        except InputError:  # an instance that the device has not
            continue
        if run.is_memory or parts[0] <= parts[1] * (1.0 + _LITTLE):
            return run
    return None


def require_no_failure(device: Device, workload: Workload, failed: Iterable[FailedRun]) -> None:
    """Do nothing where no failure rules the workload out.

    Raises
    ------
    InputError
        With the failure.
    """
    failure = find_failure(device, workload, failed)
    if failure is None:
        return
    raise InputError(
        f"{workload.model} at batch {workload.batch} with {workload.processes} "
        f"{'process' if workload.processes == 1 else 'processes'} under {workload.share} is ruled out: {failure}",
        "choose a smaller batch, fewer processes or more memory, or measure it again if that was an accident",
    )
