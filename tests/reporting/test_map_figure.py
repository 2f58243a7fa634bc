"""One function draws a map: MIG instances at their memory slices, whatever the device."""

from __future__ import annotations

import pytest

from gpuprof.domain.catalogue import device
from gpuprof.domain.deployment import (
    DeployedModel,
    DeploymentMap,
    Gpu,
    MapPrediction,
    MigInstance,
    Node,
    Partition,
    Replica,
    ReplicaPrediction,
)
from gpuprof.reporting.chart import Chart
from gpuprof.reporting.figures import map_figure


def a_replica(model: str, share: float = 100.0) -> Replica:
    prediction = ReplicaPrediction(latency_ms=5.0, throughput_rps=200.0, goodput_rps=100.0)
    return Replica(model=model, batch=4, sm_share_pct=share, rate_rps=10.0, predicted=prediction)


def a_map(kind: str, *gpus: tuple[Partition, ...]) -> DeploymentMap:
    models = sorted({replica.model for gpu in gpus for partition in gpu for replica in partition.replicas})
    return DeploymentMap(
        policy="p",
        models={name: DeployedModel(rate_rps=10.0, slo_ms=30.0) for name in models},
        nodes=(
            Node(name="n", gpus=tuple(Gpu(index=i, device=kind, partitions=parts) for i, parts in enumerate(gpus))),
        ),
        predicted=MapPrediction(gpus=len(gpus), goodput_rps=1.0),
    )


def instance(profile: str, start: int, *replicas: Replica) -> Partition:
    return Partition(mig=MigInstance(profile=profile, start=start), replicas=replicas)


def frames(chart: Chart, profile: str) -> list[tuple[float, float]]:
    return [(box.x0, box.x1) for box in chart.boxes if box.has_frame and f" in {profile} at " in box.tip]


#: Device, profile, percent of the device: memory slices of the MIG user guide over those of the device.
WIDTHS = [
    ("a30", "1g.6gb", 25.0), ("a30", "2g.12gb", 50.0), ("a30", "4g.24gb", 100.0),
    *[("a100-40", name, width) for name, width in (
        ("1g.5gb", 12.5), ("1g.10gb", 25.0), ("2g.10gb", 25.0), ("3g.20gb", 50.0), ("4g.20gb", 50.0), ("7g.40gb", 100.0)
    )],
    ("a100-80", "1g.20gb", 25.0), ("h100", "1g.20gb", 25.0), ("h200", "1g.35gb", 25.0), ("h200", "1g.18gb", 12.5),
    ("b200", "1g.45gb", 25.0), ("b200", "2g.45gb", 25.0), ("b200", "7g.180gb", 100.0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "profile", "width"), WIDTHS)
def test_a_mig_instance_is_as_wide_as_its_memory_slices(kind: str, profile: str, width: float) -> None:
    chart = map_figure(a_map(kind, (instance(profile, 0, a_replica("a")),)))
    assert frames(chart, profile) == [(0.0, width)]
    (box,) = (box for box in chart.boxes if box.name == "a")
    assert [box.x0, box.x1] == pytest.approx([0.15, width - 0.15])


@pytest.mark.parametrize("kind", ["a30", "a100-80", "h100", "h200", "b200"])
def test_every_profile_at_its_last_start_ends_at_the_end_of_the_device_and_replicas_stay_inside(kind: str) -> None:
    described = device(kind)
    for profile in described.mig_profiles:
        start = described.mig_slices - profile.memory_slices
        chart = map_figure(a_map(kind, (instance(profile.name, start, a_replica("a", 60.0), a_replica("b", 40.0)),)))
        ((low, high),) = frames(chart, profile.name)
        assert high == pytest.approx(100.0)
        inside = [box for box in chart.boxes if box.name in ("a", "b")]
        assert len(inside) == 2
        assert all(low <= box.x0 < box.x1 <= high for box in inside)
        assert sum(box.x1 - box.x0 for box in inside) == pytest.approx(high - low, abs=0.7)


def test_an_instance_without_replicas_is_drawn_with_the_name_of_its_profile() -> None:
    chart = map_figure(a_map("a100-40", (instance("1g.10gb", 6),)))
    assert [box.label for box in chart.boxes if box.label] == ["1g.10gb"]
    assert frames(chart, "1g.10gb") == [(75.0, 100.0)]


def test_instances_of_an_unknown_device_are_equally_wide_and_the_note_says_so() -> None:
    chart = map_figure(a_map("nobodys", (instance("1g.6gb", 0), instance("1g.6gb", 2))))
    assert frames(chart, "1g.6gb") == [(0.0, 50.0), (50.0, 100.0)]
    assert "slices of nobodys are not known" in chart.note


def test_a_share_without_mig_is_a_part_of_the_whole() -> None:
    whole = (Partition(replicas=(a_replica("b", 40.0), a_replica("a", 35.0))),)
    chart = map_figure(a_map("v100", whole))
    boxes = {box.name: (round(box.x0), round(box.x1), box.color) for box in chart.boxes if box.name}
    assert boxes == {"b": (0, 40, 1), "a": (40, 75, 0)}


def test_models_beyond_the_palette_differ_in_shade() -> None:
    names = [f"m{i:02}" for i in range(24)]
    whole = (Partition(replicas=tuple(a_replica(name, 4.0) for name in names)),)
    boxes = [box for box in map_figure(a_map("v100", whole)).boxes if box.name]
    assert len({(box.color % 8, box.shade) for box in boxes}) == 24


def test_the_profile_of_an_instance_stands_in_a_strip_above_its_replicas() -> None:
    chart = map_figure(a_map("a100-40", (instance("3g.20gb", 4, a_replica("a")), instance("1g.5gb", 0))))
    (strip,) = (box for box in chart.boxes if box.strip)
    (replica,) = (box for box in chart.boxes if box.name == "a")
    assert (strip.label, strip.y1) == ("3g.20gb", replica.y0) and strip.y0 < strip.y1
    two = map_figure(a_map("a100-40", *[(instance("3g.20gb", 4, a_replica("a")),)] * 2))
    plain = map_figure(a_map("v100", *[(Partition(replicas=(a_replica("a"),)),)] * 2))
    assert not any(box.strip for box in plain.boxes) and plain.height < two.height
