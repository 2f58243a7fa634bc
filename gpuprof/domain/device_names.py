"""Finds the GPU that people or drivers mean: ``"rtx4090"``, ``"NVIDIA A100"``, ``"A100-SXM4-80GB"``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuprof.domain.catalogue import devices, driver_names_by_device

#: Words that brands put before or behind the name of a product and that tell no board from another.
_BRANDS = frozenset({"nvidia", "tesla", "geforce", "quadro", "rtx", "gtx", "gpu", "hgx"})
_SXM = re.compile(r"sxm\d?")
_MEMORY = re.compile(r"(\d+)(?:gb|gib|g)")
_JOINED = re.compile(r"^(rtx|gtx)(?=\d{4})")
#: Numbers of fewer digits are gigabytes, others are of the product: the 4090 of an RTX 4090.
_PRODUCT_DIGITS = 4
#: Words of a board beside its product's: how it is built, which memory it has, whether it is a server's.
_FORMS = frozenset({"pcie", "sxm", "nvl", "hbm3", "hbm3e", "blackwell", "server", "edition", "one", "of", "the", "two"})


def matching_names(text: str) -> tuple[str, ...]:
    """Return the catalogue's names of the boards that ``text`` may mean, those of the catalogue's order first.

    Every word of the text must be one of the board's, and the words of its product must all be there: ``"A100"`` may
    mean four boards, ``"RTX 6000"`` is no RTX PRO 6000.

    Examples
    --------
    >>> matching_names("NVIDIA A100-SXM4-80GB"), matching_names("GeForce RTX 4090")
    (('a100-80',), ('rtx-4090',))
    """
    words = _words(text)
    if not words:
        return ()
    names = []
    for name, device in devices().items():
        own = _words(name)
        every = own.union(*(_words(other) for other in (device.sources["name"], *driver_names_by_device()[name])))
        product = {word for word in own if word not in _FORMS and not (word.isdigit() and len(word) < _PRODUCT_DIGITS)}
        if product <= words <= every:
            names.append(name)
    return tuple(names)


def _words(text: str) -> set[str]:
    parts = (_JOINED.sub("", part) for part in re.split(r"[^a-z0-9]+", text.lower()))
    return set(_plain_words(part for part in parts if part)) - _BRANDS


def _plain_words(parts: Iterable[str]) -> Iterable[str]:
    for part in parts:
        memory = _MEMORY.fullmatch(part)
        yield memory[1] if memory else "sxm" if _SXM.fullmatch(part) else part
