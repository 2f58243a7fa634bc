"""Options of ``gpuprof place`` alone, in groups: who decides, and what is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuprof.cli.completion import complete_policies
from gpuprof.cli.duration_option import duration_option
from gpuprof.cli.output_path import output_option
from gpuprof.cli.shared_options import PolicySeedOption
from gpuprof.domain.named_values import collect_distinct

if TYPE_CHECKING:
    from gpuprof.pipeline.planning_options import MapOutput
    from gpuprof.placement.policies import Policy


@dataclass(frozen=True)
class PolicyOptions:
    """Which policy decides, and how it searches."""

    policy: Annotated[
        str | None, typer.Option(autocompletion=complete_policies, help="Policy by name, or package.module:Class.")
    ] = None
    policy_option: Annotated[
        list[str] | None,
        typer.Option("-O", "--policy-option", help="Option of the policy as KEY=VALUE; may be repeated."),
    ] = None
    time_limit: Annotated[
        float | None,
        duration_option(
            "--time-limit", "Time for reading and search; the best map so far is taken; with --gpus any 3s."
        ),
    ] = None
    seed: PolicySeedOption = 0

    def make_policy(self) -> Policy:
        """Return the policy. Raises `InputError` when there is none of this name, or it has no such option."""
        from gpuprof.placement.policies import DEFAULT, make_policy

        return make_policy(self.policy or DEFAULT, parse_pairs(self.policy_option or []))


@dataclass(frozen=True)
class MapOptions:
    """Which map is written, and where."""

    output: Annotated[Path, output_option("File to write the map to.")] = Path("map.json")
    previous: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="MAP",
            help="Map that runs now; of equally good maps, the one that moves the fewest replicas is taken.",
        ),
    ] = None
    merge: Annotated[
        bool, typer.Option("--merge", help="Let models that share a device and weights run as one graph where it pays.")
    ] = False
    best_effort: Annotated[bool, typer.Option(help="Write the map even when some demands cannot be met.")] = False
    created: Annotated[
        str | None, typer.Option(help="Time of creation to write into the map; default: SOURCE_DATE_EPOCH, or none.")
    ] = None

    def map_output(self) -> MapOutput:
        """Return where the map goes, and which map may go there."""
        from gpuprof.pipeline.planning_options import MapOutput

        return MapOutput(self.output, self.merge, self.best_effort)


def parse_pairs(options: Sequence[str]) -> dict[str, str]:
    """Return ``KEY=VALUE`` words as a dict; a KEY alone is a flag that is set.

    Raises `InputError` when a key stands twice.
    """
    return collect_distinct("the option", ((key, value) for key, _, value in (one.partition("=") for one in options)))
