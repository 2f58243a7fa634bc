"""Devices of the catalogue that another device equals or beats in every rate: none may be estimated quicker than it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from gpuprof.domain.catalogue import devices
from gpuprof.domain.device import Device
from gpuprof.estimators.cross_gpu.cross_gpu import CrossGpuModel
from gpuprof.estimators.cross_gpu.kernels_by_batch import KernelsByBatch
from gpuprof.estimators.cross_gpu.rates import DeviceRates, rates_of, wider_type

_UNLIMITED = float("inf")
#: Types in which a GPU is compared only with catalogue GPUs of the same type; their wider types compete kernel by
#: kernel.
_HALF_TYPES = frozenset({"float16", "bfloat16"})
#: Whether products run on tensor cores, in the precision and in each wider type used instead.
_Kind = tuple[bool, ...]


class WholeTimes:
    """Times of a model on whole GPUs, predicted together per call and cached."""

    def __init__(self, kernels: KernelsByBatch, model: CrossGpuModel) -> None:
        self._kernels, self._model = kernels, model
        self._wider: dict[str, WholeTimes] = {}
        self._known: dict[tuple[str, int], float] = {}

    def find_factors(self, device: Device, own_s: Mapping[int, float]) -> dict[int, float]:
        """Return for each batch the factor of the time on ``device`` so that no worse device is quicker.

        A worse device may lack the precision: its time in a wider type is compared, too, since ``device`` may run the
        wider type as well. ``own_s``: batch → seconds on all of the device. Raises `InputError` when the GPU lacks the
        precision of the kernels.
        """
        least = {batch: one for batch, one in own_s.items() if one > self._kernels.host_seconds(batch)}
        if least:
            self._lower(least, list_worse(device, self._kernels.precision))
        wider = wider_type(device, self._kernels.precision)
        if least and wider is not None and self._kernels.precision not in _HALF_TYPES:
            if wider not in self._wider:
                self._wider[wider] = WholeTimes(self._kernels.compute_in(wider), self._model)
            compared = {one.name for one in list_worse(device, self._kernels.precision)}  # already no slower
            self._wider[wider]._lower(least, [one for one in list_worse(device, wider) if one.name not in compared])
        return {batch: least.get(batch, one) / one if one > 0.0 else 1.0 for batch, one in own_s.items()}

    def _lower(self, least: dict[int, float], worse: Sequence[Device]) -> None:
        """Lower the seconds of each batch to those of the quickest of the ``worse`` devices."""
        pairs = [(one, batch) for one in worse for batch in least]
        bounds = self._model.bound_whole(self._kernels, pairs) if pairs else []
        near = [pair for pair, bound in zip(pairs, bounds, strict=True) if bound < least[pair[1]]]
        for (_, batch), seconds in zip(near, self._predict(near), strict=True):
            least[batch] = min(least[batch], seconds)

    def _predict(self, pairs: Sequence[tuple[Device, int]]) -> list[float]:
        keys = [(one.name, batch) for one, batch in pairs]
        kinds = {one.name: _kind_of(rates_of(one, self._kernels.precision)) for one, _ in pairs}
        missing: dict[_Kind, list[int]] = {}
        for place, (name, batch) in enumerate(keys):
            if (name, batch) not in self._known:
                missing.setdefault(kinds[name], []).append(place)
        for places in missing.values():  # devices with products on the same kinds of cores at once
            found = self._model.time_whole(self._kernels, [pairs[place] for place in places])
            self._known.update(zip([keys[place] for place in places], found, strict=True))
        return [self._known[key] for key in keys]


def list_worse(device: Device, precision: str) -> list[Device]:
    """Return the GPUs of the catalogue that are worse than ``device`` in some rate and better in none, in
    ``precision``.

    Raises `InputError` when the GPU lacks the precision.
    """
    tensor, own = rates_of(device, precision).tensor, _list_rates(device, precision)
    return [one for one, its_tensor, others in _list_gpus(precision) if its_tensor == tensor and _is_worse(others, own)]


@cache
def _list_gpus(precision: str) -> tuple[tuple[Device, bool, tuple[float, ...]], ...]:
    """Return each GPU with the precision, whether its products run on tensor cores, and its rates."""
    found = [one for one in devices().values() if one.kind == "gpu" and precision in one.flops_per_s]
    return tuple((one, rates_of(one, precision).tensor, _list_rates(one, precision)) for one in found)


def _kind_of(rates: DeviceRates) -> _Kind:
    return (rates.tensor, *(() if rates.instead is None else _kind_of(rates.instead)))


def _list_rates(device: Device, precision: str) -> tuple[float, ...]:
    of_types = (device.flops_per_s[name] for name in (precision, "float32"))
    sizes = device.compute_units, device.l2_bytes, device.max_power_w or _UNLIMITED
    return (*sizes, device.clock_mhz, device.dram_bytes_per_s, *of_types)


def _is_worse(rates: tuple[float, ...], others: tuple[float, ...]) -> bool:
    return rates != others and all(own <= other for own, other in zip(rates, others, strict=True))
