"""The lines of ``gpuprof place`` that stand for what a reproduction places, and the files of demands that they read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuprof.domain.demand import Demand
from gpuprof.placement.policies import Policy, make_policy

#: Where demands, databases and maps go.
WORK = Path("reproduced")


def split_policy(named: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options of a policy as ``--policy`` and, behind it, ``-O`` give them."""
    name, *options = named.split(" -O ")
    return name, dict(option.split("=", 1) for option in options)


def make_named_policy(named: str) -> Policy:
    """Return the policy that ``gpuprof place`` makes of ``--policy`` and, behind it, ``-O``."""
    return make_policy(*split_policy(named))


def write_demands(path: Path, demands: Sequence[Demand], models: Mapping[str, str] | None = None) -> Path:
    """Write an slo.csv, unless it is there as it would be written, and return its path.

    Parameters
    ----------
    path : Path
    demands : sequence of Demand
    models : mapping of str to str, optional
        Service → model of those that do not name theirs.
    """
    known = models or {}
    lines = [
        f"{one.model},{one.source_model or known.get(one.model, one.model)},{one.rate_rps!r},{one.slo.latency_ms!r}"
        for one in demands
    ]
    text = "\n".join(["service,model,rate_rps,slo_ms", *lines]) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


@dataclass
class PlaceLines:
    """Collects the lines of one reproduction, each once.

    Attributes
    ----------
    work : Path
        Where demands are written, and where the lines have their databases and maps.
    """

    work: Path = field(default_factory=lambda: WORK)
    _lines: dict[str, None] = field(default_factory=dict, init=False)

    def add_preparation(self, line: str) -> None:
        """Add a line that makes a database."""
        self._lines[line] = None

    def add_import(self, source: Path, database: str) -> Path:
        """Add the import of a publication, and return the database."""
        target = self.work / database
        self.add_preparation(shlex.join(("gpuprof", "db", "import", str(source), "--db", str(target))))
        return target

    def add_stand_in(self, database: str, *arguments: str) -> Path:
        """Add the making of a database by `stand_in_db`, and return the database."""
        target = self.work / database
        self.add_preparation(shlex.join(("python", "-m", "bench.reproduce.stand_in_db", str(target), *arguments)))
        return target

    def add_place(
        self,
        name: str,
        demands: Sequence[Demand],
        database: Path,
        rules: Sequence[str],
        policy: str,
        models: Mapping[str, str] | None = None,
    ) -> None:
        """Write the demands and add the line that places them.

        Parameters
        ----------
        name : str
            Of the file of demands and, with the policy's behind it, of the map.
        demands : sequence of Demand
        database : Path
        rules : sequence of str
            Estimator, budget, devices and limits, as ``gpuprof place`` takes them.
        policy : str
            As `split_policy` reads it.
        models : mapping of str to str, optional
            Service → model.
        """
        slo = write_demands(self.work / f"{name}.csv", demands, models)
        fleet = rules[list(rules).index("--gpus") + 1]
        output = self.work / f"{re.sub('[^a-z0-9]+', '-', f'{name}-{policy}-{fleet}'.lower())}.json"
        given = ("--slo-file", str(slo), "--db", str(database), *rules, "--policy", *policy.split())
        self._lines[shlex.join(("gpuprof", "place", *given, "--best-effort", "-o", str(output)))] = None

    def lines(self) -> tuple[str, ...]:
        """Return the lines in the order in which they can be typed."""
        return tuple(self._lines)
