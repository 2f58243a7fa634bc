"""Transmission time of a message by its size, interpolated between measured sizes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from gpuprof.errors import InputError
from gpuprof.simulator.trace import open_rows


@dataclass(frozen=True, slots=True)
class NetworkDelay:
    """Expected transmission time by size of the message: linear between the sizes, and on beyond the last two."""

    sizes_bytes: tuple[float, ...]  #: Ascending; two or more.
    latency_ms: tuple[float, ...]

    def ms(self, payload_bytes: float) -> float:
        """Return the transmission time in milliseconds."""
        last = len(self.sizes_bytes) - 1
        upper = min(last, max(1, int(np.searchsorted(self.sizes_bytes, payload_bytes))))
        (low, high), (at_low, at_high) = (pair[upper - 1 : upper + 1] for pair in (self.sizes_bytes, self.latency_ms))
        return max(0.0, at_low + (payload_bytes - low) / (high - low) * (at_high - at_low))


#: No network between the router and the replicas.
LOCAL = NetworkDelay((0.0, 1.0), (0.0, 0.0))
#: Network of the two machines of Elvinger's thesis (section 4.6.2): its measured round trip, and the single fitted
#: value that it prints, which is 9.2 Gbit/s.
THESIS = NetworkDelay((0.0, 9_633_792.0), (0.322, 8.7))


def read_measurements(path: Path) -> NetworkDelay:
    """Return the mean times by size from a CSV of ``payload_bytes,latency_ms``, a line per measurement.

    Raises `InputError` with the line for any other file, and for fewer than two sizes.
    """
    rows = open_rows(path)
    line, header = next(rows, (1, []))
    if header != ["payload_bytes", "latency_ms"]:
        raise InputError(f"{path}:{line}: the header must be payload_bytes,latency_ms but is {','.join(header)!r}")
    times: defaultdict[float, list[float]] = defaultdict(list)
    for line, row in rows:
        try:
            size, time = (float(cell) for cell in row)
        except ValueError:
            raise InputError(f"{path}:{line}: expected two numbers but got {','.join(row)!r}") from None
        if not (0 < size < np.inf and 0 <= time < np.inf):
            raise InputError(f"{path}:{line}: a size must be above 0 and a time at least 0 but got {','.join(row)!r}")
        times[size].append(time)
    if len(times) < 2:
        raise InputError(f"{path}: a network model needs two message sizes", "measure more sizes")
    sizes = tuple(sorted(times))
    return NetworkDelay(sizes, tuple(fmean(times[size]) for size in sizes))
