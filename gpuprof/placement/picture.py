"""Draws deployment maps: devices as bars, partitions and replicas as blocks of their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from gpuprof.deployment import DeploymentMap, Gpu, Partition, share_of
from gpuprof.device import Device

_BAR_WIDTH, _BAR_HEIGHT, _GAP, _MARGIN, _TITLE = 420, 22, 6, 12, 24
_LABEL = 190
_COLUMNS_WIDTH = _LABEL + _BAR_WIDTH + 3 * _MARGIN
#: Hues around the circle that stay apart for neighbours.
_GOLDEN = 0.61803398875
_EMPTY, _EDGE, _INK = (238, 238, 238), (120, 120, 120), (30, 30, 30)

Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Block:
    """A filled rectangle with an edge and a text inside, in pixels from the top left."""

    x: float
    y: float
    width: float
    height: float
    fill: Colour | None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Scene:
    """Blocks on a canvas of ``width`` × ``height`` pixels."""

    width: int
    height: int
    blocks: tuple[Block, ...]


def draw(maps: Sequence[tuple[str, DeploymentMap]], devices: Mapping[str, Device]) -> Scene:
    """Return the picture of several maps side by side, each under its title.

    Parameters
    ----------
    maps : sequence of (str, DeploymentMap)
    devices : mapping of str to Device
        By name.
    """
    models = list(dict.fromkeys(model for _, one in maps for model in (*one.models, *one.merges)))
    colours = {model: _colour(index) for index, model in enumerate(models)}
    blocks: list[Block] = []
    rows = 0
    for column, (title, one) in enumerate(maps):
        left = _MARGIN + column * _COLUMNS_WIDTH
        blocks.append(Block(left, _MARGIN, _COLUMNS_WIDTH - _MARGIN, _TITLE, None, title))
        gpus = [(f"{node.name}/{gpu.index} {gpu.device}", gpu) for node in one.nodes for gpu in node.gpus]
        rows = max(rows, len(gpus))
        for row, (label, gpu) in enumerate(gpus):
            top = _MARGIN + _TITLE + row * (_BAR_HEIGHT + _GAP)
            blocks.append(Block(left, top, _LABEL, _BAR_HEIGHT, None, label))
            blocks += _bar(left + _LABEL, top, gpu, devices[gpu.device], colours)
    height = 2 * _MARGIN + _TITLE + max(1, rows) * (_BAR_HEIGHT + _GAP)
    return Scene(_MARGIN + max(1, len(maps)) * _COLUMNS_WIDTH, height, tuple(blocks))


def to_svg(scene: Scene) -> str:
    """Return the scene as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{scene.width}" height="{scene.height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{scene.width}" height="{scene.height}" fill="#ffffff"/>',
    ]
    for block in scene.blocks:
        if block.fill is not None:
            lines.append(
                f'<rect x="{block.x:.1f}" y="{block.y:.1f}" width="{block.width:.1f}" height="{block.height:.1f}" '
                f'fill="{_hex(block.fill)}" stroke="{_hex(_EDGE)}"/>'
            )
        if block.text:
            shown = _fitted(block.text, block.width)
            lines.append(
                f'<text x="{block.x + 3:.1f}" y="{block.y + block.height / 2 + 4:.1f}" fill="{_hex(_INK)}">'
                f"{escape(shown)}<title>{escape(block.text)}</title></text>"
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _bar(left: float, top: float, gpu: Gpu, device: Device, colours: Mapping[str, Colour]) -> Iterator[Block]:
    yield Block(left, top, _BAR_WIDTH, _BAR_HEIGHT, _EMPTY)
    for partition in gpu.partitions:
        start, width = _extent(partition, device)
        if partition.mig is not None:
            yield Block(left + start * _BAR_WIDTH, top, width * _BAR_WIDTH, _BAR_HEIGHT, _EMPTY, partition.mig.profile)
        at = left + start * _BAR_WIDTH
        for replica in partition.replicas:
            part = share_of(partition, replica).sm_pct / 100.0 * width * _BAR_WIDTH
            text = f"{replica.model} b{replica.batch}" + (f"×{replica.processes}" if replica.processes > 1 else "")
            yield Block(at, top, part, _BAR_HEIGHT, colours[replica.model], text)
            at += part


def _extent(partition: Partition, device: Device) -> tuple[float, float]:
    """Return where a partition begins on its device and how wide it is, as fractions of the memory slices."""
    if partition.mig is None:
        return 0.0, 1.0
    slices = device.mig_profile(partition.mig.profile).memory_slices
    return partition.mig.start / device.mig_slices, slices / device.mig_slices


def _fitted(text: str, width: float) -> str:
    most = max(0, int((width - 6) / 6))
    return text if len(text) <= most else text[: max(0, most - 1)] + "…" if most > 1 else ""


def _colour(index: int) -> Colour:
    """Return a light colour whose hue differs from the ones before."""
    hue = (index * _GOLDEN) % 1.0 * 6.0
    rising = 1.0 - abs(hue % 2.0 - 1.0)
    parts = [(1.0, rising, 0.0), (rising, 1.0, 0.0), (0.0, 1.0, rising), (0.0, rising, 1.0), (rising, 0.0, 1.0)]
    red, green, blue = [*parts, (1.0, 0.0, rising)][int(hue)]
    return int(150 + 100 * red), int(150 + 100 * green), int(150 + 100 * blue)


def _hex(colour: Colour) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)
