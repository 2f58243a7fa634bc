"""Draws a scene into a PNG with nothing but the standard library: rectangles, and letters of five by three dots."""

from __future__ import annotations

import struct
import zlib

from gpuprof.placement.picture import Block, Colour, Scene

_EDGE, _INK, _PAPER = (120, 120, 120), (30, 30, 30), (255, 255, 255)
_SCALE = 2
#: Five rows of three dots for each character, the leftmost dot the highest bit.
_FONT = {
    "a": "25755", "b": "65656", "c": "34443", "d": "65556", "e": "74647", "f": "74644", "g": "34553", "h": "55755",
    "i": "72227", "j": "11152", "k": "55655", "l": "44447", "m": "57755", "n": "65555", "o": "25552", "p": "65644",
    "q": "25563", "r": "65655", "s": "34216", "t": "72222", "u": "55557", "v": "55552", "w": "55775", "x": "55255",
    "y": "55222", "z": "71247", "0": "75557", "1": "26227", "2": "61247", "3": "61216", "4": "55711", "5": "74616",
    "6": "34757", "7": "71244", "8": "75757", "9": "75716", ".": "00002", ",": "00024", ":": "02020", "-": "00700",
    "_": "00007", "/": "11244", "%": "51245", "#": "57575", "(": "12221", ")": "42224", "+": "02720", "×": "05250",
    "=": "07070", "'": "22000", "…": "00005",
}  # fmt: skip


def to_png(scene: Scene) -> bytes:
    """Return the scene as a PNG file; characters without a glyph are left blank."""
    canvas = [bytearray(bytes(_PAPER) * scene.width) for _ in range(scene.height)]
    for block in scene.blocks:
        if block.fill is not None:
            _fill(canvas, block, block.fill)
        if block.text:
            _write(canvas, block)
    raw = b"".join(b"\0" + bytes(row) for row in canvas)
    header = struct.pack(">IIBBBBB", scene.width, scene.height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(raw, 9)) + _chunk(b"IEND", b"")
    )


def _fill(canvas: list[bytearray], block: Block, fill: Colour) -> None:
    left, right = round(block.x), round(block.x + block.width)
    top, bottom = round(block.y), round(block.y + block.height)
    if right - left < 2:
        return
    edge = bytes(_EDGE) * (right - left)
    inner = bytes(_EDGE) + bytes(fill) * (right - left - 2) + bytes(_EDGE)
    for y in range(top, bottom):
        canvas[y][3 * left : 3 * right] = edge if y in (top, bottom - 1) else inner


def _write(canvas: list[bytearray], block: Block) -> None:
    step = 4 * _SCALE
    top = round(block.y + (block.height - 5 * _SCALE) / 2)
    for index, letter in enumerate(block.text[: int((block.width - 4) / step)]):
        rows = _FONT.get(letter.lower(), "00000")
        for y, row in enumerate(rows):
            for x in range(3):
                if int(row) >> (2 - x) & 1:
                    _dot(canvas, round(block.x) + 3 + index * step + x * _SCALE, top + y * _SCALE)


def _dot(canvas: list[bytearray], x: int, y: int) -> None:
    for row in canvas[y : y + _SCALE]:
        row[3 * x : 3 * (x + _SCALE)] = bytes(_INK) * _SCALE


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
