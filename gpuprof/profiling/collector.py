"""Collector protocol, results, and the list of built-in collectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Protocol

from gpuprof.domain.device import Device
from gpuprof.domain.sizes import describe_sizes
from gpuprof.errors import InputError, UnavailableError
from gpuprof.kernel_db.schema import ColocationRow, DeviceRow, KernelRow, ModelRow, OpRow
from gpuprof.plugins import load_plugin, require_methods
from gpuprof.profiling.worker.job import Job, Request
from gpuprof.runtime.optimizer import executed_variant

#: Built-in collectors, in the order in which ``auto`` prefers them.
COLLECTORS: Mapping[str, str] = MappingProxyType(
    {
        "ort": "gpuprof.profiling.cpu.ort:OrtCollector",
        "nsys+ncu": "gpuprof.profiling.gpu.collectors:NsysNcuCollector",
        "cupti+ncu": "gpuprof.profiling.gpu.collectors:CuptiNcuCollector",
        "nsys": "gpuprof.profiling.gpu.collectors:NsysCollector",
        "cupti": "gpuprof.profiling.gpu.collectors:CuptiCollector",
        "ncu": "gpuprof.profiling.gpu.collectors:NcuCollector",
        "nvml": "gpuprof.profiling.gpu.collectors:GpuCollector",
    }
)


@dataclass(frozen=True, slots=True)
class Collected:
    """Results of a collector for a request."""

    #: ``models``, ``ops``, ``kernels``, ``colocations``, ``devices``: Rows with the request's ``run_id``.
    models: tuple[ModelRow, ...] = ()
    ops: tuple[OpRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    colocations: tuple[ColocationRow, ...] = ()
    devices: tuple[DeviceRow, ...] = ()
    #: Further settings of the measurement; stored in the run as JSON.
    settings: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  #: Caveats for readers of the figures.
    lost: tuple[str, ...] = ()  #: Reasons for missing requested counters; `profile` ends with them.
    #: Execution of the job and of each neighbour, for sessions with options; see `RuntimeVariant`.
    executions: tuple[str | None, ...] = ()


def record_dims(collected: Collected, jobs: Sequence[Job]) -> Collected:
    """Return the rows with the sizes of the free dimensions at the time of measurement.

    ``jobs`` are the measured job and its neighbours, in the order of the rows of ``colocations``.
    """
    return _add_columns(collected, [{"dims": describe_sizes(job.graph.sizes) or None} for job in jobs])


def record_variants(collected: Collected, jobs: Sequence[Job], device: Device) -> Collected:
    """Return the rows with their runtime, execution and precision.

    ``collected``: results whose settings name the provider; without a provider the rows stay unchanged; ``jobs``: the
    measured job and its neighbours, in the order of the rows of ``colocations``.
    """
    if not collected.settings.get("provider"):
        return collected
    variants = [executed_variant(job.graph, device) for job in jobs]
    executions = zip_longest(variants, collected.executions[: len(variants)])
    columns = [asdict(replace(variant, execution=execution or variant.execution)) for variant, execution in executions]
    collected = replace(collected, kernels=tuple(replace(row, **columns[0]) for row in collected.kernels))
    return _add_columns(collected, columns)


def _add_columns(collected: Collected, columns: Sequence[Mapping[str, Any]]) -> Collected:
    """Return the rows of models, ops and co-locations with further columns, given for each job."""
    return replace(
        collected,
        models=tuple(replace(row, **columns[0]) for row in collected.models),
        ops=tuple(replace(row, **columns[0]) for row in collected.ops),
        colocations=tuple(replace(row, **more) for row, more in zip(collected.colocations, columns, strict=False)),
    )


class Collector(Protocol):
    """Measures requests with a tool; plug-ins of the group ``gpuprof.collectors`` implement this protocol.

    `gpuprof.profiling.contract.CollectorContract` holds the tests for all collectors.
    """

    name: str  #: Name in the database.
    kinds: tuple[str, ...]  #: Supported kinds of devices: ``"cpu"``, ``"gpu"``.

    def available(self) -> str | None:
        """Return None if the collector can run here, else the reason and the fix in a line."""

    def version(self) -> str:
        """Return the version of the underlying tool; figures by other versions are measured again."""

    def runtime(self) -> tuple[str, str]:
        """Return name and version of the runtime that runs the models."""

    def collect(self, request: Request) -> Collected:
        """Measure a request.

        Raises `InputError` when the model, the share or the batch cannot be run; `UnavailableError` when the tool
        fails, with its last words.
        """


def choose_collector(name: str, kind: str) -> tuple[Collector, str]:
    """Return the collector called ``name`` for devices of ``kind``, and the reason for the choice in a line.

    ``name``: a built-in name, an entry point's, ``"package.module:Class"``, or ``"auto"``; ``kind``: ``"cpu"`` or
    ``"gpu"``.

    Raises `InputError` for an unknown name; `UnavailableError` when the collector cannot run here; for ``auto``, when
    no collector can, with the reason of each.
    """
    if name != "auto":
        try:
            collector: Collector = load_plugin("collector", name, COLLECTORS)()
        except TypeError as error:
            raise InputError(f"the collector {name!r} cannot be made: {error}", "it takes no arguments") from None
        require_methods("collector", name, collector, "available", "collect")
        if reason := _unfit(collector, kind):
            raise UnavailableError(
                f"the collector {name} cannot be used: {reason}", "leave out --collector: the first that works is taken"
            )
        return collector, f"{name}: asked for"
    reasons: list[str] = []
    for candidate in COLLECTORS:
        collector = load_plugin("collector", candidate, COLLECTORS)()
        reason = _unfit(collector, kind)
        if reason is None:
            return collector, "; ".join([f"{candidate}: the first that works here", *reasons])
        reasons.append(f"not {candidate}: {reason}")
    raise UnavailableError(f"no collector works here: {'; '.join(reasons)}", "gpuprof doctor tells what is missing")


def _unfit(collector: Collector, kind: str) -> str | None:
    if kind not in collector.kinds:
        return f"it measures a {' or a '.join(collector.kinds)}, not a {kind}"
    return collector.available()
