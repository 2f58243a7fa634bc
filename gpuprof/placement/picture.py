"""Draws deployment maps: devices as bars, partitions and replicas as blocks of their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from gpuprof.domain.deployment import DeploymentMap, Gpu, Partition, share_of
from gpuprof.domain.device import Device

_BAR_WIDTH, _BAR_HEIGHT, _GAP, _MARGIN, _TITLE = 420, 22, 6, 12, 24
_LABEL = 190
_COLUMNS_WIDTH = _LABEL + _BAR_WIDTH + 3 * _MARGIN
#: Maps beside one another; the others come below.
_ABREAST = 3
_AXIS, _LEGEND_ROW, _SWATCH = 14, 18, 12
_LETTER = 8  # width of a letter in the bitmap, the widest
#: Okabe and Ito's colours, which the colour-blind tell apart, without black and lightened so that letters stand out.
_PALETTE = (
    (240, 190, 90), (140, 200, 240), (100, 200, 165), (245, 235, 130), (110, 165, 215), (230, 150, 105),
    (220, 165, 195), (190, 190, 190),
)  # fmt: skip
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
    models = list(dict.fromkeys(model for _, one in maps for model in one.models))
    colours = {model: _colour(index) for index, model in enumerate(models)}
    width = _MARGIN + max(1, min(_ABREAST, len(maps))) * _COLUMNS_WIDTH
    blocks, top = _legend(colours, width)
    for first in range(0, len(maps), _ABREAST):
        height = _TITLE + _AXIS
        for column, (title, one) in enumerate(maps[first : first + _ABREAST]):
            drawn = list(_map(_MARGIN + column * _COLUMNS_WIDTH, top, title, one, devices, colours))
            height = max(height, *(round(block.y + block.height) - top for block in drawn))
            blocks += drawn
        top += height + _GAP + _MARGIN
    return Scene(width, top, tuple(blocks))


def _legend(colours: Mapping[str, Colour], width: int) -> tuple[list[Block], int]:
    """Return what the colours and the bars mean, and where it ends."""
    note = "bars: a device, 100% of its compute units, or of its memory slices where it is cut into MIG instances"
    blocks = [Block(_MARGIN, _MARGIN, width - 2 * _MARGIN, _LEGEND_ROW, None, note)]
    x, y = float(_MARGIN), _MARGIN + _LEGEND_ROW
    for model, colour in colours.items():
        wide = _SWATCH + _LETTER * (len(model) + 2)
        if x > _MARGIN and x + wide > width - _MARGIN:
            x, y = float(_MARGIN), y + _LEGEND_ROW
        blocks.append(Block(x, y + 3, _SWATCH, _SWATCH, colour))
        blocks.append(Block(x + _SWATCH, y, min(wide, width - _MARGIN - x) - _SWATCH, _LEGEND_ROW, None, model))
        x += wide
    return blocks, y + _LEGEND_ROW + _MARGIN


def _map(
    left: float,
    top: float,
    title: str,
    one: DeploymentMap,
    devices: Mapping[str, Device],
    colours: Mapping[str, Colour],
) -> Iterator[Block]:
    """Yield the blocks of one map: title, scale and a bar for each device."""
    yield Block(left, top, _COLUMNS_WIDTH - _MARGIN, _TITLE, None, title)
    for percent in (0, 25, 50, 75, 100):
        at = left + _LABEL + _BAR_WIDTH * percent / 100.0
        yield Block(at - 6, top + _TITLE, 5 * _LETTER, _AXIS, None, f"{percent}%")
    gpus = [(f"{node.name}/{gpu.index} {gpu.device}", gpu) for node in one.nodes for gpu in node.gpus]
    for row, (label, gpu) in enumerate(gpus):
        y = top + _TITLE + _AXIS + row * (_BAR_HEIGHT + _GAP)
        yield Block(left, y, _LABEL, _BAR_HEIGHT, None, label)
        yield from _bar(left + _LABEL, y, gpu, devices[gpu.device], colours)


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
    """Return a colour of the palette; once all are taken they come again, each time darker. Names tell them apart."""
    darker = 1.0 - 0.12 * (index // len(_PALETTE) % 4)
    red, green, blue = (int(part * darker) for part in _PALETTE[index % len(_PALETTE)])
    return red, green, blue


def _hex(colour: Colour) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)
