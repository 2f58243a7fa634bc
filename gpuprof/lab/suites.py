"""Scenarios: demands, devices, and the rules by which a paper plans and serves them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuprof.domain.demand import Demand, read_demands
from gpuprof.errors import InputError, unknown_name
from gpuprof.lab.publications import find_demands, read_scenarios
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


def list_scenarios(suite: str, data: Path | None) -> list[Scenario]:
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


def find_scenario(suite: str, name: str, data: Path | None) -> Scenario:
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
