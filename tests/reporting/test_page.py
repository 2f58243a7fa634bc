"""Reports: from documents to sections to one page, looked at in a browser where there is one."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.domain.arrival_process import GammaArrivals
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
from gpuprof.errors import InputError
from gpuprof.kernel_db.schema import DeviceRow, KernelRow, ModelRow, OpRow
from gpuprof.pipeline.report import report
from gpuprof.reporting.chart import (
    Axis,
    Box,
    Chart,
    Line,
    Points,
    group_bars,
    inline,
    lay_bars,
    scale_of,
    stack_bars,
    tick_text,
)
from gpuprof.reporting.document import Section, Table, page, read_json, sections_of
from gpuprof.reporting.figures import batch_and_share_figures, cdf_figure, map_figure, roofline_figure, timeline_figure
from gpuprof.simulator.cluster import Failure, SimulationOptions
from gpuprof.simulator.engine import simulate
from tests.simulator.maps import make_map, replica

LOAD: list[dict[str, object]] = [
    {"model": "resnet50", "slo_ms": 30.0, "rate_rps": 100.0, "goodput_rps": 99.0, "predicted_p99_ms": 19.5}
    | {"p50_ms": 11.0, "p95_ms": 15.0, "p99_ms": 18.0, "lag_p99_ms": 0.2}
]


def a_map() -> DeploymentMap:
    def part(model: str, share: float) -> Replica:
        prediction = ReplicaPrediction(latency_ms=5.0, throughput_rps=200.0, goodput_rps=100.0, source="measured")
        return Replica(model=model, batch=4, sm_share_pct=share, rate_rps=100.0, predicted=prediction)

    partitions = (
        Partition(mig=MigInstance(profile="3g.40gb", start=4), replicas=(part("a", 50.0), part("<b>", 50.0))),
        Partition(mig=MigInstance(profile="2g.20gb", start=0), replicas=(part("a", 100.0),)),
    )
    return DeploymentMap(
        policy="p",
        models={name: DeployedModel(rate_rps=100.0, slo_ms=30.0) for name in ("a", "<b>")},
        nodes=(Node(name="node0", gpus=(Gpu(index=0, device="a100-80", partitions=partitions),)),),
        predicted=MapPrediction(gpus=1, cost_per_hour=4.0, goodput_rps=200.0),
    )


def simulation() -> dict[str, Any]:
    arrivals, options = {"a": GammaArrivals(50.0)}, SimulationOptions(2.0, failures=(Failure("node0", 0, 1.0),))
    outcome = simulate(make_map([[replica("a", [9.0])]], slo_ms=30.0), arrivals, options)
    document: dict[str, Any] = json.loads(json.dumps(outcome.document()))
    epochs = [{"begin_s": float(i), "end_s": i + 1.0, "gpus": i + 1, "cost_per_hour": None} for i in (0, 1)]
    return document | {"epochs": epochs}


def ops() -> list[OpRow]:
    kinds: tuple[tuple[str, int | None], ...] = (("Conv", 9000), ("Relu", 100), ("Reshape", None))
    return [
        OpRow(
            "r", "m", "cpu", 1, i, f"op{i}", kind, kind,
            flops=flops, bytes_read=1000, bytes_written=500, duration_p50_ns=2000 * (i + 1),
        )
        for i, (kind, flops) in enumerate(kinds)
    ]  # fmt: skip


def simulation_of(count: int) -> dict[str, Any]:
    content = simulation()
    for part in ("models", "series"):
        content[part] = [content[part][0] | {"model": f"m{i:02}"} for i in range(count)]
    return content


def whole_page() -> str:
    simulated = simulation()
    documents: list[Any] = [json.loads(a_map().to_json()), simulated, LOAD]
    return page("A report", [section for document in documents for section in sections_of(document, "x.json")])


def test_the_parts_say_where_their_figures_come_from() -> None:
    sections = {section.title: section for doc in (simulation(), LOAD) for section in sections_of(doc, "x.json")}
    assert sections["Simulation"].source == "simulated" and sections["Load test"].source == "measured"
    rested = simulation() | {"basis": {"text": "1 replica (100% of the requests) predicted"}}
    assert "Batch times: 1 replica (100% of the requests) predicted." in sections_of(rested, "x.json")[0].text
    (placed,) = sections_of(json.loads(a_map().to_json()), "map.json")
    assert placed.source.startswith("predicted") and placed.table is not None
    assert "measured." in placed.text and {row[-1] for row in placed.table.rows} == {"measured"}
    mixed = json.loads(a_map().to_json().replace('"measured"', '"roofline"', 1))
    (placed,) = sections_of(mixed, "map.json")
    assert placed.table is not None and placed.table.headings[-1] == "batch times from"
    assert sorted(row[-1] for row in placed.table.rows) == ["measured", "measured; roofline"]


def test_parts_for_single_models_are_folded_and_indexed_where_there_are_many() -> None:
    sections = sections_of(simulation_of(24), "x.json")
    assert len(sections) == 25 and all(section.is_folded for section in sections[1:])
    drawn = page("t", sections)
    assert drawn.count("<details") == 24 and all(f">m{i:02} over time</a>" in drawn for i in range(24))
    assert "<details" not in page("t", sections_of(simulation(), "x.json"))


def test_ops_above_the_roof_are_counted_with_the_reason() -> None:
    given = DeviceRow("r", "cpu", "cpu", float32_flops_per_s=1e9, dram_bytes_per_s=1e9)
    chart = roofline_figure("t", ops(), given)
    assert chart is not None  # Conv: 4.5 GFLOP/s at 6 FLOP/byte; Relu: 0.025 at 0.067
    assert chart.note.startswith("1 op of 2 above the roof: their data came from caches")
    none = DeviceRow("r", "cpu", "cpu", float32_flops_per_s=1e12, dram_bytes_per_s=1e12)
    chart = roofline_figure("t", ops(), none)
    assert chart is not None and chart.note == ""


def test_no_figure_has_more_lines_than_can_be_told_apart() -> None:
    rows = [
        ModelRow("r", f"m{i:02}", "gpu", batch, share, latency_p50_ms=float(batch + i), throughput_rps=1.0)
        for i in range(30)
        for batch in (1, 2)
        for share in (50.0, 100.0)
    ]
    charts = [chart for chart in batch_and_share_figures(rows) if chart.title.startswith("Latency over the batch")]
    assert [chart.title for chart in charts] == [
        "Latency over the batch (1 to 30 of 60)",
        "Latency over the batch (31 to 60 of 60)",
    ]
    names = [line.name for chart in charts for line in chart.lines]
    assert names == [f"m{i:02} {share}%" for i in range(30) for share in (50, 100)]


def test_each_document_becomes_a_section() -> None:
    content = whole_page()
    for heading in ("Map of p", "Simulation", "Load test"):
        assert f"<h2>{heading}<span" in content
    for title in ("cause", "answered within a time", "busy the replicas", "Devices over time"):
        assert title in content


def test_the_page_needs_nothing_from_outside_and_shows_names_as_they_are() -> None:
    content = whole_page()
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", content)
    assert "url(" not in content and "@import" not in content
    assert "default-src 'none'" in content
    assert "<b>" not in content


def test_replicas_are_drawn_where_they_stand() -> None:
    boxes = [box for box in map_figure(a_map()).boxes if not box.has_frame and not box.strip]
    assert [(box.name, round(box.x0), round(box.x1)) for box in boxes] == [
        ("a", 50, 75),
        ("<b>", 75, 100),
        ("a", 0, 25),
    ]


def test_a_roofline_has_the_ops_with_flops_under_the_roof_of_the_device() -> None:
    device = DeviceRow("r", "cpu", "cpu", float32_flops_per_s=1e12, dram_bytes_per_s=1e11)
    chart = roofline_figure("m", ops(), device)
    assert chart is not None
    conv = next(points for points in chart.points if points.name == "Conv")
    assert (conv.x, conv.y) == ((6.0,), (4.5,))
    assert {points.name for points in chart.points} == {"Conv", "Relu"}
    assert chart.lines[0].y[-1] == pytest.approx(min(1000.0, 100.0 * chart.lines[0].x[-1]))
    assert roofline_figure("m", ops(), None) is not None
    assert roofline_figure("m", ops()[2:], device) is None


def test_a_timeline_puts_ops_one_after_the_other() -> None:
    chart = timeline_figure("m", ops())
    assert chart is not None
    assert [(round(1000 * box.x0), round(1000 * box.x1)) for box in chart.boxes] == [(0, 2), (2, 6), (6, 12)]
    assert timeline_figure("m", []) is None


def test_a_timeline_of_kernels_shows_the_median_repetition_as_it_ran() -> None:
    def kernel(repeat: int, start: int | None, length: int, op_type: str | None = "Conv") -> KernelRow:
        return KernelRow("r", "m", "cpu", 1, "k", 0, repeat, op_type=op_type, start_ns=start, duration_ns=length)

    slow = [kernel(0, 0, 9_000_000), kernel(0, 20_000_000, 1_000_000)]
    median = [kernel(1, 50_000_000, 1_000_000), kernel(1, 50_500_000, 2_000_000, None)]  # on two streams at once
    fast = [kernel(2, 90_000_000, 1_000_000)]
    chart = timeline_figure("m", ops(), [*slow, *median, *fast, kernel(1, None, 5)])
    assert chart is not None
    assert [(box.x0, box.x1) for box in chart.boxes] == [(0.0, 1.0), (0.5, 2.5)]
    assert set(chart.y.names) == {"Conv", "other"}
    assert "2 kernels" in chart.note
    without = timeline_figure("m", ops(), [kernel(0, None, 5)])
    assert without is not None and len(without.boxes) == 3


def test_latency_and_throughput_are_drawn_over_batch_and_share() -> None:
    rows = [
        ModelRow("r", "m", "cpu", batch, share, latency_p50_ms=1.0 * batch, throughput_rps=900.0)
        for batch in (1, 2)
        for share in (50.0, 100.0)
    ]
    charts = batch_and_share_figures(rows)
    assert [chart.title for chart in charts] == [
        "Latency over the batch",
        "Throughput over the batch",
        "Latency over the share",
    ]
    assert [line.name for line in charts[0].lines] == ["m 50%", "m 100%"]


def test_a_comparison_is_drawn_by_policy_or_kind_of_gpu_without_those_that_gave_no_map() -> None:
    row = {"policy": "ffd", "gpus": 2, "cost_per_hour": 6.8, "goodput_rps": 50.0, "missing_rps": 0.0, "seconds": 0.1,
           "internal_slack": 0.5, "external_fragmentation": 0.25, "remark": ""}  # fmt: skip
    failed = dict.fromkeys(row) | {"policy": "milp", "seconds": 0.1, "remark": "it wants a fixed fleet"}
    (section,) = sections_of([row, failed], "x.json")
    assert [chart.title for chart in section.charts] == [
        "Devices by policy", "Cost by policy", "Goodput by policy", "Unused by policy",
    ]  # fmt: skip
    assert all(chart.x.names == ("ffd",) for chart in section.charts)
    assert [(box.name, box.y1) for box in section.charts[-1].boxes] == [("within shares", 50.0), ("in no share", 25.0)]
    assert section.text.endswith("milp: it wants a fixed fleet.")
    assert section.table is not None and [cells[0] for cells in section.table.rows] == ["ffd", "milp"]
    gpu = {"device": "l4", "gpus": 3, "cost_per_hour": 2.4, "utilization_pct": 40.0, "seconds": 0.1}
    (section,) = sections_of([gpu], "x.json")
    assert [chart.title for chart in section.charts] == ["Devices by kind of GPU", "Cost by kind of GPU"]
    assert section.title == "Comparison of kinds of GPUs" and section.charts[0].y.is_count


def test_texts_of_a_table_stand_to_the_left_and_numbers_to_the_right() -> None:
    table = Table(("model", "device", "rate", "shares"), (("a", "l4", "1,000.5", "25, 50"), ("b", "t4", "–", "100")))
    drawn = page("t", [Section("s", "", (), table)])
    assert '<th class="text">device</th><th>rate</th><th class="text">shares</th>' in drawn
    cells = '<td class="text" data-heading="device">l4</td><td data-heading="rate">1,000.5</td>'
    assert f'{cells}<td class="text" data-heading="shares">25, 50</td>' in drawn


def test_sources_with_sections_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_text(a_map().to_json())
    titles = [
        section.title
        for section in report([tmp_path / "one.json", tmp_path / "two.json"], tmp_path / "r.html").sections
    ]
    assert titles == ["Map of p", "Map of p, two.json"]


def test_a_distribution_rises_from_nothing_and_predictions_are_named_in_words() -> None:
    chart = cdf_figure([{"model": "a", "latency_ms": [0.2, 0.3], "fraction": [0.9, 1.0]}], {"a": 5.0})
    assert (chart.lines[0].x, chart.lines[0].y) == ((0.2, 0.2, 0.3), (0.0, 90.0, 100.0))
    (section,) = sections_of([LOAD[0] | {"predicted_goodput_rps": 9.0}], "x.json")
    assert "Predictions come from the same requests, replayed through the simulator" in section.text


def test_an_slo_of_several_models_is_one_line_with_a_key_of_its_own() -> None:
    series = [{"model": f"m{i}", "latency_ms": [0.2, 0.3], "fraction": [0.9, 1.0]} for i in range(24)]
    chart = cdf_figure(series, {f"m{i}": 20.0 for i in range(24)})
    assert [line.name for line in chart.lines if line.is_dashed] == ["SLO of 24 models: 20 ms"]
    assert list(chart.legend()) == [*(f"m{i}" for i in range(24)), "SLO of 24 models: 20 ms"]
    chart = cdf_figure(series[:3], {"m0": 20.0, "m1": 5.0, "m2": 20.0})
    first, shared = (line for line in chart.lines if line.is_dashed)
    assert (first.name, first.series, first.color, first.x) == ("m1 SLO: 5 ms", "m1", 1, (5.0, 5.0))
    assert (shared.name, shared.series, shared.x) == ("SLO of 2 models: 20 ms", "", (20.0, 20.0))
    assert list(chart.legend()) == ["m0", "m1", "m2", "SLO of 2 models: 20 ms"]


def test_the_numbers_of_a_column_have_as_many_decimals() -> None:
    rows = [LOAD[0] | {"p50_ms": value, "p95_ms": None} for value in (64.422, 66.0, 6.8241)]
    (section,) = sections_of(rows, "x.json")
    assert section.table is not None
    place = section.table.headings.index("p50 ms")
    assert [row[place] for row in section.table.rows] == ["64.4", "66.0", "6.8"]
    assert [row[place + 1] for row in section.table.rows] == ["–"] * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "x is not something that a report can be made from"),
        ([], "for lab: lab run -o PAGE.html"),
        ([1], "x is not something"),
        ({"schema": "gpuprof.simulation/1"}, "x is damaged, or of another version: it has no 'models'"),
        (
            {"schema": "gpuprof.simulation/1", "models": 3, "series": [], "times_s": []},
            "x is damaged, or of another version: 'int' object is not iterable",
        ),
        ({"schema": "gpuprof.deployment/1"}, "x: policy: Field required"),
    ],
)
def test_what_is_no_result_is_refused(content: object, message: str) -> None:
    with pytest.raises(InputError) as error:
        sections_of(content, "x")
    assert message in str(error.value)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        read_json(tmp_path / "x.json")
    with pytest.raises(InputError, match="cannot read"):
        read_json(tmp_path / "none.json")


def a_replica(model: str, share: float = 100.0) -> Replica:
    prediction = ReplicaPrediction(latency_ms=5.0, throughput_rps=200.0, goodput_rps=100.0)
    return Replica(model=model, batch=4, sm_share_pct=share, rate_rps=10.0, predicted=prediction)


def map_of(kind: str, *gpus: tuple[Partition, ...]) -> DeploymentMap:
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


@pytest.mark.parametrize("kind", ["a30", "a100-80", "h100", "h200", "b200"])
def test_every_profile_at_its_last_start_ends_at_the_end_of_the_device_and_replicas_stay_inside(kind: str) -> None:
    described = device(kind)
    for profile in described.mig_profiles:
        start = described.mig_slices - profile.memory_slices
        chart = map_figure(map_of(kind, (instance(profile.name, start, a_replica("a", 60.0), a_replica("b", 40.0)),)))
        ((low, high),) = frames(chart, profile.name)
        assert high == pytest.approx(100.0)
        inside = [box for box in chart.boxes if box.name in ("a", "b")]
        assert len(inside) == 2
        assert all(low <= box.x0 < box.x1 <= high for box in inside)
        assert sum(box.x1 - box.x0 for box in inside) == pytest.approx(high - low, abs=0.7)


def test_an_instance_without_replicas_is_drawn_with_the_name_of_its_profile() -> None:
    chart = map_figure(map_of("a100-40", (instance("1g.10gb", 6),)))
    assert [box.label for box in chart.boxes if box.label] == ["1g.10gb"]
    assert frames(chart, "1g.10gb") == [(75.0, 100.0)]


def test_instances_of_an_unknown_device_are_equally_wide_and_the_note_says_so() -> None:
    chart = map_figure(map_of("nobodys", (instance("1g.6gb", 0), instance("1g.6gb", 2))))
    assert frames(chart, "1g.6gb") == [(0.0, 50.0), (50.0, 100.0)]
    assert "slices of nobodys are not known" in chart.note


def test_a_share_without_mig_is_a_part_of_the_whole() -> None:
    whole = (Partition(replicas=(a_replica("b", 40.0), a_replica("a", 35.0))),)
    chart = map_figure(map_of("v100", whole))
    boxes = {box.name: (round(box.x0), round(box.x1), box.color) for box in chart.boxes if box.name}
    assert boxes == {"b": (0, 40, 1), "a": (40, 75, 0)}


def test_models_beyond_the_palette_differ_in_shade() -> None:
    names = [f"m{i:02}" for i in range(24)]
    whole = (Partition(replicas=tuple(a_replica(name, 4.0) for name in names)),)
    boxes = [box for box in map_figure(map_of("v100", whole)).boxes if box.name]
    assert len({(box.color % 8, box.shade) for box in boxes}) == 24


def test_the_profile_of_an_instance_stands_in_a_strip_above_its_replicas() -> None:
    chart = map_figure(map_of("a100-40", (instance("3g.20gb", 4, a_replica("a")), instance("1g.5gb", 0))))
    (strip,) = (box for box in chart.boxes if box.strip)
    (replica,) = (box for box in chart.boxes if box.name == "a")
    assert (strip.label, strip.y1) == ("3g.20gb", replica.y0) and strip.y0 < strip.y1
    two = map_figure(map_of("a100-40", *[(instance("3g.20gb", 4, a_replica("a")),)] * 2))
    plain = map_figure(map_of("v100", *[(Partition(replicas=(a_replica("a"),)),)] * 2))
    assert not any(box.strip for box in plain.boxes) and plain.height < two.height


def a_chart(name: str = "a") -> Chart:
    return Chart(
        "A <title> & more",
        Axis("time in s"),
        Axis("rate in requests/s", low=0.0),
        lines=(Line(name, (0.0, 1.0), (1.0, 2.0), 0), Line("dashed", (0.0, 1.0), (2.0, 2.0), 1, is_dashed=True)),
        points=(Points("p", (0.5,), (1.0,), ('tip "quoted" <b>',), 2),),
        boxes=(Box("b", 0.0, 1.0, 0.0, 1.0, "a box", 3, "label"),),
    )


@settings(max_examples=300)
@given(values=st.lists(st.floats(-1e9, 1e9, allow_nan=False), min_size=1, max_size=20), log=st.booleans())
def test_every_value_and_tick_lies_on_the_axis(values: list[float], log: bool) -> None:
    scale = scale_of(Axis("x", log=log), values, 100.0, 300.0)
    kept = [value for value in values if value > 1e-30 or not log]
    assert all(99.9 <= scale(value) <= 300.1 for value in [*kept, *scale.ticks()])
    assert all(math.isfinite(tick) for tick in scale.ticks())
    assert len(scale.ticks()) <= 30


def test_order_is_kept_and_a_log_axis_gives_each_decade_the_same_room() -> None:
    scale = scale_of(Axis("x", log=True, low=1.0, high=1000.0), [], 0.0, 900.0)
    ends = scale(100.0) - scale(10.0), scale(10.0) - scale(1.2)
    assert ends[0] == pytest.approx((scale(1000.0) - scale(1.0)) / 3, rel=0.06)
    assert ends[1] > 0


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (2500.0, "2500"), (30_000.0, "30k"), (1.2e6, "1.2M"), (3e12, "3T")]
)
def test_ticks_are_short(value: float, text: str) -> None:
    assert tick_text(value) == text


def test_an_svg_is_xml_has_axes_with_units_and_escapes_what_it_is_given() -> None:
    root = ElementTree.fromstring(inline(a_chart("<script>alert(1)</script>")))
    texts = [element.text for element in root.iter("text")]
    assert {"time in s", "rate in requests/s", "A <title> & more", "label"} <= set(texts)
    assert not list(root.iter("script"))
    tips = {element.get("data-tip") for element in root.iter() if element.get("data-tip")}
    assert {'tip "quoted" <b>', "a box"} <= tips


def test_stacked_bars_stand_on_one_another() -> None:
    boxes = stack_bars(("a", "b"), {"x": [1.0, 0.0], "y": [2.0, 3.0]}, "ms", (0, 1))
    assert [(box.name, box.y0, box.y1) for box in boxes] == [("x", 0.0, 1.0), ("y", 1.0, 3.0), ("y", 0.0, 3.0)]


def test_bars_side_by_side_do_not_overlap_and_leave_out_what_is_not_known() -> None:
    boxes = group_bars(("a", "b"), {"x": [1.0, None], "y": [2.0, 3.0]}, "ms")
    assert [(box.name, round(box.x0)) for box in boxes] == [("x", 0), ("y", 0), ("y", 1)]
    assert boxes[0].x1 <= boxes[1].x0


@pytest.mark.parametrize(("models", "parts"), [(1, 1), (1, 6), (2, 2), (40, 3)])
def test_bars_never_reach_their_neighbours(models: int, parts: int) -> None:
    names = tuple(f"m{i}" for i in range(models))
    boxes = group_bars(names, {f"p{j}": [1.0] * models for j in range(parts)}, "ms")
    assert all(abs(end - round((box.x0 + box.x1) / 2)) <= 0.401 for box in boxes for end in (box.x0, box.x1))


def test_bars_lie_with_the_first_on_top_where_their_names_have_no_room() -> None:
    names = tuple(f"model_{i}" for i in range(24))
    boxes = group_bars(names, {"x": [1.0] * 24, "y": [2.0] * 24}, "ms")
    upright = Chart("Bars", Axis("model", names=names), Axis("ms", low=0.0), boxes=boxes)
    lying = lay_bars(upright)
    assert (lying.x.label, lying.y.names, lying.y.is_downwards) == ("ms", names, True)
    assert {(box.x0, box.x1) for box in lying.boxes} == {(0.0, 1.0), (0.0, 2.0)}
    assert lying.height >= 24 * 14  # what a name needs
    few = replace(upright, x=Axis("model", names=("a", "b")))
    sizes = replace(upright, x=Axis("batch size", names=tuple(map(str, range(24)))))
    assert lay_bars(few) is few and lay_bars(sizes) is sizes  # of numbers some are left out


def test_keys_do_not_overlap_and_24_lines_differ_in_colour_or_dashes() -> None:
    root = ElementTree.fromstring(inline(many_lines()))
    areas = [key.find("rect") for key in root.iter("g") if key.get("class") == "key"]
    places = [(int(area.get("x", "")), int(area.get("y", ""))) for area in areas if area is not None]
    widths = {int(area.get("width", "")) for area in areas if area is not None}
    assert len(set(places)) == 24 and len(widths) == 1
    columns = sorted({x for x, _ in places})
    assert all(right - left >= max(widths) for left, right in pairwise(columns)) and columns[-1] + max(widths) <= 580
    solid = list(root.iter("polyline"))[:24]
    assert len({(line.get("class"), line.get("stroke-dasharray")) for line in solid}) == 24


def test_a_downward_axis_begins_at_the_top_and_its_line_stays_below() -> None:
    boxes = tuple(Box(name, 0.0, 1.0, i - 0.4, i + 0.4, name, i) for i, name in enumerate(("first", "second")))
    for is_downwards in (False, True):
        chart = Chart("", Axis("x"), Axis("", names=("first", "second"), is_downwards=is_downwards), boxes=boxes)
        root = ElementTree.fromstring(inline(chart))
        tops = {box.get("data-tip"): float(box.attrib["y"]) for box in root.iter("rect") if box.get("data-tip")}
        assert (tops["first"] < tops["second"]) is is_downwards
        (line,) = (line for line in root.iter("line") if line.get("class") == "axis")
        assert float(line.attrib["y1"]) > max(tops.values())


def many_lines(count: int = 24) -> Chart:
    x = tuple(float(i) for i in range(10))
    lines = tuple(Line(f"model_{i}", x, tuple(at + i for at in x), i) for i in range(count))
    slos = tuple(Line(f"model_{i} SLO", (3.0, 3.0), (0.0, 9.0), i, True, f"model_{i}") for i in range(count))
    return Chart("Many", Axis("x"), Axis("y"), lines=(*lines, *slos))


def test_each_series_has_one_key_which_its_bounds_share() -> None:
    root = ElementTree.fromstring(inline(many_lines(3)))
    keys = [group for group in root.iter("g") if group.get("class") == "key"]
    assert [(key.get("data-key"), "".join(key.itertext())) for key in keys] == [
        (str(i), f"model_{i}model_{i}") for i in range(3)
    ]
    shapes = [group for group in root.iter("g") if group.get("data-series") == "1"]
    assert sum(len(list(group.iter("polyline"))) for group in shapes) == 2


@pytest.mark.parametrize(("low", "high"), [(40.0, 160.0), (4.0, 40.0), (45.0, 55.0), (1.0, 100.0), (0.9, 1.1)])
def test_a_logarithmic_axis_has_three_ticks_at_least_and_not_too_many(low: float, high: float) -> None:
    scale = scale_of(Axis("ms", log=True, low=low, high=high), (), 0.0, 100.0)
    ticks = scale.ticks()
    assert 3 <= len(ticks) <= 12 and ticks == sorted(ticks)
    assert all(scale.low <= tick <= scale.high for tick in ticks)
