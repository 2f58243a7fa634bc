"""Shares: the part of a device available to a replica."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuprof.domain.validation import check_fields
from gpuprof.errors import InputError

_CORES = re.compile(r"(?P<count>\d+(?:\.\d+)?)\s*cores?")
_PERCENT = re.compile(r"(?P<pct>\d+(?:\.\d+)?)\s*%?")
_MIG = re.compile(r"(?P<profile>\d+g\.\d+gb(?:[+-](?:me|gfx)(?:\.all)?)?)(?::(?P<pct>\d+(?:\.\d+)?)%?)?")


@check_fields
@dataclass(frozen=True, slots=True, order=True)
class Share:
    """A percentage of the compute units of a device, or of a MIG instance.

    Attributes
    ----------
    sm_pct : float
        Percent, in (0, 100]: on a GPU the MPS active thread percentage, on a CPU the percentage of cores.
    mig : str or None
        MIG profile (``"3g.40gb"``) to which ``sm_pct`` refers; None: the whole device.

    Raises `InputError` when ``sm_pct`` is not in (0, 100].

    Examples
    --------
    >>> print(Share(50.0), Share(mig="3g.40gb"), Share(50.0, mig="3g.40gb"))
    50% 3g.40gb 3g.40gb:50%
    """

    sm_pct: float = 100.0
    mig: str | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.sm_pct <= 100.0:
            raise InputError(f"a share must be above 0 and at most 100 percent but got {self.sm_pct:g}")

    def __str__(self) -> str:
        percent = f"{self.sm_pct:g}%"
        if self.mig is None:
            return percent
        return self.mig if self.sm_pct == 100.0 else f"{self.mig}:{percent}"

    @property
    def is_whole(self) -> bool:
        """Whether the share is the whole device."""
        return self.mig is None and self.sm_pct == 100.0


def parse_share(text: str, compute_units: int) -> Share:
    """Parse ``"50"``, ``"50%"``, ``"1core"``, ``"0.5cores"``, ``"3g.40gb"`` or ``"3g.40gb:50"``.

    Raises `InputError` when the text has none of these forms or lies outside (0, 100] percent. ``text``: value of
    ``--share``; ``compute_units``: number on the device, of which cores are a percentage.

    Examples
    --------
    >>> print(parse_share("0.5cores", compute_units=4))
    12.5%
    >>> print(parse_share("3g.40gb:50", compute_units=108))
    3g.40gb:50%
    """
    stripped = text.strip().lower()
    if match := _CORES.fullmatch(stripped):
        cores = float(match["count"])
        if not 0.0 < cores <= compute_units:
            raise InputError(
                f"a share of {cores:g} cores does not fit a device of {compute_units}",
                f"ask for {compute_units}cores at most",
            )
        return Share(100.0 * cores / compute_units)
    if match := _MIG.fullmatch(stripped):
        return Share(float(match["pct"] or 100.0), match["profile"])
    if match := _PERCENT.fullmatch(stripped):
        return Share(float(match["pct"]))
    raise InputError(
        f"cannot read the share {text!r}", "write a percentage (50), cores (1core) or a MIG profile (3g.40gb)"
    )
