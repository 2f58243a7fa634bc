"""Record of a deployment map's planning: settings, costs, hashes, and the end of the search."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, field_validator, model_serializer

_Milliseconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlannedDevices(_Record):
    """Devices of a kind available to the plan; without ``count`` as many as needed.

    ``price_per_hour`` is present if it differed from the catalogue's.
    """

    device: Annotated[str, Field(pattern=r"\S")]
    count: _Count | None = None
    price_per_hour: Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)] | None = None

    @model_serializer(mode="wrap")
    def _omit_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the price where equal to the catalogue's."""
        return {key: value for key, value in write(self).items() if key != "price_per_hour" or value is not None}


class RecordedHostWork(_Record):
    """Cost of serving assumed by the plan; fields as in `gpuprof.rules.host_work.HostWork`."""

    handover_ms: _Milliseconds = 0.0
    host_ms: _Milliseconds = 0.0
    host_cores: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    host_ms_busy: _Milliseconds = 0.0


class PlannedWith(_Record):
    """The settings, costs and sources of a plan.

    ``estimator`` is the name of the estimator of times; ``premise`` its assumption, if any, on which assumed times
    depend; ``arrivals`` the arrival process or trace, None for Poisson. ``precision`` and ``runtime`` apply to models
    without measurements on a GPU, None for their own types and ONNX Runtime; ``host_us`` is the host's time per launch,
    None for the runtime's usual time. ``found_by`` names the method that found the map, ``stopped_by`` the reason for
    an early end of the search. The other settings are those of `gpuprof.placement.problem.Options`.
    """

    version: Annotated[int, Field(ge=1, le=1)] = 1
    estimator: str = "database"
    premise: str | None = None
    arrivals: str | None = None
    fleet: tuple[PlannedDevices, ...] = ()
    confidence: Annotated[float, Field(ge=0, lt=1)] | None = None
    latency_budget: Annotated[float, Field(gt=0, le=1)] | None = None
    overhead_ms: _Milliseconds = 0.0
    max_batch: _Count = 256
    max_processes: _Count | None = None
    isolate: bool = False
    host: RecordedHostWork = RecordedHostWork()
    precision: str | None = None
    runtime: str | None = None
    host_us: Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)] | None = None
    slo_sha256: str | None = None
    database_sha256: str | None = None
    found_by: str | None = None
    stopped_by: str | None = None

    @field_validator("fleet")
    @classmethod
    def _require_distinct_devices(cls, fleet: tuple[PlannedDevices, ...]) -> tuple[PlannedDevices, ...]:
        names = [entry.device for entry in fleet]
        if len(set(names)) < len(names):
            raise ValueError("a device stands in the fleet more than once")
        return fleet

    @model_serializer(mode="wrap")
    def _omit_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit unknown fields, and options that were not taken."""
        return {key: value for key, value in write(self).items() if value is not None and value is not False}
