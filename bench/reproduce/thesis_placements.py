"""What each policy puts where (Elvinger, ETH 2024, Figures 6.2, 6.3, 6.5, 6.7a, 6.8, 6.11a, 6.12, 6.14, 6.16, 6.18).

python -m bench.reproduce.thesis_placements [--plot FILE.svg|FILE.png] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.reproduce import command, thesis_fig6_1, thesis_fig6_10, thesis_fig6_15
from bench.reproduce.reproduction import Fact, Reproduction
from bench.reproduce.thesis_cluster import OWN, Experiment, Plan, list_lines, plan
from gpuprof.domain.deployment import Replica
from gpuprof.reporting.chart import Axis, Chart, group_bars

#: Figure, policy, experiment, GPUs (None: as many as needed).
_VISION, _MIXED = thesis_fig6_1.EXPERIMENT, thesis_fig6_10.EXPERIMENT
MAPS: tuple[tuple[str, str, Experiment, int | None], ...] = (
    ("6.2", "usher", _VISION, 2),
    ("6.2", "usher", _VISION, 3),
    ("6.2", "usher", _VISION, 4),
    ("6.3", "wao-usher", _VISION, 4),
    ("6.5", "usher", _VISION, 6),
    ("6.5", "ao-milp", _VISION, 6),
    ("6.7a", "wsm-milp", _VISION, 5),
    ("6.8", "igniter", _VISION, 6),
    ("6.11a", "wao-usher", _MIXED, 4),
    ("6.12", "usher", _MIXED, 5),
    ("6.12", "wsm-milp", _MIXED, 5),
    ("6.14", "igniter", _MIXED, 6),
    ("6.16", "wsm-milp", thesis_fig6_15.experiment(3000, 250), 4),
    ("6.16", "wsm-milp", thesis_fig6_15.experiment(4000, 250), 4),
    ("6.16", "wsm-milp", thesis_fig6_15.experiment(5000, 250), 4),
    ("6.18", "ao-milp", thesis_fig6_15.experiment(3000, 250), 4),
    ("6.18", "ao-milp", thesis_fig6_15.experiment(5000, 250), 4),
)
#: §6.2 and §6.3: batch sizes that the text names, by row of `MAPS` and model.
_SAID = {
    (2, "efficientnet_b7"): 8,
    (4, "efficientnet_b7"): 8,
    (4, "resnet50"): 4,
    (5, "efficientnet_b7"): 64,
    (5, "resnet50"): 64,
    (6, "resnet50"): 4,
    (6, "alexnet"): 4,
    (12, "vgg19"): 16,
    (13, "vgg19"): 128,
    (13, "resnet50"): 4,
    (13, "densenet121"): 16,
    (15, "densenet121"): 64,
    (16, "densenet121"): 64,
}

_WHY = (
    "The thesis's solver took large batches among those that its objective cannot tell apart (Figures 6.5 and 6.18); "
    "ours takes the least requirements among equals.",
    "igniter plans with what the table says of batches and shares: the thesis does not print its coefficients.",
    "optimal stands below each: planned with queues and shares on as many GPUs, for the same experiment.",
)


def compute(_: Path, maps: Sequence[tuple[str, str, Experiment, int | None]] = MAPS) -> Reproduction:
    """Place by the policy of each figure, and by optimal."""
    plans = [plan(policy, experiment, gpus) for _, policy, experiment, gpus in maps]
    own: dict[tuple[Experiment, int | None], Plan] = {}
    rows = []
    for (figure, policy, experiment, gpus), made in zip(maps, plans, strict=True):
        count = None if gpus is None else float(gpus)
        rows.append((figure, policy, count, _planned_rps(made), describe_map(made)))
        if (experiment, gpus) not in own:
            own[experiment, gpus] = plan(OWN, experiment, gpus)
            best = own[experiment, gpus]
            rows.append((figure, OWN, count, _planned_rps(best), describe_map(best)))
    names = tuple(f"{figure}: {policy}, {gpus} GPUs" for figure, policy, _, gpus in maps)
    bars = group_bars(names, {"planned": [_planned_rps(made) for made in plans]}, "requests/s")
    title = "Goodput that the maps are planned for (thesis, Figures 6.2 to 6.18)"
    return Reproduction(
        title="Thesis, Figures 6.2 to 6.18: maps, a GPU in each bracket: model, batch, share or Creq in percent",
        header=("figure", "policy", "GPUs", "planned requests/s", "map"),
        rows=tuple(rows),
        facts=tuple(
            Fact(
                f"batch of {model}, {maps[index][1]}, {maps[index][3]} GPUs",
                f"Figure {maps[index][0]}",
                printed,
                plans[index].batch(model),
            )
            for (index, model), printed in _SAID.items()
            if index < len(maps)
        ),
        differences=_WHY,
        charts=(Chart(title, Axis("map", names=names), Axis("requests/s"), boxes=bars),),
        sound=all(made.sound for made in (*plans, *own.values())),
        commands=list_lines((*plans, *own.values())),
    )


def describe_map(made: Plan) -> str:
    """Return what stands on each GPU of a map, as text."""
    gpus = (gpu for node in made.deployment.nodes for gpu in node.gpus)
    held = ([replica for part in gpu.partitions for replica in part.replicas] for gpu in gpus)
    return " ".join(
        "[" + ", ".join(f"{one.model} {one.batch} {_required_pct(one):.3g}%" for one in replicas) + "]"
        for replicas in held
    )


def _required_pct(replica: Replica) -> float:
    """Return the share of a replica, or what it was taken to require where it has none."""
    creq = replica.predicted.creq
    return replica.sm_share_pct if creq is None else creq.pct


def _planned_rps(made: Plan) -> float:
    return made.deployment.predicted.goodput_rps


if __name__ == "__main__":
    sys.exit(command.run(__doc__, compute))
