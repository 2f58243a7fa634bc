"""An estimator over a table written in a test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuprof.domain.device import Device
from gpuprof.domain.estimate import MEASURED, Estimate, Figure, Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError
from gpuprof.placement.contract import LinearEstimator


@dataclass(frozen=True)
class TabledEstimator:
    """Knows the throughput (requests/s of all processes) of the workloads in it and nothing else."""

    throughput_rps: Mapping[Workload, float]

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        workload = Workload(model, batch, share, processes)
        if workload not in self.throughput_rps:
            raise InputError(f"nothing is known of {workload}")
        time = 1000.0 * batch * processes / self.throughput_rps[workload]
        return Estimate(workload, device.name, Figure(time, MEASURED))

    def batches(self, model: str, device: Device, share: Share) -> tuple[int, ...]:
        return tuple(sorted({w.batch for w in self.throughput_rps if (w.model, w.share) == (model, share)}))

    def shares(self, model: str, device: Device) -> tuple[Share, ...]:
        return tuple(sorted({w.share for w in self.throughput_rps if w.model == model}, key=device.fraction))


@dataclass(frozen=True, slots=True)
class LaunchBound(LinearEstimator):
    """Times that no share changes, as of a model whose launches take longer than its kernels."""

    def estimate(
        self, model: str, device: Device, batch: int, share: Share, beside: Sequence[Workload] = (), processes: int = 1
    ) -> Estimate:
        """Return the time under the whole device."""
        whole = LinearEstimator.estimate(self, model, device, batch, replace(share, sm_pct=100.0), beside, processes)
        return replace(whole, workload=Workload(model, batch, share, processes))
