from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
import zlib

from gpuprof.placement import picture
from gpuprof.placement.bitmap import to_png
from gpuprof.placement.contract import demand, plain_device, problem, sliced_device
from gpuprof.placement.deploy import to_map
from gpuprof.placement.picture import draw, to_svg
from gpuprof.placement.published.ffd import FirstFitDecreasing

DEVICES = {"plain": plain_device(), "sliced": sliced_device()}
GIVEN = problem([demand("a<b", 700.0), demand("c", 300.0)], [(sliced_device(), None), (plain_device(), None)])
MAP = to_map(GIVEN, FirstFitDecreasing().place(GIVEN))
SCENE = draw([("one & two", MAP), ("again", MAP)], DEVICES)


def test_every_replica_is_a_block_inside_its_bar() -> None:
    replicas = sum(1 for _ in MAP.places())
    named = [block for block in SCENE.blocks if block.fill is not None and block.text.startswith(("a<b", "c "))]
    assert len(named) == 2 * replicas
    assert all(block.x >= 0 and block.x + block.width <= SCENE.width for block in SCENE.blocks)
    assert all(block.y >= 0 and block.y + block.height <= SCENE.height for block in SCENE.blocks)


def test_the_svg_is_xml_with_names_escaped() -> None:
    root = ElementTree.fromstring(to_svg(SCENE))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "one & two" in titles
    assert any(title and title.startswith("a<b") for title in titles)


def test_the_png_is_one_of_the_scenes_size_and_not_blank() -> None:
    png = to_png(SCENE)
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", png[16:24]) == (SCENE.width, SCENE.height)
    length = struct.unpack(">I", png[33:37])[0]
    pixels = zlib.decompress(png[41 : 41 + length])
    assert len(pixels) == SCENE.height * (3 * SCENE.width + 1)
    assert len(set(pixels)) > 5


def test_a_map_of_nothing_can_be_drawn() -> None:
    empty = MAP.model_copy(update={"nodes": ()})
    assert to_png(draw([("empty", empty)], DEVICES))


def test_many_maps_are_wrapped_and_stay_inside_the_picture() -> None:
    scene = draw([(f"map {number}", MAP) for number in range(7)], DEVICES)
    titles = {block.text: block for block in scene.blocks if block.text.startswith("map ")}
    assert scene.width < 2400
    assert titles["map 0"].y == titles["map 2"].y < titles["map 3"].y < titles["map 6"].y
    assert titles["map 0"].x == titles["map 3"].x
    assert all(
        block.x + block.width <= scene.width and block.y + block.height <= scene.height for block in scene.blocks
    )


def test_a_legend_names_every_model_in_its_colour_and_a_scale_stands_over_the_bars() -> None:
    names = [block.text for block in SCENE.blocks if block.fill is None]
    assert {"a<b", "c", "0%", "50%", "100%"} <= set(names)
    swatches = {block.fill for block in SCENE.blocks if block.fill is not None and block.width == block.height}
    bars = {block.fill for block in SCENE.blocks if block.fill is not None and block.text.startswith(("a<b", "c "))}
    assert bars == swatches
    assert len(bars) == 2


def test_colours_stay_apart_for_thirty_models() -> None:
    assert len({picture._colour(index) for index in range(30)}) == 30
