"""GPUs of the catalogue that are no better than another in anything: none of them may be estimated quicker than it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from gpuprof.domain.catalogue import devices
from gpuprof.domain.device import Device
from gpuprof.estimators.cross_gpu.cross_gpu import CrossGpuModel, KernelsByBatch
from gpuprof.estimators.cross_gpu.rates import DeviceRates, rates_of

_UNLIMITED = float("inf")
#: Whether products run on tensor cores, in the precision and in the wider one that they may run in instead.
_Kind = tuple[bool, bool | None]


class WholeTimes:
    """Times of a model on whole GPUs, those of all that are asked for together predicted at once and kept."""

    def __init__(self, kernels: KernelsByBatch, model: CrossGpuModel) -> None:
        self._kernels, self._model = kernels, model
        self._known: dict[tuple[str, float | None], dict[int, float]] = {}

    def find_factors(self, device: Device, batches: Sequence[int]) -> dict[int, float]:
        """Return for each batch what the time on ``device`` is multiplied by so that none that is worse is quicker.

        Raises `InputError` when the GPU lacks the precision of the kernels.
        """
        compared = [device, *list_worse(device, self._kernels.precision)]
        if len(compared) == 1:
            return dict.fromkeys(batches, 1.0)
        times = [self._known.setdefault((one.name, one.max_power_w), {}) for one in compared]
        missing = [place for place, known in enumerate(times) if not known.keys() >= set(batches)]
        if missing:
            asked = [compared[place] for place in missing]
            for place, seconds in zip(missing, self._model.time_whole(self._kernels, batches, asked), strict=True):
                times[place].update(zip(batches, seconds, strict=True))
        own = times[0]
        return {one: min(known[one] for known in times) / own[one] if own[one] > 0.0 else 1.0 for one in batches}


def list_worse(device: Device, precision: str) -> list[Device]:
    """Return GPUs of the catalogue that are worse in some rate and better in none, for products in ``precision``.

    Raises `InputError` when the GPU lacks the precision.
    """
    rates = rates_of(device, precision)
    own = _list_rates(device, precision)
    kind = _kind_of(rates)
    return [one for one, its_kind, others in _list_gpus(precision) if its_kind == kind and _is_worse(others, own)]


@cache
def _list_gpus(precision: str) -> tuple[tuple[Device, _Kind, tuple[float, ...]], ...]:
    """Return each GPU that has the precision, what kernels it runs, and its rates."""
    found = [one for one in devices().values() if one.kind == "gpu" and precision in one.flops_per_s]
    kinds = [_kind_of(rates_of(one, precision)) for one in found]
    return tuple((one, kind, _list_rates(one, precision)) for one, kind in zip(found, kinds, strict=True))


def _kind_of(rates: DeviceRates) -> _Kind:
    return rates.tensor, None if rates.instead is None else rates.instead.tensor


def _list_rates(device: Device, precision: str) -> tuple[float, ...]:
    of_types = (device.flops_per_s[name] for name in (precision, "float32"))
    sizes = device.compute_units, device.l2_bytes, device.max_power_w or _UNLIMITED
    return (*sizes, device.clock_mhz, device.dram_bytes_per_s, *of_types)


def _is_worse(rates: tuple[float, ...], others: tuple[float, ...]) -> bool:
    return rates != others and all(own <= other for own, other in zip(rates, others, strict=True))
