"""Parses neighbours: ``MODEL``, ``MODEL@batch``, ``MODEL@batch:share``."""

from __future__ import annotations

import re

from gpuprof.domain.device import Device
from gpuprof.domain.share import Share, parse_share
from gpuprof.errors import InputError

_NEIGHBOUR = re.compile(r"(?P<model>.+?)(?:[@:](?P<batch>\d{1,9})(?::(?P<share>[^:]+))?)?")


def read_neighbour(text: str, device: Device) -> tuple[str, int | None, Share | None]:
    """Parse ``"MODEL"``, ``"MODEL@batch"`` or ``"MODEL@batch:share"``; a colon may replace the ``@``.

    Raises `InputError` when the model is missing, or the share is invalid.

    Returns
    -------
    tuple of str, int or None, Share or None
        The model, its batch and its share; None for omitted parts.

    Examples
    --------
    >>> from gpuprof.domain.catalogue import device
    >>> read_neighbour("resnet50@4:50", device("a100-80"))
    ('resnet50', 4, Share(sm_pct=50.0, mig=None))
    """
    match = _NEIGHBOUR.fullmatch(text)
    if match is None:
        raise InputError(f"cannot read the neighbour {text!r}", "write MODEL, MODEL@batch or MODEL@batch:share")
    batch = None if match["batch"] is None else int(match["batch"])
    share = None if match["share"] is None else parse_share(match["share"], device.compute_units)
    return match["model"], batch, share
