"""Charts: scales, ticks, legends, and their SVG."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprof.reporting.chart import (
    COLORS,
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
@given(
    values=st.lists(st.floats(-1e9, 1e9, allow_nan=False), min_size=1, max_size=20),
    log=st.booleans(),
)
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


def test_bars_of_more_series_than_colours_are_paler_the_second_time() -> None:
    boxes = group_bars(("a",), {f"s{i}": [1.0] for i in range(COLORS + 1)}, "ms")
    assert boxes[0].color % COLORS == boxes[-1].color % COLORS
    assert boxes[-1].shade < boxes[0].shade == 1.0
