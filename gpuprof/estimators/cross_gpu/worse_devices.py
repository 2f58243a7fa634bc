"""GPUs of the catalogue that are no better than another in anything: none of them may be estimated quicker than it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from gpuprof.domain.catalogue import devices
from gpuprof.domain.device import Device
from gpuprof.estimators.cross_gpu.cross_gpu import CrossGpuModel
from gpuprof.estimators.cross_gpu.kernels_by_batch import KernelsByBatch
from gpuprof.estimators.cross_gpu.rates import DeviceRates, rates_of

_UNLIMITED = float("inf")
#: Whether products run on tensor cores, in the precision and in the wider one that they may run in instead.
_Kind = tuple[bool, bool | None]


class WholeTimes:
    """Times of a model on whole GPUs, those of all that are asked for together predicted at once and kept."""

    def __init__(self, kernels: KernelsByBatch, model: CrossGpuModel) -> None:
        self._kernels, self._model = kernels, model
        self._known: dict[tuple[str, int], float] = {}

    def find_factors(self, device: Device, own_s: Mapping[int, float]) -> dict[int, float]:
        """Return for each batch what the time on ``device`` is multiplied by so that none that is worse is quicker.

        ``own_s``: batch → seconds on all of the device.

        Raises `InputError` when the GPU lacks the precision of the kernels.
        """
        worse = list_worse(device, self._kernels.precision)
        least, pairs = dict(own_s), [(one, batch) for one in worse for batch in own_s]
        if not pairs:
            return dict.fromkeys(own_s, 1.0)
        bounds = self._model.bound_whole(self._kernels, pairs)
        near = [pair for pair, bound in zip(pairs, bounds, strict=True) if bound < least[pair[1]]]
        for (_, batch), seconds in zip(near, self._predict(near), strict=True):
            least[batch] = min(least[batch], seconds)
        return {batch: least[batch] / one if one > 0.0 else 1.0 for batch, one in own_s.items()}

    def _predict(self, pairs: Sequence[tuple[Device, int]]) -> list[float]:
        keys = [(one.name, batch) for one, batch in pairs]
        missing = [place for place, key in enumerate(keys) if key not in self._known]
        if missing:
            found = self._model.time_whole(self._kernels, [pairs[place] for place in missing])
            self._known.update(zip([keys[place] for place in missing], found, strict=True))
        return [self._known[key] for key in keys]


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
