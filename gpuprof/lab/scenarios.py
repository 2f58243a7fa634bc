"""Scenarios of the papers, with the published measurements behind them as kernel databases.

ParvaGPU's and iGniter's profiles belong to their authors and are not shipped: they are fetched from their repositories
(``datasets/papers/published.toml``) when a suite needs them. The V100 table of Elvinger's thesis ships. Where a paper's
measurements are missing, rows are computed from others, and marked so.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Literal
from urllib.request import urlopen

import numpy as np

from gpuprof.domain.catalogue import datasets, device
from gpuprof.domain.demand import Demand, Slo, read_demands
from gpuprof.domain.estimate import Workload
from gpuprof.domain.share import Share
from gpuprof.errors import InputError, unknown_name
from gpuprof.estimators.igniter.igniter import (
    Coefficients,
    IgniterEstimator,
    WorkloadCoefficients,
    coefficients_path,
    write_coefficients,
)
from gpuprof.graph.dims import DEFAULT_CHANNELS, DEFAULT_SIDE
from gpuprof.kernel_db.importing import import_files
from gpuprof.kernel_db.records import read_records
from gpuprof.kernel_db.schema import ModelRow, RunRow
from gpuprof.kernel_db.store import KernelDb, Run, new_run_id
from gpuprof.placement.search_space import SHARE_STEP
from gpuprof.runtime.module_command import ANSWER_S
from gpuprof.simulator.trace import thesis_network_ms

PARVAGPU_DEVICE, IGNITER_DEVICE = "a100-80", "v100"
#: Shares in the database computed for USHER are multiples of this percentage.
USHER_STEP_PCT = 10.0
_USHER_KINDS = ("k80", "v100", "a100-80", "h100")


@cache
def read_scenarios() -> Mapping[str, Any]:
    """Return the content of ``datasets/papers/scenarios.toml``, whose head explains it."""
    return tomllib.loads((datasets() / "papers" / "scenarios.toml").read_text(encoding="utf-8"))


def find_published(data: Path, name: str) -> Path:
    """Return the folder of published measurements called ``name``, fetched into ``data`` if missing.

    Raises `InputError`, which names the source, when a file cannot be fetched, or is not the published one.
    """
    folder = data / name
    if folder.is_dir():
        return folder
    source = tomllib.loads((datasets() / "papers" / "published.toml").read_text(encoding="utf-8"))[name]
    data.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=data) as partial:
        for path, digest in source["files"].items():
            try:
                with urlopen(f"{source['raw']}/{path}", timeout=ANSWER_S) as answer:
                    content = answer.read()
            except OSError as error:
                raise InputError(
                    f"cannot fetch {path} of {source['repository']}: {error}",
                    f"copy its {source['what']} to FOLDER/{name}, and give --data FOLDER or GPUPROF_LAB_DATA",
                ) from None
            if hashlib.sha256(content).hexdigest() != digest:
                raise InputError(f"{path} of {source['repository']} is not the published file")
            file = Path(path).name
            (Path(partial) / source.get("renamed", {}).get(file, file)).write_bytes(content)
        shutil.copytree(partial, folder)
    return folder


def copy_name(model: str, copy: int) -> str:
    """Return the service name of a model's copy, numbered from 0."""
    return model if copy == 0 else f"{model}#{copy}"


def _multiply(demands: Sequence[Demand], copies: int) -> tuple[Demand, ...]:
    return tuple(
        replace(demand, model=copy_name(demand.model, copy), source_model=demand.source_model or demand.model)
        for copy in range(copies)
        for demand in demands
    )


def parvagpu_demands(data: Path, number: int, copies: int = 1) -> tuple[Demand, ...]:
    """Return scenario S1 … S6 (ParvaGPU, Table IV), every service ``copies`` times.

    Raises `InputError` when the data are not there.
    """
    folder = find_published(data, "parvagpu_a100")
    rates, limits = (
        (folder / f"SLO_{name}.csv").read_text(encoding="utf-8").splitlines()[number - 1].split(",")
        for name in ("req_rate", "latency")
    )
    models = sorted(path.stem for path in folder.glob("*.csv") if not path.stem.startswith("SLO"))
    demands = [
        Demand(model, float(rate), Slo(float(limit)))
        for model, rate, limit in zip(models, rates, limits, strict=True)  # in alphabetical order
        if rate != "N/A"
    ]
    return _multiply(demands, copies)


def listed_demands(suite: str, scenario: str, copies: int = 1) -> tuple[Demand, ...]:
    """Return the workloads that ``scenarios.toml`` lists for a scenario, each ``copies`` times."""
    table = read_scenarios()["suites"][suite]["scenarios"][scenario]
    demands = []
    for number, (model, slo_ms, rate_rps) in enumerate(table["workloads"], 1):
        demand = Demand(model, float(rate_rps), Slo(float(slo_ms)))
        service = replace(demand, model=f"{table['names']}{number}", source_model=model) if "names" in table else demand
        demands.append(service)
    return _multiply(demands, copies)


def usher_demands(rate_rps: float) -> tuple[Demand, ...]:
    """Return USHER's models at a total rate, divided so that each needs about the same part of a V100."""
    slos_ms = read_scenarios()["suites"]["usher"]["slo_ms"]
    best: dict[str, float] = {}
    for row in read_v100_table():
        if row.model in slos_ms and row.throughput_rps is not None:
            best[row.model] = max(best.get(row.model, 0.0), row.throughput_rps)
    total_rate = sum(best.values())
    return tuple(Demand(model, rate_rps * best[model] / total_rate, Slo(slo)) for model, slo in slos_ms.items())


def find_demands(suite: str, scenario: str, data: Path, copies: int = 1) -> tuple[Demand, ...]:
    """Return the demands of a paper's scenario, every service ``copies`` times.

    Raises `InputError` when published data are missing, or nothing says how the suite's services are multiplied.
    """
    if suite == "parvagpu":
        return parvagpu_demands(data, int(scenario[1:]), copies)
    if copies > 1 and suite != "igniter":
        raise InputError(f"the services of {suite}/{scenario} cannot be multiplied", "multiply parvagpu's or igniter's")
    if suite == "usher":
        return usher_demands(read_scenarios()["suites"]["usher"]["rate_rps"])
    return listed_demands(suite, scenario, copies)


def build_database(name: str, work: Path, data: Path) -> Path:
    """Write the database called ``name`` into ``work``, unless it exists, and return its folder.

    ``parvagpu``, ``igniter`` and ``thesis`` hold imported measurements; the rows of ``parvagpu-mps``,
    ``thesis-shares``, ``usher`` and ``usher-shares`` are computed from them, and marked so. Raises `InputError` when
    published data are missing.
    """
    if name not in _BUILDERS:
        raise unknown_name("database", name, list(_BUILDERS))
    folder = work / f"{name}-db"
    if not folder.exists():
        partial = work / f"{name}-db.new"
        work.mkdir(parents=True, exist_ok=True)
        _BUILDERS[name](KernelDb.create(partial), data)
        partial.rename(folder)
    return folder


def _import_parvagpu(database: KernelDb, data: Path) -> None:
    import_files(database, [find_published(data, "parvagpu_a100")])


def _import_igniter(database: KernelDb, data: Path) -> None:
    import_files(database, [find_published(data, "igniter_v100") / "config.jsonl"])
    measured = IgniterEstimator(database).coefficients(device(IGNITER_DEVICE))
    write_coefficients(coefficients_path(database.path, "t4"), "t4", *scale_coefficients(measured, "t4"))


def _import_thesis(database: KernelDb, _: Path | None = None) -> None:
    import_files(database, [Path(str(datasets() / "v100_profiles.csv"))])


def _compute_parvagpu_mps(database: KernelDb, data: Path) -> None:
    times = read_mps_latencies(find_published(data, "parvagpu_a100"))
    rows = [
        ModelRow("", workload.model, PARVAGPU_DEVICE, workload.batch, workload.share.sm_pct, latency_mean_ms=time)
        for workload, time in times.items()
    ]
    _append(database, PARVAGPU_DEVICE, rows, "shares by MPS as parts of the slices of the largest MIG instance")


def scale_v100(database: KernelDb, kinds: Sequence[str], step_pct: float | None = None) -> None:
    """Append the V100 table for other kinds of GPU, by the ratio of float32 peaks.

    ``step_pct``: shares are multiples of this step; a batch whose SM utilisation (WSM) exceeds the share takes longer
    by the ratio of the two; None: whole devices only. Measurements in the thesis are longer: resnet50 (batch 4, WSM
    36%) under 17.55% takes four times as long (§6.2.1), where this rule gives two.
    """
    v100 = device(IGNITER_DEVICE)
    for kind in kinds:
        ratio = v100.flops_per_s["float32"] / device(kind).flops_per_s["float32"]
        rows = [row for measured in read_v100_table() for row in _under_shares(measured, step_pct)]
        slower = [replace(row, latency_mean_ms=ratio * (row.latency_mean_ms or 0.0)) for row in rows]
        _append(database, kind, slower, "the V100's times by the ratio of float32 peaks, and by WSM under shares")


_BUILDERS: Mapping[str, Callable[[KernelDb, Path], None]] = MappingProxyType(
    {
        "parvagpu": _import_parvagpu,
        "parvagpu-mps": _compute_parvagpu_mps,
        "igniter": _import_igniter,
        "thesis": _import_thesis,
        "thesis-shares": lambda database, _: scale_v100(database, (IGNITER_DEVICE,), SHARE_STEP),
        "usher": lambda database, _: scale_v100(database, _USHER_KINDS),
        "usher-shares": lambda database, _: scale_v100(database, _USHER_KINDS, USHER_STEP_PCT),
    }
)


def _append(database: KernelDb, kind: str, rows: Sequence[ModelRow], notes: str) -> None:
    now = datetime.now(UTC)
    run = RunRow(
        run_id=new_run_id(now),
        started_at=now,
        device=kind,
        collector="computed",
        collector_version="gpuprof lab",
        model="",
        notes=f"no measurement: {notes}",
    )
    database.append(Run(run, models=[replace(row, run_id=run.run_id, device=kind) for row in rows]))


@cache
def read_v100_table() -> tuple[ModelRow, ...]:
    """Return the rows that an import of the V100 table of Elvinger's thesis gives (Tables 5.2, 6.5 and A.1)."""
    return tuple(_read_imported(Path(str(datasets() / "v100_profiles.csv"))))


def _read_imported(path: Path) -> list[ModelRow]:
    """Return the rows that an import of a file or a folder gives."""
    with TemporaryDirectory() as folder:
        database = KernelDb.create(Path(folder) / "db")
        import_files(database, [path])
        return read_records(database, ModelRow)


def stretch_time_ms(model: str, batch: int, share_pct: float = 100.0) -> float:
    """Return the milliseconds of a batch on the V100 under a share.

    The time is stretched where the batch keeps more SMs busy than the share has. Raises `InputError` for a model or a
    batch beyond the table.
    """
    rows = [row for row in read_v100_table() if row.model == model and row.wavg_sm_util_pct is not None]
    times = {row.batch: _stretch(row, share_pct).latency_mean_ms or 0.0 for row in rows if row.latency_mean_ms}
    if batch > max(times, default=0):
        raise InputError(f"{model} was not measured at batch {batch}")
    return float(np.interp(batch, sorted(times), [times[size] for size in sorted(times)]))


def _under_shares(measured: ModelRow, step_pct: float | None) -> Iterator[ModelRow]:
    """Yield a row unchanged, or under each share; rows lacking a time, or the WSM that shares need, are skipped."""
    if measured.latency_mean_ms is None:
        return
    if step_pct is None:
        yield replace(measured, throughput_rps=None)
    elif measured.wavg_sm_util_pct is not None:
        for number in range(1, round(100.0 / step_pct) + 1):
            yield _stretch(measured, step_pct * number)


def _stretch(measured: ModelRow, share_pct: float) -> ModelRow:
    """Return a row under a share, without its requirements, which policies would take as met by the share."""
    return replace(
        measured,
        sm_share_pct=share_pct,
        latency_mean_ms=(measured.latency_mean_ms or 0.0) * max(1.0, (measured.wavg_sm_util_pct or 0.0) / share_pct),
        throughput_rps=None,
        max_occupancy_pct=None,
        wavg_occupancy_pct=None,
        wavg_sm_util_pct=None,
    )


def scale_coefficients(measured: Coefficients, kind: str) -> Coefficients:
    """Return substitute coefficients for another GPU, scaled from the V100's.

    Times are scaled by the ratio of float32 peaks, the others by the power limit. A batch draws the same part of the
    power limit, the clock falls by as much for the same part, and the L2 cache pressure of a batch is that on the
    V100. Raises `InputError` when the catalogue has no power limit of the device.
    """
    v100_device, target = device(IGNITER_DEVICE), device(kind)
    slower = v100_device.flops_per_s["float32"] / target.flops_per_s["float32"]
    if v100_device.max_power_w is None or target.max_power_w is None:
        raise InputError(f"the catalogue has no power limit of {kind}")
    power, (v100, workloads) = target.max_power_w / v100_device.max_power_w, measured
    hardware = replace(
        v100, max_power_w=v100.max_power_w * power, idle_power_w=v100.idle_power_w * power, alpha_f=v100.alpha_f / power
    )
    return hardware, {name: _slow_down(workload, slower, power) for name, workload in workloads.items()}


def _slow_down(workload: WorkloadCoefficients, slower: float, power: float) -> WorkloadCoefficients:
    k1, k2, k3, k4, k5 = workload.active
    return replace(
        workload,
        active=(k1 * slower, k2 * slower, k3 * slower, k4, k5 * slower),
        power=(workload.power[0] * slower * power, workload.power[1] * power),
        l2=(workload.l2[0] * slower, workload.l2[1]),
    )


def read_mps_latencies(folder: Path) -> dict[Workload, float]:
    """Return ms of a batch in one process under each multiple of 2.5% by MPS, from ParvaGPU's MIG instances.

    The throughput is interpolated linearly in the slices between the measured instances, and from 0. Only batches that
    fit the largest instance are computed.
    """
    rates_of: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for row in _read_imported(folder):
        if row.processes == 1 and row.throughput_rps:
            rates_of[row.model, row.batch][int(str(row.mig_profile).partition("g")[0])] = row.throughput_rps
    largest: defaultdict[str, int] = defaultdict(int)
    for (model, _), rates in rates_of.items():
        largest[model] = max(largest[model], *rates)
    shares = [SHARE_STEP * number for number in range(1, round(100.0 / SHARE_STEP) + 1)]
    return {
        Workload(model, batch, Share(pct)): 1000.0 * batch / _rate_at(rates, pct / 100.0 * largest[model])
        for (model, batch), rates in rates_of.items()
        if largest[model] in rates
        for pct in shares
    }


def _rate_at(rates: Mapping[int, float], slices: float) -> float:
    points = sorted({0: 0.0, **rates}.items())
    for (low, below), (high, above) in pairwise(points):
        if slices <= high + 1e-9:
            return below + (slices - low) / (high - low) * (above - below)
    return points[-1][1]


#: Serving of a map and times of its batches:
#:
#: - ``server``: gpuprof's own rules, the map's planned times;
#: - ``batches``: even arrivals, no refusals, interpolated measured times (ParvaGPU);
#: - ``neighbours``: even arrivals, times with all neighbours by the scenario's estimator (iGniter);
#: - ``cluster``: the router of Elvinger's thesis, times stretched under shares of a V100;
#: - ``stretched``: gpuprof's own rules on that cluster, with the same times.
Manner = Literal["server", "batches", "neighbours", "cluster", "stretched"]

#: Bytes of a request: 3 × 224 × 224 float32, or 512 token numbers of 64 bits (thesis §6.1.2).
_IMAGE_BYTES = 4.0 * DEFAULT_CHANNELS * DEFAULT_SIDE**2
_TEXT_BYTES = 4_096.0
_LANGUAGE_MODELS = frozenset({"bert", "bloom_560", "gpt2", "t5", "xlnet"})


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a simulated scenario."""

    seconds: float
    warmup_s: float = 0.0
    arrived: float = 1.0  #: Part of the target rate that clients reach.
    seed: int = 0


def leg_ms(model: str, batch: int) -> float:
    """Return the time in ms in which a full batch travels from the thesis's router to its node (§4.6.2)."""
    return thesis_network_ms(batch * (_TEXT_BYTES if model in _LANGUAGE_MODELS else _IMAGE_BYTES))


@dataclass(frozen=True, slots=True)
class Setup:
    """Conditions under which a policy plans and its map is served."""

    database: str  #: Name in `gpuprof.lab.publications`, or the path of a kernel database.
    estimator: str
    manner: Manner
    latency_budget: float | None = None  #: Part of the SLO that a batch may take; None: queueing decides.
    max_processes: int | None = None
    overhead_ms: float = 0.0
    limit_s: float = 5.0
    gpus: str = ""  #: Devices that only this policy may use; empty: the scenario's.
    is_cut: bool = False  #: Plans for as many devices as needed and uses the first (iGniter in the thesis, §5.1.5).


@dataclass(frozen=True, slots=True)
class Scenario:
    """Demands, the devices to place them on, and the traffic to simulate."""

    suite: str
    name: str
    demands: tuple[Demand, ...]
    gpus: str  #: Devices in the form of ``--gpus``: ``"v100:4"``, ``"a100-80"``; or a fleet.toml.
    #: Conditions by policy, with its options or without; ``""``: all other policies; ``"@name"``: a policy written
    #: ``policy@name``.
    setups: Mapping[str, Setup]
    traffic: Traffic | None  #: None: the map is not simulated.

    @property
    def title(self) -> str:
        """``suite/name``."""
        return f"{self.suite}/{self.name}"

    def setup(self, policy: str) -> Setup:
        """Return a policy's conditions: those named after ``@``, its own with or without options, or the defaults.

        Raises `InputError` for a name behind ``@`` that the scenario does not have.
        """
        _, at, name = policy.partition("@")
        if at and f"@{name}" not in self.setups:
            policies = [policy_name.removeprefix("@") for policy_name in self.setups if policy_name.startswith("@")]
            raise unknown_name(f"setup of {self.title}", name, policies)
        if at:
            return self.setups[f"@{name}"]
        return self.setups.get(policy) or self.setups.get(policy.partition("+")[0]) or self.setups[""]

    def vary(self, rate: float = 1.0, slo: float = 1.0, gpus: str | None = None) -> Scenario:
        """Return the scenario with rates and SLOs multiplied, and other devices; a number sets their count."""
        demands = tuple(
            replace(
                demand, rate_rps=demand.rate_rps * rate, slo=replace(demand.slo, latency_ms=demand.slo.latency_ms * slo)
            )
            for demand in self.demands
        )
        kind = self.gpus.partition(":")[0]
        fleet = self.gpus if gpus is None else f"{kind}:{gpus}" if gpus.isdigit() else gpus
        return replace(self, demands=demands, gpus=fleet)


_NAME = re.compile(r"(?P<name>[^/]+?)(?:x(?P<copies>[1-9]\d{0,3}))?")


def suite_names() -> dict[str, tuple[str, ...]]:
    """Return the names of the scenarios of each suite; ``xN`` behind a published one multiplies its services."""
    return {suite: tuple(table["scenarios"]) for suite, table in read_scenarios()["suites"].items()}


def list_scenarios(suite: str, data: Path) -> list[Scenario]:
    """Return the scenarios of a suite or a folder, or the scenario with a title.

    ``suite``: ``"parvagpu"``; ``"parvagpux10"`` for ten times the services of all its scenarios; ``"parvagpu/S5x3"``
    for a single scenario; or a folder (`read_folder`). Raises `InputError` for an unknown name.
    """
    suites = suite_names()
    if Path(suite).is_dir() and suite not in suites:
        return read_folder(Path(suite))
    group, _, name = suite.partition("/")
    match = _NAME.fullmatch(group)
    base, copies = (match["name"], match["copies"]) if match else (group, None)
    if base not in suites:
        raise unknown_name("suite", suite, [*suites, "a folder with slo.csv files"])
    names = [name] if name else [f"{scenario}x{copies}" if copies else scenario for scenario in suites[base]]
    return [find_scenario(base, scenario, data) for scenario in names]


def find_scenario(suite: str, name: str, data: Path) -> Scenario:
    """Return a scenario of a paper.

    Raises `InputError` when there is none of the name, or its data are not there.
    """
    tables = read_scenarios()
    table = tables["suites"][suite]
    match = _NAME.fullmatch(name)
    base, copies = (match["name"], int(match["copies"] or 1)) if match else (name, 1)
    if base not in table["scenarios"]:
        raise unknown_name(f"scenario of {suite}", name, list(table["scenarios"]))
    scenario = table["scenarios"][base]
    demands = find_demands(suite, base, data, copies)
    setups = {
        "" if policy == "default" else policy: _make_setup(tables["setups"][key], demands)
        for policy, key in table["setups"].items()
    }
    traffic = None
    if "traffic" in table:
        traffic = Traffic(**table["traffic"], arrived=scenario.get("arrived", 1.0))
    return Scenario(suite, name, demands, scenario.get("gpus", table["gpus"]), setups, traffic)


def _make_setup(table: Mapping[str, Any], demands: Sequence[Demand]) -> Setup:
    fields = dict(table)
    if batch := fields.pop("overhead_batch", None):
        # Batches hold requests of a single model: the plan allows for the longest transfer among the models.
        fields["overhead_ms"] = max(leg_ms(demand.source_model or demand.model, batch) for demand in demands)
    return Setup(**fields)


def read_folder(folder: Path) -> list[Scenario]:
    """Return the scenarios of a folder: each slo.csv on each fleet, with the folder's database.

    The folder holds ``*.csv`` as `gpuprof.place` reads them, any number of fleets as ``*.toml`` (none: as many as
    needed of the profiled device) and the kernel database ``gpuprof-db``. Raises `InputError` when there is no
    demand, or a file is wrong.
    """
    files = sorted(folder.glob("*.csv"))
    database = folder / "gpuprof-db"
    if not files or not database.is_dir():
        missing = "no .csv with demands" if not files else "no kernel database called gpuprof-db"
        raise InputError(
            f"{folder} holds {missing}", "put slo.csv files and gpuprof-db, perhaps fleets as .toml, into it"
        )
    setup = Setup(str(database), "database", "server")
    fleets: Sequence[Path | None] = sorted(folder.glob("*.toml")) or [None]
    return [
        Scenario(
            suite=folder.name or "folder",
            name=file.stem if fleet is None else f"{file.stem}-{fleet.stem}",
            demands=tuple(read_demands(file)),
            gpus="" if fleet is None else str(fleet),
            setups={"": setup},
            traffic=Traffic(10.0, 1.0),
        )
        for file in files
        for fleet in fleets
    ]
