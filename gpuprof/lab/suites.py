"""Scenarios: demands, devices, and the rules by which a paper plans and serves them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from gpuprof.domain.demand import Demand, Slo, read_demands
from gpuprof.errors import InputError, unknown_name
from gpuprof.lab.publications import igniter_demands, parvagpu_demands, usher_demands
from gpuprof.lab.simulation import Manner, Traffic, leg_ms


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
    """Demands on devices."""

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
        """Return the conditions for a policy: named ones, its own with or without options, else the general ones.

        Raises `InputError` for a name behind ``@`` that the scenario does not have.
        """
        _, at, name = policy.partition("@")
        if at and f"@{name}" not in self.setups:
            known = [one.removeprefix("@") for one in self.setups if one.startswith("@")]
            raise unknown_name(f"setup of {self.title}", name, known)
        if at:
            return self.setups[f"@{name}"]
        return self.setups.get(policy) or self.setups.get(policy.partition("+")[0]) or self.setups[""]

    def vary(self, rate: float = 1.0, slo: float = 1.0, gpus: str | None = None) -> Scenario:
        """Return the scenario with rates and SLOs multiplied, and other devices; a number sets their count."""
        demands = tuple(
            replace(one, rate_rps=one.rate_rps * rate, slo=replace(one.slo, latency_ms=one.slo.latency_ms * slo))
            for one in self.demands
        )
        kind = self.gpus.partition(":")[0]
        fleet = self.gpus if gpus is None else f"{kind}:{gpus}" if gpus.isdigit() else gpus
        return replace(self, demands=demands, gpus=fleet)


#: Policies that share a GPU by MPS alone, in ParvaGPU's comparison.
_BY_MPS = ("gpulet", "igniter", "gslice")
#: ParvaGPU's published code tests latency < 0.45 × SLO where the paper states one half, and uses up to five processes.
_PARVAGPU = Setup("parvagpu", "measured", "batches", latency_budget=0.45, max_processes=5, limit_s=20.0)
_PARVAGPU_MPS = Setup("parvagpu-mps", "usher", "batches", latency_budget=0.45)
#: iGniter leaves half of the SLO to batching (§3.1, equation 12).
_IGNITER = Setup("igniter", "igniter", "neighbours", latency_budget=0.5)
_THESIS_WHOLE = Setup("thesis", "usher", "cluster", latency_budget=1.0, limit_s=20.0)
_THESIS_IGNITER = Setup("thesis-shares", "usher", "cluster", latency_budget=0.5, is_cut=True)
_USHER_WHOLE = Setup("usher", "usher", "server", latency_budget=1.0)
_USHER_SHARES = Setup("usher-shares", "usher", "server", latency_budget=1.0)
#: Policies that plan by requirements, not by times under shares.
_BY_REQUIREMENTS = ("usher", "milp")
#: Batch whose transfer time is planned for in the queueing plans of the thesis's cluster.
_PLANNED_BATCH = 16
_VISION = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
#: Models, requests/s of each, SLO in ms, V100s, part of the rate that clients reach (thesis §5.4, §6.2, §6.3, §A.2).
_THESIS: Mapping[str, tuple[tuple[str, ...], float, float, int, float]] = MappingProxyType(
    {
        "example1": (("alexnet", "gpt2", "resnet50", "t5"), 400.0, 200.0, 4, 1.0),
        "example2": (("resnet50", "vgg19", "mobilenet_v2", "gpt2", "bert"), 400.0, 300.0, 4, 1.0),
        "example3": (("resnet50", "alexnet", "mobilenet_v2", "bert"), 500.0, 200.0, 4, 1.0),
        "vision": (_VISION, 500.0, 200.0, 4, 433.34 / 500.0),
        "mixed": (("resnet50", "mobilenet_v2", "bert", "gpt2"), 300.0, 300.0, 4, 1.0),
        "load": (_VISION, 200.0, 150.0, 4, 1.0),
        "weighted": (("alexnet", "bert", "gpt2", "mobilenet_v2", "resnet50"), 125.0, 150.0, 4, 1.0),
    }
)
#: The appendix gives vision models twice the load of language models (§A.2.3).
_WEIGHTED_TWICE = frozenset({"alexnet", "mobilenet_v2", "resnet50"})
#: USHER's simulated load, 15 million requests/s, over this: its decision time grows with the square of the replicas.
USHER_SCALE = 100.0
_USHER_RPS = 15e6
_NAME = re.compile(r"(?P<name>[^/]+?)(?:x(?P<copies>[1-9]\d{0,3}))?")

#: Suite → names of its scenarios; ``xN`` behind a scenario of the first two multiplies its services.
SUITES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "parvagpu": ("S1", "S2", "S3", "S4", "S5", "S6"),
        "igniter": ("Table1", "W12"),
        "thesis": tuple(_THESIS),
        "usher": ("V100", "kinds"),
    }
)


def list_scenarios(suite: str, data: Path | None) -> list[Scenario]:
    """Return the scenarios of a suite or a folder, or the scenario with a title.

    ``suite``: ``"parvagpu"``; ``"parvagpux10"`` for ten times the services of all its scenarios; ``"parvagpu/S5x3"``
    for a single scenario; or a folder (`read_folder`). Raises `InputError` for an unknown name.
    """
    if Path(suite).is_dir() and suite not in SUITES:
        return read_folder(Path(suite))
    group, _, name = suite.partition("/")
    match = _NAME.fullmatch(group)
    base, copies = (match["name"], match["copies"]) if match else (group, None)
    if base not in SUITES:
        raise unknown_name("suite", suite, [*SUITES, "a folder with slo.csv files"])
    names = [name] if name else [f"{one}x{copies}" if copies else one for one in SUITES[base]]
    return [find_scenario(base, one, data) for one in names]


def find_scenario(suite: str, name: str, data: Path | None) -> Scenario:
    """Return a scenario of a paper.

    Raises `InputError` when there is none of the name, or its data are not there.
    """
    match = _NAME.fullmatch(name)
    base, copies = (match["name"], int(match["copies"] or 1)) if match else (name, 1)
    if base not in SUITES[suite] or (copies > 1 and suite in ("thesis", "usher")):
        raise unknown_name(f"scenario of {suite}", name, list(SUITES[suite]))
    if suite == "parvagpu":
        setups = {"": _PARVAGPU, **dict.fromkeys(_BY_MPS, _PARVAGPU_MPS)}
        demands = parvagpu_demands(data, int(base[1:]), copies)
        return Scenario(suite, name, demands, "a100-80", setups, Traffic(5.0, 1.0))
    if suite == "igniter":
        demands = igniter_demands(1 if base == "Table1" else 3, copies)
        return Scenario(suite, name, demands, "v100", {"": _IGNITER}, Traffic(30.0, 1.0))
    if suite == "usher":
        setups = {"": _USHER_SHARES, **dict.fromkeys((*_BY_REQUIREMENTS, "shepherd"), _USHER_WHOLE)}
        setups["@whole"] = setups["shepherd"] = replace(_USHER_WHOLE, estimator="measured")
        setups["@h100"] = replace(_USHER_SHARES, gpus="h100")
        gpus = "v100" if base == "V100" else "k80,v100,a100-80,h100"
        return Scenario(suite, name, usher_demands(_USHER_RPS / USHER_SCALE), gpus, setups, None)
    models, rate_rps, slo_ms, gpus_count, arrived = _THESIS[base]
    demands = tuple(Demand(one, rate_rps * _weight(base, one), Slo(slo_ms)) for one in models)
    # Batches hold requests of a single model: the plan allows for the longest transfer among the models.
    queueing = Setup(
        "thesis-shares", "usher", "stretched", overhead_ms=max(leg_ms(model, _PLANNED_BATCH) for model in models)
    )
    setups = {"": queueing, **dict.fromkeys(_BY_REQUIREMENTS, _THESIS_WHOLE), "igniter": _THESIS_IGNITER}
    # gpuprof's own policy on USHER's premise, served by the same times as everything else.
    setups["@usher-premise"] = replace(queueing, database="thesis")
    return Scenario(suite, name, demands, f"v100:{gpus_count}", setups, Traffic(8.0, arrived=arrived))


def _weight(scenario: str, model: str) -> float:
    return 2.0 if scenario == "weighted" and model in _WEIGHTED_TWICE else 1.0


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
