"""Demands of users, rates and latency objectives, and the reader of slo.csv."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuprof.domain.file_access import decode_text, read_input
from gpuprof.domain.sizes import parse_mix
from gpuprof.domain.validation import Count, NotNegative, check_fields
from gpuprof.errors import InputError

_REQUIRED = ("model", "rate_rps", "slo_ms")
_OPTIONAL = ("service", "file", "percentile", "min_goodput_rps", "priority", "max_replicas", "dims")


@check_fields
@dataclass(frozen=True, slots=True)
class Slo:
    """A latency objective: ``percentile`` percent of the requests within ``latency_ms``.

    Examples
    --------
    >>> Slo(50.0)
    Slo(latency_ms=50.0, percentile=99.0)
    """

    latency_ms: float
    percentile: float = 99.0


@check_fields
@dataclass(frozen=True, slots=True)
class Demand:
    """Demand for a service: a model with its own rate and objective.

    Attributes
    ----------
    model : str
        Name of the service in the map and for its clients. Without ``source_model``, also the name of the model in the
        kernel database, or the path of an ONNX file; ``"detector>classifier"`` is a chain of models, whose SLO is
        divided among them.
    rate_rps : float
        Requests per second.
    slo : Slo
    min_goodput_rps : float or None
        Floor on a fixed fleet: below it the demand is treated as not met at all; None: no floor.
    priority : int
        Demands of higher priority are served first where capacity is short.
    max_replicas : int or None
    source_model : str or None
        Model run by the service: a name in the kernel database, or the path of an ONNX file.
    file : str or None
        Path of the model's ONNX file, where its name in the kernel database is given.
    dims : str or None
        Sizes of the model's free dimensions in requests, ``"seq=128"``, or their distribution,
        ``"seq=64:0.7|256:0.3"``; None: the measured or usual sizes.
    """

    model: str
    rate_rps: float
    slo: Slo
    min_goodput_rps: NotNegative | None = None
    priority: int = 0
    max_replicas: Count | None = None
    source_model: str | None = None
    file: str | None = None
    dims: str | None = None

    def __post_init__(self) -> None:
        if self.dims is not None:
            parse_mix(self.dims)

    @property
    def steps(self) -> tuple[str, ...]:
        """The models of a chain, in the order of execution; empty for a single model."""
        names = tuple(name.strip() for name in (self.source_model or self.model).split(">"))
        return names if len(names) > 1 else ()


class DemandFile(tuple[Demand, ...]):
    """The demands of an slo.csv with the hash of its bytes, since a pipe can be read only once.

    Attributes
    ----------
    sha256 : str
    """

    sha256: str


def read_demands(path: Path) -> DemandFile:
    """Read slo.csv: header ``model,rate_rps,slo_ms`` and optionally the other fields of `Demand`.

    Raises `InputError` with the line number: a missing or unknown column, a number that cannot be parsed, is not finite
    or has the wrong sign, a repeated model, or a file without demands.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "slo.csv")
    ...     _ = path.write_text("model,rate_rps,slo_ms\\nresnet50,100,50\\n")
    ...     (demand,) = read_demands(path)
    >>> demand.model, demand.rate_rps, demand.slo
    ('resnet50', 100.0, Slo(latency_ms=50.0, percentile=99.0))
    """
    data = read_input(path, "name a CSV file of demands")
    demands = DemandFile(_parse_rows(decode_text(data, path), str(path)))
    demands.sha256 = hashlib.sha256(data).hexdigest()
    if not demands:
        raise InputError(f"{path} holds no demands", "add a line such as resnet50,100,50")
    return demands


def is_path(model: str) -> bool:
    """Return whether a demand names its model by a path."""
    return model.endswith(".onnx") or os.sep in model


def model_name(model: str) -> str:
    """Return the name of a demand's model: for a file its stem, for a chain the names of its steps."""
    steps = (step.strip() for step in model.split(">"))
    return ">".join(Path(step).stem if is_path(step) else step for step in steps)


def name_demand(demand: Demand) -> Demand:
    """Return a demand with names in place of paths; ``source_model`` only where the service has another name."""
    name = demand.model if demand.source_model else model_name(demand.model)
    source = model_name(demand.source_model or demand.model)
    return replace(demand, model=name, source_model=None if source == name else source)


def join_demands(name: str, demands: Sequence[Demand]) -> Demand:
    """Return the demand for a model that serves all of ``demands``: their total rate within the tightest objective."""
    floors = [demand.min_goodput_rps for demand in demands if demand.min_goodput_rps is not None]
    counts = [demand.max_replicas for demand in demands if demand.max_replicas is not None]
    return Demand(
        name,
        math.fsum(demand.rate_rps for demand in demands),
        Slo(min(demand.slo.latency_ms for demand in demands), max(demand.slo.percentile for demand in demands)),
        min_goodput_rps=math.fsum(floors) if floors else None,
        priority=max(demand.priority for demand in demands),
        max_replicas=min(counts) if counts else None,
    )


def require_possible(demand: Demand) -> None:
    """Raise `InputError` for values out of range; `read_demands` also names the line of slo.csv."""
    limits = (
        # A lower rate is a request in thirty years; a higher rate, millions of devices, is a typing error.
        ("rate_rps", demand.rate_rps, 1e-9, 1e7),
        ("latency_ms of the SLO", demand.slo.latency_ms, math.ulp(0.0), sys.float_info.max),
        ("percentile of the SLO", demand.slo.percentile, 1.0, 99.999),
        ("min_goodput_rps", demand.min_goodput_rps or 0.0, 0.0, demand.rate_rps),
    )
    for name, value, low, high in limits:
        if not low <= value <= high:
            bounds = "above 0 and finite" if high == sys.float_info.max else f"from {low:g} to {high:,.6g}"
            raise InputError(f"{name} of {demand.model!r} must be a number {bounds} but got {value!r}")


def _parse_rows(text: str, where: str) -> Iterator[Demand]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: Sequence[str] | None = None
    lines_by_model: dict[str, int] = {}
    try:
        for row in rows:
            if not any(cell.strip() for cell in row) or row[0].lstrip().startswith("#"):
                continue
            line = rows.line_num
            if header is None:
                header = _check_header([cell.strip().lower() for cell in row], where, line)
                continue
            if len(row) != len(header):
                raise InputError(
                    f"{where}:{line}: {len(row)} fields where the header has {len(header)}",
                    "leave none out; an empty one is written as nothing between commas",
                )
            demand = _parse_demand(dict(zip(header, (cell.strip() for cell in row), strict=True)), where, line)
            if demand.model in lines_by_model:
                raise InputError(
                    f"{where}:{line}: {demand.model!r} was already asked for in line {lines_by_model[demand.model]}",
                    "a column service names what asks for the same model at another rate or SLO",
                )
            lines_by_model[demand.model] = line
            yield demand
    except csv.Error as error:
        raise InputError(f"{where}:{rows.line_num}: not CSV: {error}", "close each quotation mark") from None


def _check_header(header: list[str], where: str, line: int) -> list[str]:
    if separator := next((sign for sign in ";\t|" if len(header) == 1 and sign in header[0]), None):
        raise InputError(
            f"{where}:{line}: fields are separated by {separator!r}, not by commas", "it must be model,rate_rps,slo_ms"
        )
    if missing := [name for name in _REQUIRED if name not in header]:
        raise InputError(f"{where}:{line}: the header lacks {', '.join(missing)}", "it must be model,rate_rps,slo_ms")
    if unknown := [name for name in header if name not in _REQUIRED + _OPTIONAL]:
        raise InputError(
            f"{where}:{line}: unknown column {', '.join(repr(name) for name in unknown)}",
            f"known: {', '.join(_REQUIRED + _OPTIONAL)}",
        )
    if len(set(header)) != len(header):
        raise InputError(f"{where}:{line}: a column stands twice in the header", "leave one of them out")
    return header


def _parse_demand(fields: dict[str, str], where: str, line: int) -> Demand:
    def number(name: str) -> float:
        try:
            return float(fields[name].replace("_", "x"))  # Python alone reads 1_0 as 10
        except ValueError:
            fix = "no units, no percent sign, 1000 as 1000"
            raise InputError(f"{name} must be a number but got {fields[name]!r}", fix) from None

    def whole(name: str) -> int:
        value = number(name)
        if not value.is_integer():
            raise InputError(f"{name} must be a whole number but got {fields[name]}")
        return int(value)

    present = {name for name in _OPTIONAL if fields.get(name)}
    try:
        if not fields["model"]:
            raise InputError("model is empty", "name a model of the database or an ONNX file")
        demand = Demand(
            model=fields["service"] if "service" in present else fields["model"],
            rate_rps=number("rate_rps"),
            slo=Slo(number("slo_ms"), number("percentile") if "percentile" in present else 99.0),
            min_goodput_rps=number("min_goodput_rps") if "min_goodput_rps" in present else None,
            priority=whole("priority") if "priority" in present else 0,
            max_replicas=whole("max_replicas") if "max_replicas" in present else None,
            source_model=fields["model"] if "service" in present else None,
            file=fields["file"] if "file" in present else None,
            dims=str(parse_mix(fields["dims"])) if "dims" in present else None,
        )
        require_possible(demand)
    except InputError as error:
        raise InputError(f"{where}:{line}: {error.message}", error.fix) from None
    return demand
