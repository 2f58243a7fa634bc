"""Matches GPU names of users and drivers to the catalogue: ``"rtx4090"``, ``"NVIDIA A100"``, ``"A100-SXM4-80GB"``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuprof.domain.catalogue import devices, driver_names_by_device

#: Brand words before or after a product's name, which do not distinguish boards.
_BRANDS = frozenset({"nvidia", "tesla", "geforce", "quadro", "rtx", "gtx", "gpu", "hgx"})
_SXM = re.compile(r"sxm\d?")
_MEMORY = re.compile(r"(\d+)(?:gb|gib|g)")
_JOINED = re.compile(r"^(rtx|gtx)(?=\d{4})")
#: Least digits of a product's number (the 4090 of an RTX 4090); shorter numbers are gigabytes.
_PRODUCT_DIGITS = 4
#: Words of a board's name besides the product: form factor, memory, server edition.
_FORMS = frozenset({"pcie", "sxm", "nvl", "hbm3", "hbm3e", "blackwell", "server", "edition", "one", "of", "the", "two"})


def matching_names(text: str) -> tuple[str, ...]:
    """Return the names of the boards in the catalogue that ``text`` may denote, in the catalogue's order.

    Every word of the text must occur in the board's names, and every word of its product in the text: ``"A100"``
    matches four boards, ``"RTX 6000"`` does not match RTX PRO 6000.

    Examples
    --------
    >>> matching_names("NVIDIA A100-SXM4-80GB"), matching_names("GeForce RTX 4090")
    (('a100-80',), ('rtx-4090',))
    """
    query = _words(text)
    if not query:
        return ()
    names = []
    for name, device in devices().items():
        words = _words(name)
        every = words.union(*(_words(label) for label in (device.sources["name"], *driver_names_by_device()[name])))
        product = {
            word for word in words if word not in _FORMS and not (word.isdigit() and len(word) < _PRODUCT_DIGITS)
        }
        if product <= query <= every:
            names.append(name)
    return tuple(names)


def _words(text: str) -> set[str]:
    parts = (_JOINED.sub("", part) for part in re.split(r"[^a-z0-9]+", text.lower()))
    return set(_plain_words(part for part in parts if part)) - _BRANDS


def _plain_words(parts: Iterable[str]) -> Iterable[str]:
    for part in parts:
        memory = _MEMORY.fullmatch(part)
        yield memory[1] if memory else "sxm" if _SXM.fullmatch(part) else part
