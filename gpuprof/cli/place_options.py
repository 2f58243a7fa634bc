"""Options of ``gpuprof place`` alone, in groups: who decides, and what is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.output import say
from gpuprof.errors import InfeasibleError

if TYPE_CHECKING:
    from gpuprof.domain.deployment import DeploymentMap
    from gpuprof.placement.policies import Policy
    from gpuprof.placement.problem import Problem


@dataclass(frozen=True)
class Choice:
    """Which policy decides, and how it searches."""

    policy: Annotated[str | None, typer.Option(help="Name, or package.module:Class.")] = None
    policy_option: Annotated[
        list[str] | None, typer.Option("-O", "--policy-option", help="KEY=VALUE of the policy; may be repeated.")
    ] = None
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which the best map so far is taken.")] = None
    seed: Annotated[int, typer.Option(help="Of policies that draw random numbers.")] = 0

    def made(self) -> Policy:
        """Return the policy.

        Raises
        ------
        InputError
            When there is none of this name, or it has no such option.
        """
        from gpuprof.placement.policies import DEFAULT, make_policy

        return make_policy(self.policy or DEFAULT, pairs(self.policy_option or []))


@dataclass(frozen=True)
class Written:
    """Which map is written, and where."""

    output: Annotated[Path, typer.Option("-o", "--output", help="Where the map is written.")] = Path("map.json")
    previous: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="MAP", help="Map that runs now: of equally good maps, move the fewest replicas."
        ),
    ] = None
    merge: Annotated[
        bool, typer.Option("--merge", help="Let models that share a device and weights run as one graph where it pays.")
    ] = False
    best_effort: Annotated[bool, typer.Option(help="Write the map even when some demands cannot be met.")] = False
    created: Annotated[str | None, typer.Option(help="Time to write into the map; none, or SOURCE_DATE_EPOCH.")] = None

    def running(self) -> DeploymentMap | None:
        """Return the map that runs now, None where none was named.

        Raises
        ------
        InputError
            When it cannot be read.
        """
        from gpuprof.domain.deployment import read_map

        return None if self.previous is None else read_map(self.previous)

    def merged(self, problem: Problem, deployment: DeploymentMap, db: Path | None) -> DeploymentMap:
        """Return the map with its models merged where that is asked and pays, and say what became of each.

        Raises
        ------
        InputError
            When the merged files cannot be written beside the map.
        """
        from gpuprof.pipeline.devices import open_database
        from gpuprof.pipeline.map_merging import merge_replicas

        if not self.merge or not self._is_written(deployment):
            return deployment
        outcome = merge_replicas(problem, deployment, self.output, open_database(db, needed=False))
        for line in outcome.said:
            say(f"gpuprof: {line}")
        return outcome.deployment

    def write(self, deployment: DeploymentMap) -> None:
        """Write the map, unless a demand is not met and that is not allowed.

        Raises
        ------
        InfeasibleError
            When a demand is not met, whether the map was written or not.
        """
        from gpuprof.domain.deployment import write_map

        if self._is_written(deployment):
            write_map(deployment, self.output)
        if deployment.unplaced:
            names = ", ".join(dict.fromkeys(one.model for one in deployment.unplaced))
            fix = f"{self.output} holds the rest" if self.best_effort else "--best-effort places the rest"
            raise InfeasibleError(f"not every demand can be met: {names}", fix)

    def _is_written(self, deployment: DeploymentMap) -> bool:
        return self.best_effort or not deployment.unplaced


def pairs(options: Sequence[str]) -> dict[str, str]:
    """Return ``KEY=VALUE`` words as a dict; a KEY alone is a flag that is set."""
    return {key: value for key, _, value in (option.partition("=") for option in options)}
